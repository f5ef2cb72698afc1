"""Which completion kills engines: those that were under way at two deaths go on one at a time.

A completion that dies so once more, as the only one of them that was running, is given up: it ends with the reason
"abort", its group is left out of training, and `completions/aborted` counts it. All others come to their end.
"""

from __future__ import annotations

from shared.messages import GenerateRequest

DEATHS = 2
"""under which a completion may have been under way by accident"""
GIVEN_UP = "abort"


class Trial:
    """Of one engine rank, over all of its engine processes."""

    def __init__(self) -> None:
        self.waiting: list[GenerateRequest] = []
        """suspected, and in no engine"""
        self.told = ""
        """what came of the last death, for people; "" where it only means that everything goes on"""
        self._tried: GenerateRequest | None = None

    def sort(self, interrupted: list[GenerateRequest]) -> tuple[list[GenerateRequest], list[GenerateRequest]]:
        """What was running when an engine died -> (what goes on in the next one, what is given up)."""
        guilty = [request for request in interrupted if request is self._tried]
        innocent = [request for request in interrupted if request.completion.restarts < DEATHS]
        suspected = [request for request in interrupted if request not in innocent and request not in guilty]
        self.waiting, self._tried = [*suspected, *self.waiting], None
        self.told = "".join(
            f"; completion {request.completion.index} of group {request.completion.group} was running at "
            f"{request.completion.restarts} deaths: it is given up"
            for request in guilty
        )
        return innocent, guilty

    def next(self) -> GenerateRequest | None:
        """The next one to run, where none of them runs; None where there is nothing to do."""
        if not self.waiting or (self._tried is not None and self._tried.completion.finish_reason is None):
            return None
        self._tried = self.waiting.pop(0)
        return self._tried
