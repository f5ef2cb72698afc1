"""A limit on work that does not depend on what else the machine does."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """The block may take so many seconds of this process's processor time, all threads together."""
    start = time.process_time()
    yield
    taken = time.process_time() - start
    assert taken < seconds, f"{taken:.2f} s of processor time"
