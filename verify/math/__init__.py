"""Reads what an answer means: spelling, form, numbers, units, expressions, relations, regions.

Entry: `verify/symbolic.py`. Cheap and in the caller: `plain.py` over `normal.py`, `chinese.py`, `structure.py`,
`number.py`, `quantity.py`, `unit.py`, `altering.py`, `words.py`. In a killable process: `algebra.py` over `token.py`,
`expression.py`, `value.py`, `solved.py`, `relation.py`, `region.py`, `family.py`, `periodic.py`, `congruence.py`,
`builder.py`, `calculus.py`.
"""
