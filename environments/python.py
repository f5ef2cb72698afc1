"""The environment "python": tool-integrated reasoning. The policy runs Python programs, reads what they print, answers.

Each program runs in the sandbox that also runs programs that are graded, with the names that the earlier programs of
the episode leave, as the cells of a notebook: the earlier ones are run again before it, and their output is dropped.
So no process waits between turns, any sandbox will do, and an episode that is replayed after a restart sees the same.
Source: ToRA (2309.17452), for programs between steps of reasoning; ReTool (2504.11536), for learning them by reward.
"""

from __future__ import annotations

import functools

from environments.environment import Observation, environment
from environments.tools import ToolEnvironment, ToolError, ToolOptions, tool
from shared.sandbox_settings import Sandbox
from shared.types import Problem, Verdict
from verify.code.runner import ProgramVerifier
from verify.code.sandbox.client import Lost, SandboxRefused
from verify.plugins import Failed


class PythonOptions(ToolOptions):
    """Options of "python"."""

    sandbox: Sandbox | None = None
    """limits of a program, `test_s` for its time; not given: those of reward.sandbox"""


@functools.cache
def sandboxes(settings: Sandbox) -> ProgramVerifier:
    """The sandboxes of this process with these limits, which end with it."""
    return ProgramVerifier(settings)


@environment("python")
class Python(ToolEnvironment):
    """Offers a tool that runs programs; the verifier of the problem's domain grades the answer."""

    Options = PythonOptions
    options: PythonOptions

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """Begin with a notebook that has no cells."""
        self.cells: list[str] = []
        self.cpu_s = 0.0
        return await super().reset(problem, seed)

    @tool
    async def python(self, code: str) -> str:
        """Run a Python program with the standard library, and return what it prints and the value of its last
        expression. Names of earlier programs are still there."""
        try:
            result = await sandboxes(self.options.sandbox or self.rewards.sandbox).run_cells(
                [*self.cells, code], self.seed, self.cpu_s
            )
        except SandboxRefused as error:
            raise Failed(
                Verdict.SANDBOX_REFUSED, f'{error}, with sandbox.isolation = "none" in reward or the options of python'
            ) from error
        except Lost as error:
            raise Failed(Verdict.CRASH, str(error)) from error
        if result.stopped:
            lost = " What it changed is undone." if self.cells else ""
            raise ToolError(f"{result.stopped}.{lost}\n{result.printed}".rstrip())
        self.cells.append(code)
        self.cpu_s = result.cpu_s
        if result.raised:
            raise ToolError(f"the program raised an exception\n{result.printed}")
        return result.printed or "(it printed nothing)"
