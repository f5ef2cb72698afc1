"""Grades the text of a completion: format, final answer, equality of answers, language, length, and the reward.

No module here imports torch or depends on engines or trainers. Reading order: `reward.py` (the sum), then
`format.py`, `extract.py`, `symbolic.py` (equality of answers, over the folder `math`), `pool.py` (killable processes),
`program.py` (programs and their tests, over the folder `code`), `language.py`, `length.py`, `plugins.py` (rewards by
name). `python -m verify` grades files: `__main__.py`, `records.py`, `summary.py`.
"""
