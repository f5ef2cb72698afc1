"""Scale on paper: `python -m lab.plan MODEL --gpus N [options]`; `--help` teaches with examples.

Prints memory, times, the best split and its settings.
"""

from __future__ import annotations

import json
import sys

from rich.console import Console

from lab.plan import report, split
from lab.plan.options import read
from shared.errors import InputError


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 2 bad input."""
    try:
        scenario, as_json = read(arguments)
        best = split.best(scenario)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if as_json:
        print(json.dumps(report.as_json(scenario, best), indent=2))
    else:
        Console(highlight=False).print(report.show(scenario, best, split.compared(scenario, best)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
