"""Scale on paper: `python -m lab.plan MODEL --gpus N [options]`; `--help` teaches with examples.

Prints memory, times, the best split and its settings.
"""

from __future__ import annotations

import json
import sys

from rich.console import Console

from lab.plan import report, split
from lab.plan.options import Question, read
from lab.plan.split import Plan
from shared.errors import ConfigError, InputError

COMPARED_LEADS = (1, 2, 3, 4)
"""in the table of other splits"""


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 2 bad input."""
    try:
        asked = read(arguments)
        plan = chosen(asked)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if asked.as_json:
        print(json.dumps(report.as_json(plan, asked.decoder, asked.machine, asked.work), indent=2))
    else:
        others = compared(asked, plan)
        Console(highlight=False).print(report.show(plan, asked.decoder, asked.machine, asked.work, others))
    return 0


def chosen(asked: Question) -> Plan:
    """The best plan, or the one that the options fix. Raises ConfigError where nothing fits."""
    if not asked.engines:
        return split.best(asked.decoder, asked.machine, asked.work, asked.lead, asked.tensor_parallel)
    lead = asked.lead or 1
    plan = split.place(asked.decoder, asked.machine, asked.work, asked.engines, asked.tensor_parallel, lead)
    if plan is None:
        raise ConfigError(
            f"--engines {asked.engines} of {asked.tensor_parallel} GPUs leave "
            f"{asked.machine.gpus - asked.engines * asked.tensor_parallel} of {asked.machine.gpus} GPUs to train: that "
            "does not fit. Without --engines the best split that fits is found"
        )
    return plan


def compared(asked: Question, plan: Plan) -> list[Plan]:
    """The plan among the best of every lead and of every engine width, and its neighbours, by step time."""
    decoder, machine, work = asked.decoder, asked.machine, asked.work
    found = [plan]
    for width in split.widths(decoder, machine):
        found += sorted(split.splits(decoder, machine, work, plan.lead, width), key=lambda one: one.asynchronous_s)[:1]
    for lead in COMPARED_LEADS:
        found.append(split.best(decoder, machine, work, lead, plan.tensor_parallel))
    for engines in (plan.engines - 1, plan.engines + 1):
        near = split.place(decoder, machine, work, engines, plan.tensor_parallel, plan.lead) if engines else None
        found += [near] if near else []
    unlike = {(one.engines, one.tensor_parallel, one.lead): one for one in found}
    return sorted(unlike.values(), key=lambda one: one.asynchronous_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
