"""Put rows through a stage of curation, as its runner does."""

import asyncio
from typing import Any

from curate.stage import CurationStage, Decision, Rejected
from shared.jsonl import Row


def decide_rows(stage: CurationStage, rows: list[dict[str, Any]]) -> list[Decision]:
    """[rows] decisions, in order."""

    async def work() -> list[Decision]:
        held = [Row(f"file:{number}", number, fields) for number, fields in enumerate(rows, 1)]
        try:
            await stage.prepare(held, lambda done, total: asyncio.sleep(0))
            return list(await asyncio.gather(*(stage.decide(index, row) for index, row in enumerate(held))))
        finally:
            await stage.close()

    return asyncio.run(work())


def reasons_of(stage: CurationStage, rows: list[dict[str, Any]]) -> list[str]:
    """ "kept", or the reason, of each row."""
    return [one.reason if isinstance(one, Rejected) else "kept" for one in decide_rows(stage, rows)]
