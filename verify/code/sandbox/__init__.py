"""Sandboxes in which programs of a model run: isolation, limits, and the messages between a sandbox and its owner.

Inside a sandbox (standard library only, no import of the rest of the project): `server.py` (forks one child per test),
`program_process.py` and `assertion_runner.py` (what the child runs), `codec.py` (values as data), `isolation.py`
(namespaces, files), `seccomp.py` (system calls that are refused) and `syscalls.py`. Outside: `client.py` (start, talk,
kill) and `protocol.py` (frames).
"""
