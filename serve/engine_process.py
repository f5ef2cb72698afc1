"""What the engine process does for the server: it dies with it, whatever kills the server.

vLLM imports this module in the process that holds the worker (`worker_extension_cls`).
What this does not do: generate. Who calls this: vLLM, by the name that engine.py gives it.
"""

from __future__ import annotations

from shared.watch import die_with_parent


class WorkerExtension:
    """Adds nothing to vLLM's worker: importing it is enough."""


die_with_parent()
