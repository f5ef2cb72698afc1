"""The command `maestrale`: `maestrale train FILE`, `maestrale serve MODEL` and so on, from any folder.

`maestrale COMMAND ...` does what `python -m MODULE ...` does, but a file or folder of yours with the name of a module
(`trainer.py`, `shared/`) never takes that module's place.
"""

import difflib
import io
import json
import os
import runpy
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import maestrale
from shared.child_process import python_path
from shared.errors import STARTED, as_typed, python, run_command


class Command(NamedTuple):
    """A command of this one."""

    module: str
    meaning: str
    first: tuple[str, ...] = ()
    """words before the user's"""


COMMANDS = {
    "train": Command("trainer", "train a model: a settings file, or a ready one (quickstart, guess, own, ...)"),
    "check": Command(
        "trainer", "look at the machine, the settings, the model and every row; start nothing", ("check",)
    ),
    "objectives": Command("trainer", "list the objectives, or explain one", ("objectives",)),
    "report": Command("trainer.report", "what a run did, how fast it was, what to try"),
    "dashboard": Command("dashboard", "runs in a browser"),
    "serve": Command("serve", "a model over HTTP, for OpenAI's clients, with a chat page"),
    "evaluate": Command("evaluation", "measure a served model"),
    "grade": Command("verify", "grade finished responses"),
    "curate": Command("curate", "prepare data: formats, duplicates, difficulty, labels, translation"),
    "ablate": Command("lab.ablate", "compare settings over seeds"),
    "plan": Command("lab.plan", "memory, times and the split of GPUs on paper"),
}


def usage() -> str:
    """What `maestrale --help` prints."""
    lines = [f"  {name:12}{command.meaning}" for name, command in COMMANDS.items()]
    return "\n".join([
        "usage: maestrale COMMAND [...]     maestrale COMMAND --help tells more", "", *lines, "",
        "start here: maestrale train quickstart     (a tiny model, five minutes on two cores)",
    ])  # fmt: skip


def main() -> int:
    """Run a command; returns its exit code. 2: there is no such command, or a package is missing that it needs."""
    return run_command(run)


def run() -> int:
    """`main` without the handling of errors."""
    name, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    if name in ("--help", "-h", "help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"maestrale {maestrale.__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(COMMANDS)}"
        print(f"error: '{name}' is no command of maestrale: {hint}", file=sys.stderr)
        return 2
    os.environ.update(python_path())
    command, typed = COMMANDS[name], called()
    commands = {" ".join([one.module, *one.first]): f"{typed} {word}" for word, one in COMMANDS.items()}
    os.environ[STARTED] = json.dumps(commands)
    sys.argv[1:] = [*command.first, *rest]
    printed = io.StringIO()
    try:
        with redirect_stdout(printed if {"--help", "-h"} & set(rest) else sys.stdout):
            runpy.run_module(command.module, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in maestrale.ROOMS:
            raise
        extra = "evaluation" if package in ("numpy", "scipy", "datasketch") else "cpu] or .[cuda"
        print(
            f"error: maestrale {name} needs {package}, which the base installation leaves out: install the checkout "
            f"with .[{extra}] (docs/install.md)", file=sys.stderr,
        )  # fmt: skip
        return 2
    finally:
        sys.stdout.write(as_typed(printed.getvalue()))
    return 0


def called() -> str:
    """How the user calls this command."""
    path = Path(sys.argv[0]).absolute()
    if path.name == "__main__.py":
        return f"{python()} -m maestrale"
    found = shutil.which(path.name)
    return path.name if found and path.samefile(found) else os.path.relpath(path)


if __name__ == "__main__":
    sys.exit(main())
