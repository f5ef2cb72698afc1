"""Text of others made safe to show: on a terminal, in a log, in a summary."""

from __future__ import annotations

import codecs
import io
import logging
import os
import re
import sys
import threading
import traceback
from contextlib import suppress
from functools import cache
from typing import Any, TextIO

FLAG = "\U0001f3f4[\U000e0020-\U000e007e]{2,6}\U000e007f"
"""the flag of a region, such as Scotland's, whose letters are tags"""
UNSAFE = re.compile(
    f"({FLAG})|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u206f\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""control characters but tabs and new lines, with which escape sequences begin; other separators of lines; overrides of
the direction of writing; halves of characters; tags outside a flag, in which unseen words are written"""


def clean(text: str) -> str:
    """The text with "·" for each character that could do more than be seen: move the cursor, set a title or colour,
    turn the order of letters round. Letters of every script, marks on them and emoji stay."""
    return UNSAFE.sub(lambda sign: sign[1] or "·", text)


class CleanRecord(logging.LogRecord):
    """A log record whose message and traceback are clean."""

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        if self.exc_info:
            self.exc_text = clean(logging.Formatter().formatException(self.exc_info))

    def getMessage(self) -> str:
        """Return the message."""
        return clean(super().getMessage())


def clean_logs() -> None:
    """Make the messages of all loggers of this process clean, and the traceback with which it may end."""
    logging.setLogRecordFactory(CleanRecord)
    sys.excepthook = lambda kind, error, at: print_traceback(error)


def print_traceback(error: BaseException) -> None:
    """Print the traceback of an error, whose message may quote others."""
    sys.stderr.write(clean("".join(traceback.format_exception(error))))


class CleanStream(io.TextIOWrapper):
    """A stream that writes texts clean, each at once."""

    def __init__(self, descriptor: int):
        super().__init__(open(descriptor, "wb", 0, closefd=False), "utf-8", write_through=True)  # noqa: SIM115

    def write(self, text: str, /) -> int:
        """Write it; returns the number of characters."""
        return super().write(clean(text))


@cache
def clean_errors() -> TextIO:
    """A pipe for the standard error of commands of others: what comes there goes on to that of this process, clean."""
    source, sink = os.pipe()

    def pass_on() -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while data := os.read(source, 1 << 16):
            with suppress(OSError):  # nobody reads it any more
                os.write(2, clean(decoder.decode(data)).encode())

    threading.Thread(target=pass_on, name="errors of commands", daemon=True).start()
    return open(sink, "w")
