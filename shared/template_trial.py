"""A chat template is a program of whoever made the folder: it runs first in a process that is killed if it does not
end.

What loops without end, or takes all memory, does so there: with the conversations by which a template's form is found,
and with a long one. Later renderings have no deadline. They cost in proportion to those, unless the template asks for
certain words; who writes such a template could as well let the model say anything.
"""

from __future__ import annotations

import os
import resource
import signal
import warnings
from collections.abc import Callable

from shared.errors import ModelError

CPU_S, WALL_S, BYTES = 20, 120, 2 << 30
"""limits of the process: processor time, time, memory in addition to that at its start"""
NO_MEMORY = 3
_tried: dict[str, str] = {}
"""template that this process has tried -> its error, "" for none"""


def try_template(key: str, render: Callable[[], object], where: str) -> None:
    """Call `render` in a forked process, once for each key; what it raises is ignored there. where: whose template it
    is. Raises ModelError for one that does not end in CPU_S or takes more than BYTES."""
    if key not in _tried:
        _tried[key] = _fault(render)
    if _tried[key]:
        raise ModelError(
            f"{where} {_tried[key]} for a conversation: it is no template of a language model; take the model from "
            "where it was published, or give another template (model.chat_template)"
        )


def _fault(render: Callable[[], object]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads: the child needs none of them
        child = os.fork()
    if not child:
        try:
            os._exit(_render(render))
        finally:
            os._exit(1)
    try:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except BaseException:  # as of Ctrl-C
        os.kill(child, signal.SIGKILL)
        raise
    if status == NO_MEMORY:
        return f"needs more than {BYTES >> 30} GiB"
    return f"does not end in {CPU_S} s" if status else ""


def _render(render: Callable[[], object]) -> int:
    for number in (signal.SIGALRM, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    signal.alarm(WALL_S)  # a lock of another thread may have been taken when this process was forked
    with open("/proc/self/statm", encoding="ascii") as file:
        begun = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (begun + BYTES, begun + BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    try:
        render()
    except MemoryError:
        return NO_MEMORY
    except BaseException:  # noqa: BLE001 - a template raises what it likes; the next rendering reports it
        return 0
    return 0
