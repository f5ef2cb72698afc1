"""The ledger in a checkpoint: ledger.msgpack, and what each engine had of unfinished completions, engine-N.msgpack.

ledger.msgpack      LedgerState without groups; then each group without its completions, and these, one record each
engine-0.msgpack    completions of an engine, written by its rank
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from shared import record_file
from shared.record_file import Written
from shared.types import Completion, Group
from trainer.ledger import LedgerState, with_unfinished

LEDGER, ENGINES = "ledger.msgpack", "engine-*.msgpack"


def write(folder: Path, state: LedgerState) -> Written:
    """Write a state, which nobody changes meanwhile, into a checkpoint. Raises CheckpointError."""
    return record_file.write(folder / LEDGER, _records(state))


def _records(state: LedgerState) -> Iterator[msgspec.Struct]:
    yield msgspec.structs.replace(state, groups=[], filtered_since_step=[])
    for group in (*state.groups, *state.filtered_since_step):
        yield msgspec.structs.replace(group, completions=[])
        yield from group.completions


def read(folder: Path) -> LedgerState:
    """Read what ledger and engines wrote. Raises ValueError for a file that is damaged, and OSError."""
    records = record_file.read(folder / LEDGER)
    state = msgspec.msgpack.decode(next(records, b""), type=LedgerState)
    decode_group, decode = msgspec.msgpack.Decoder(Group).decode, msgspec.msgpack.Decoder(Completion).decode
    for content in records:
        group = decode_group(content)
        group.completions = [decode(next(records, b"")) for _ in group.rewards]
        (state.groups if len(state.groups) < len(state.overtaken) else state.filtered_since_step).append(group)
    return with_unfinished(state, (decode(part) for path in folder.glob(ENGINES) for part in record_file.read(path)))
