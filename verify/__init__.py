"""Text in, verdict out: format, final answer, equality of answers, language, length, and the reward made of them.

Nothing here imports torch, and nothing here knows engines or trainers. Reading order: `reward.py` (the sum), then
`format.py`, `extract.py`, `symbolic.py` (equality), `pool.py` (killable processes), `language.py`, `length.py`,
`plugins.py` (rewards by name). Code: `program.py`, then `exam.py`, `sitting.py`, `output.py`, `cpp.py`, `seats.py` and
the folder `sandbox` (isolation). `python -m verify` grades files: `__main__.py`, `records.py`, `summary.py`.
"""
