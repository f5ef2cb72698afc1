"""Files that a setting names: one that is not there; one of Python (a reward, a preparation of the user's) is run."""

from __future__ import annotations

import difflib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from shared.errors import ConfigError, MaestraleError


def missing(path: Path, kind: str = "file", pattern: str = "*", names: Iterable[str] = ()) -> str:
    """What an error says of a path that is no `kind`, with the nearest of the paths beside it that match `pattern`, and
    of other `names`."""
    if path.exists():
        return f"it is no {kind}"
    others = {other.name: str(other) for other in path.parent.glob(pattern)} | {Path(name).name: name for name in names}
    near = difflib.get_close_matches(path.name, others, n=1)
    return f"there is no such {kind}" + (f"; did you mean {others[near[0]]}?" if near else "")


def run_file(path: Path, setting: str) -> ModuleType:
    """Run a file as a module of this process. setting: the one that names it, for messages.

    Raises ConfigError for a path that is no Python file, and for a file that fails or exits, with its line.
    """
    spec = importlib.util.spec_from_file_location(f"maestrale_file_{abs(hash(path)):x}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{setting} names '{path}': not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with errors_told(path, setting):
        spec.loader.exec_module(module)
    return module


@contextmanager
def errors_told(path: Path, setting: str) -> Iterator[None]:
    """Raise ConfigError with the file's line for what its code raises, except for errors of this project."""
    try:
        yield
    except MaestraleError:
        raise
    except (Exception, SystemExit) as error:
        lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == str(path)]
        where = f" in line {lines[-1]}" if lines else ""
        raise ConfigError(f"{setting}: {path} fails with {type(error).__name__}: {error}{where}") from error
