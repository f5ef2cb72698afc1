"""A module that is imported when it is first used: one that takes seconds, in files that commands need without it."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """Stands for a module until one of its names is asked for: `torch = LazyModule("torch")`, unless TYPE_CHECKING."""

    def __getattr__(self, name: str) -> Any:
        """A name of the module, which is imported now."""
        return getattr(importlib.import_module(self.__name__), name)
