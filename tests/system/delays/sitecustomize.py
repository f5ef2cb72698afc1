"""Every point at which trainers and engines meet for a weight transfer comes after a random delay, in every process of
a launch that has this folder on its PYTHONPATH (Launch's `delay_s`). What was delayed is written down, a line each."""

import functools
import importlib.abc
import importlib.machinery
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

MODULE = "rollout.weights.network"
POINTS = {
    "Chain": ("__init__", "_join", "announce", "hear", "exchange"),
    "NetworkSender": ("__init__", "send", "wait_until_free", "_deliver"),
    "NetworkReceiver": ("__init__", "wait_for", "_take_part", "_wait_for_slot"),
}


def delayed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        time.sleep(random.uniform(0, float(os.environ["DELAY_S"])))
        with open(os.environ["DELAYS"], "a") as file:
            file.write(f"{os.environ.get('RANK')} {name}\n")
        return function(*arguments, **named)

    return call


class Delays(importlib.abc.MetaPathFinder):
    """Lets Python find the module, and changes its functions when it has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != MODULE:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        assert found is not None and found.loader is not None
        run = found.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            for kind, points in POINTS.items():
                place = getattr(module, kind)
                for point in points:
                    setattr(place, point, delayed(f"{kind}.{point}", getattr(place, point)))

        found.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return found


if "DELAYS" in os.environ:
    sys.meta_path.insert(0, Delays())
