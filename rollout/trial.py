"""Finds completions that kill engines: those that were running at two deaths continue one at a time.

A completion that is then running at a further death, as the only one of them, is given up: it ends with the reason
"abort", its group is left out of training, and `completions/aborted` counts it. All others are completed.
"""

from __future__ import annotations

from shared.launch.messages import GenerateRequest

DEATHS = 2
"""a completion that was running at fewer deaths is not suspected"""
GIVEN_UP = "abort"


class Trial:
    """Tracks the suspected completions of one engine rank, over all of its engine processes."""

    def __init__(self) -> None:
        self.waiting: list[GenerateRequest] = []
        """suspected completions that are in no engine"""
        self.report = ""
        """text that names the completions given up after the last death; "" if all continue"""
        self._tried: GenerateRequest | None = None

    def sort(self, interrupted: list[GenerateRequest]) -> tuple[list[GenerateRequest], list[GenerateRequest]]:
        """Split what was running when an engine died: (to continue at once, given up); suspects go to `waiting`."""
        guilty = [request for request in interrupted if request is self._tried]
        innocent = [request for request in interrupted if request.completion.restarts < DEATHS]
        suspected = [request for request in interrupted if request not in innocent and request not in guilty]
        self.waiting, self._tried = [*suspected, *self.waiting], None
        self.report = "".join(
            f"; completion {request.completion.index} of group {request.completion.group} was running at "
            f"{request.completion.restarts} deaths: it is given up"
            for request in guilty
        )
        return innocent, guilty

    def next(self) -> GenerateRequest | None:
        """Return the next suspected request to run; None while one of them runs, or if none waits."""
        if not self.waiting or (self._tried is not None and self._tried.completion.finish_reason is None):
            return None
        self._tried = self.waiting.pop(0)
        return self._tried
