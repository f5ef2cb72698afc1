"""Every speed benchmark by name: the module whose `rows(task)` measures it.

A module may be a command of its own too. What it does not: import them (each runs in a process of its own, one.py).
Who calls this: `python -m benchmarks.speed`.
"""

from __future__ import annotations

BENCHMARKS = {
    "end_to_end": "benchmarks.speed.end_to_end",
    "training": "benchmarks.speed.training",
    "weight_update": "benchmarks.weight_update",
    "asynchrony": "benchmarks.speed.asynchrony",
    "packing": "benchmarks.speed.packing",
    "controller": "benchmarks.speed.controller",
}
ABOUT = {
    "end_to_end": "a real launch on SmolLM2-135M beside TRL's GRPOTrainer: steps, trained tokens, memory",
    "training": "one trainer rank's step beside matrix products and a transformers loop; scaling; memory of the head",
    "weight_update": "trainers' write against memcpy, decode stall of a running engine",
    "asynchrony": "step time with lead 0 to 4 against max(generation, training), scripted engines and trainers",
    "packing": "padding and imbalance of greedy collation against arrival order, and its time",
    "controller": "groups a second of one controller with 10, 100 and 1,000 scripted engines, memory",
}
