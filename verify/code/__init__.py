"""Runs a program on its tests: tests as data, one run of a program, outputs compared outside of the sandbox.

Entry: `runner.py`. Reading order: `tests.py`, `program_run.py` (one program on its tests), `output.py`, `cpp.py`
(compiling), `sandbox_pool.py` (the sandboxes of a process), and the folder `sandbox` (isolation).
"""
