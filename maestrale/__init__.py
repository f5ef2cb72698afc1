"""What your own programs import: `from maestrale import Session, reward, verifier, environment, publish`.

A name is imported when it is asked for, so the process of a reward loads no torch. Once this package is imported,
`shared`, `trainer` and so on are ours, also where your folder has a file or folder of that name.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from environments.environment import Action as Action
    from environments.environment import Environment as Environment
    from environments.environment import Observation as Observation
    from environments.environment import environment as environment
    from trainer.objectives.objective import Objective as Objective
    from trainer.objectives.registry import publish as publish
    from trainer.session import Session as Session
    from verify.plugins import Case as Case
    from verify.plugins import group_reward as group_reward
    from verify.plugins import reward as reward
    from verify.verifiers import verifier as verifier

MODULES = {
    "Session": "trainer.session", "reward": "verify.plugins", "group_reward": "verify.plugins",
    "Case": "verify.plugins", "verifier": "verify.verifiers", "environment": "environments.environment",
    "Environment": "environments.environment", "Action": "environments.environment",
    "Observation": "environments.environment", "Objective": "trainer.objectives.objective",
    "publish": "trainer.objectives.registry",
}  # fmt: skip
"""public name -> its module"""
__all__ = ["__version__", *MODULES]  # noqa: PLE0604 - keys are names

try:
    __version__ = version("maestrale")
except PackageNotFoundError:  # a checkout that nothing has installed
    __version__ = "unknown"


HOME = str(Path(__file__).resolve().parents[1])
"""the checkout or the folder of the installation"""
ROOMS = (
    *("shared", "verify", "environments", "rollout", "trainer", "serve", "dashboard", "evaluation", "oversight"),
    *("curate", "lab", "examples"),
)
"""our packages at the top"""


class RoomFinder:
    """Finds our packages before those of the same name in the working folder."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The place of one of our packages; None for anything else."""
        return PathFinder.find_spec(name, [HOME]) if name in ROOMS and path is None else None


def come_first() -> None:
    """Let our packages be found first, and say in one line which of the working folder, or of the script's, they hide.
    Raises ImportError where another package or module of such a name is imported already."""
    for name in sys.modules.keys() & {*ROOMS}:
        module = sys.modules[name]
        file = module.__file__ or next(iter(module.__path__))
        if not Path(file).resolve().is_relative_to(HOME):
            raise ImportError(f"{file}: a package of maestrale has the name {name}, too: import maestrale first")
    folders = dict.fromkeys(Path(entry).resolve() for entry in ("", *sys.path[:1]))
    files = (folder / f"{name}{end}" for folder in folders for name in ROOMS for end in (".py", ""))
    hidden = [str(file) for file in files if str(file.parent) != HOME and file.exists()]
    if hidden:
        print(f"maestrale: its own packages hide {', '.join(hidden)}", file=sys.stderr)  # noqa: T201
    sys.meta_path.insert(0, RoomFinder)


come_first()


def __getattr__(name: str) -> Any:
    """A public name. Raises AttributeError for another one."""
    if name not in MODULES:
        raise AttributeError(f"maestrale has no {name!r}; it has {', '.join(sorted(MODULES))}")
    return getattr(import_module(MODULES[name]), name)
