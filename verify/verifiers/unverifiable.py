"""The domain "open": its ground truth may be any text, to be learned from, and nothing is compared with it."""

from __future__ import annotations

from verify.verifiers import NOT_VERIFIED, Answer, Finding, verifier


@verifier("open", verifies=False)
def nothing_is_compared(_: Answer) -> Finding:
    """Return OPEN: the answer is neither right nor wrong."""
    return NOT_VERIFIED
