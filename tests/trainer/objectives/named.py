"""The names of all objectives: those of the product, and those of examples/objectives/, by their paths."""

from pathlib import Path

from trainer.objectives.registry import OBJECTIVES, PublishedObjective, find, load_all

load_all()
EXAMPLES = sorted(path.stem for path in Path("examples/objectives").glob("*.py") if path.stem != "__init__")


def example(name: str) -> str:
    """objective.name of an example."""
    return f"examples/objectives/{name}.py:{name}"


NAMES = {name: name for name in OBJECTIVES} | {name: example(name) for name in EXAMPLES}
"""name as published -> objective.name"""
PUBLISHED: dict[str, PublishedObjective] = {name: find(full) for name, full in NAMES.items()}
