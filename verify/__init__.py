"""Checks the text of a completion: format, answer, language, length, and the reward that they sum to.

No module here imports torch or depends on engines or trainers. Reading order: `reward.py` (the sum), `format.py` and
`extract.py` (its parts), `verifiers` (one file a domain), `answer_checker.py` (equality of answers in killable
processes, over the folder `math`), `code` (programs and their tests, in sandboxes), `language.py`, `plugins.py`
(rewards by name), `chosen_rewards.py` (those of the settings), `scorer.py` (for a run). `python -m verify`
grades files: `__main__.py`, `records.py`.
"""
