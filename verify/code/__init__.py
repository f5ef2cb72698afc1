"""Runs a program on its tests: the exam as data, one sitting, outputs compared outside of the sandbox.

Entry: `verify/code/runner.py`. Reading order: `tests.py` (tests), `program_run.py` (one program, one exam),
`output.py`, `verdict.py`, `cpp.py` (compiling), `sandbox_pool.py` (sandboxes of a process), and the folder `sandbox`
(isolation).
"""
