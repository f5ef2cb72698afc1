"""Sandboxes in which programs of a model run: isolation, limits, and the messages between a sandbox and its owner.

Inside a sandbox (standard library only, no import of the rest of the project): `syscalls.py` (system calls),
`seccomp.py` (seccomp), `landlock.py` (files), `namespaces.py` (own root, processes, network), `folders.py` (work
folders), `server.py` (the server that forks one child per test), `program_process.py` and `assertion_runner.py` (what
the child runs), `codec.py` and `codec.py` (values as data). Outside: `client.py` (start, talk, kill) and `protocol.py`
(frames).
"""
