"""What `make test` could not run here, by class: why, and what brings it. Printed after the last test."""

import re
from collections import Counter
from collections.abc import Iterable

CLASSES = {
    "no NVIDIA GPU, or too few": (r"NVIDIA GPU|CUDA device", "make test on a machine that has them"),
    "programs of the system": (
        r"[Cc]hromium|g\+\+|C compiler|tcmalloc|Python's headers",
        "apt install chromium g++ libtcmalloc-minimal4 python3-dev",
    ),
    "rights": (r"root|namespace|veth|mount|control group|throttled|isolate", "run as root, on a host that allows them"),
    "a real model": (r"llm.smollm2|make smollm2", "make smollm2, then .venv/bin/python -m examples.quickstart.smollm2"),
    "problem sets": (r"problem sets", "../shared/data, a folder of public problem sets beside the checkout"),
    "other people's programs": (r"make install-clients|docs/environments", "make install-clients install-environments"),
    "optional packages": (
        r"the extra|could not import|(is|are) not installed|torchvision",
        '.venv/bin/uv pip install --python .venv/bin/python -e ".[wandb,trackio,mlflow]" peft',
    ),
    "another kind of machine": (r"", "the reasons stand above"),
}
"""class -> (what its reasons have in common, what brings it); the first that fits"""


def summary(reasons: Iterable[str]) -> list[str]:
    """One line for each class of tests that were skipped for these reasons."""
    counts = Counter(class_of(reason) for reason in reasons)
    return [f"{counts[name]} not run: {name} ({remedy})" for name, (_, remedy) in CLASSES.items() if counts[name]]


def class_of(reason: str) -> str:
    """The class of a reason."""
    return next(name for name, (words, _) in CLASSES.items() if re.search(words, reason))
