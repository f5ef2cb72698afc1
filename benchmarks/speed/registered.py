"""Every speed benchmark by name: the module whose `rows(task)` measures it.

A module may be a command of its own too.
"""

from __future__ import annotations

BENCHMARKS = {
    "end_to_end": "benchmarks.speed.end_to_end",
    "cut_short": "benchmarks.speed.cut_short",
    "training": "benchmarks.speed.training",
    "rollout": "benchmarks.speed.rollout",
    "weight_update": "benchmarks.weight_update",
    "weight_growth": "benchmarks.speed.weight_growth",
    "asynchrony": "benchmarks.speed.asynchrony",
    "packing": "benchmarks.speed.packing",
    "controller": "benchmarks.speed.controller",
    "startup": "benchmarks.speed.startup",
}
ABOUT = {
    "end_to_end": "a real launch on SmolLM2-135M beside TRL's GRPOTrainer: steps, trained tokens, memory",
    "cut_short": "the same with completions that are cut off at 128 tokens",
    "training": "one trainer rank's step beside matrix products and a transformers loop; scaling; memory of the head",
    "rollout": "tokens a second through worker, wire, ledger and verifier against raw vLLM, cost of log-probs",
    "weight_update": "trainers' write against memcpy, decode stall of a running engine",
    "weight_growth": "weight updates of 10 MB to 2 GB, one engine and two, against memcpy and the oneDNN repack alone",
    "asynchrony": "step time with async level 0 to 4 against max(generation, training), scripted engines and trainers",
    "packing": "padding and imbalance of greedy collation against arrival order, and its time",
    "controller": "groups a second of one controller with 10, 100 and 1,000 scripted engines, memory",
    "startup": "seconds from the launch of the quickstart to its first trained step, by phase",
}
