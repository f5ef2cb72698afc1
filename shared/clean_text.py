"""Text of others made safe to show: on a terminal, in a log, in a summary."""

from __future__ import annotations

import logging
import re

UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u206f\ud800-\udfff\ufff9-\ufffb]")
"""control characters but tabs and new lines, with which escape sequences begin; other separators of lines; overrides of
the direction of writing; halves of characters"""


def clean(text: str) -> str:
    """The text with "·" for each character that could do more than be seen: move the cursor, set a title or colour,
    turn the order of letters round. Letters of every script, marks on them and emoji stay."""
    return UNSAFE.sub("·", text)


class CleanRecord(logging.LogRecord):
    """A log record whose message is clean."""

    def getMessage(self) -> str:
        """Return the message."""
        return clean(super().getMessage())


def clean_logs() -> None:
    """Make the messages of all loggers of this process clean from now on, those of libraries too."""
    logging.setLogRecordFactory(CleanRecord)
