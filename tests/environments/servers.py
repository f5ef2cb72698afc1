"""Other people's programs for tests of environments, each in an environment of its own (`make install-clients` and, by
hand, what docs/environments/verifiers.md and openenv.md say)."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.environments.foreign import data_set

ROOT = Path(__file__).resolve().parents[2]
AGENTS = ROOT / "examples" / "agent"
HUB = {"reverse-text": "PrimeIntellect/Reverse-Text-RL", "alphabet-sort": "kalomaze/alphabetic-arxiv-authors-it1"}
"""the data sets of verifiers' environments"""


def python(environment: str, *modules: str) -> Path:
    """The interpreter of an environment of clients; skips where it, or a module, is not there."""
    found = Path(sys.prefix) / "clients" / environment / "bin" / "python"
    if not found.exists():
        pytest.skip(f"{found.parents[1]} is not installed: docs/environments/agent.md, openenv.md and mcp.md say how")
    for module in modules:
        asked = f"import sys, importlib.util; sys.exit(importlib.util.find_spec({module!r}) is None)"
        if subprocess.run([found, "-c", asked], check=False).returncode:
            pytest.skip(f"{module} is not in {found.parents[1]}: docs/environments/verifiers.md says where it is got")
    return found


@contextmanager
def printing(command: list[str], **options: Any) -> Iterator[Iterator[str]]:
    """The lines of a process, which ends with the block."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
    try:
        assert child.stdout is not None
        yield child.stdout
    finally:
        child.kill()
        child.wait()


@contextmanager
def agents(
    file: str, interpreter: Path | str = sys.executable, folder: Path | None = None, **variables: str
) -> Iterator[str]:
    """The address of examples/agent/server.py with an agent of that folder. folder: where it is started."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "PYTHONPATH"))}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"  # uv is there
    command = [str(interpreter), str(AGENTS / "server.py"), str(AGENTS / file), "0"]
    with printing(command, env={**environ, **variables}, cwd=folder) as lines:
        yield next(line for line in lines if line.startswith("agents of")).split()[-1]


@contextmanager
def verifiers_agents(folder: Path, environment: str = "verifiers") -> Iterator[str]:
    """The same with reverse-text and alphabet-sort of verifiers, of two turns. Their data sets lie in the folder under
    the names that they have on the Hub. environment: of clients, "verifiers" (0.1) or "verifiers4"."""
    file = {"verifiers": "verifiers_agent.py", "verifiers4": "verifiers_v1_agent.py"}[environment]
    interpreter = python(environment, "verifiers", "reverse_text", "alphabet_sort")
    for kind, name in HUB.items():
        data_set(folder / name, kind)
    options = {"reverse-text": {}, "alphabet-sort": {"min_turns": 2, "max_turns": 2, "max_names_per_turn": 1}}
    variables = {"VERIFIERS": json.dumps(options), "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    with agents(file, interpreter, folder, **variables) as url:
        yield url


@contextmanager
def openenv() -> Iterator[str]:
    """The address of openenv_server.py, which is made with the classes of OpenEnv."""
    command = [str(python("openenv", "openenv")), str(Path(__file__).with_name("openenv_server.py"))]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with printing(command, env=environ) as lines:
        yield f"http://127.0.0.1:{int(next(lines))}"
