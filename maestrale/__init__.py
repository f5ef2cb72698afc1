"""What your own programs import: `from maestrale import Session, reward, verifier, environment, publish`.

A name is imported when it is asked for, so the process of a reward loads no torch.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
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


def __getattr__(name: str) -> Any:
    """A public name. Raises AttributeError for another one."""
    if name not in MODULES:
        raise AttributeError(f"maestrale has no {name!r}; it has {', '.join(sorted(MODULES))}")
    return getattr(import_module(MODULES[name]), name)
