"""Boxes in which programs of a model run: isolation, limits, and the messages between a box and its owner.

Inside a box (standard library only, no import of the rest of the project): `kernel.py` (system calls), `filter.py`
(seccomp), `landlock.py` (files), `namespaces.py` (own root, processes, network), `folders.py` (work folders),
`box.py` (the server that forks one child per test), `child.py` and `examiner.py` (what the child runs), `codec.py` and
`frames.py` (values as data).
Outside: `client.py` (start, talk, kill) and `conversation.py` (frames).
"""
