"""Runs a program on its tests: the exam as data, one sitting, outputs compared outside of the box.

Entry: `verify/program.py`. Reading order: `exam.py` (tests), `sitting.py` (one program, one exam), `output.py`,
`result.py`, `cpp.py` (compiling), `seats.py` (boxes of a process), and the folder `sandbox` (isolation).
"""
