"""What several files of this room share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from verify import answer_checker


@pytest.fixture(scope="module")
def unhurried() -> Iterator[None]:
    """The blocking checker waits for minutes, not for two seconds: on a busy machine an easy sum may take them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer_checker, "BLOCKING_DEADLINE_S", 120.0)
        patch.setattr(answer_checker, "_background", None)
        yield
        if answer_checker._background is not None:
            answer_checker._background.close()
