"""Reads what an answer means: spelling, form, numbers, units, expressions, relations, sets.

Entry: `verify/answer_checker.py`. Cheap and in the caller: `plain.py` over `pair.py`, `normal.py`, `dress.py`,
`chinese.py`, `structure.py`,
`number.py`, `quantity.py`, `unit.py`, `altering.py`, `words.py`. In a killable process: `algebra.py` over `token.py`,
`expression.py`, `value.py`, `solved.py`, `relation.py`, `real_sets.py`, `integer_sets.py`, `periodic.py`,
`congruence.py`, `builder.py`, `calculus.py`.
"""
