"""Put rows through a stage of curation, as its runner does."""

from __future__ import annotations

import asyncio
from typing import Any

from curate.stage import CurationStage, Decision
from shared.jsonl import Row


def decide_rows(stage: CurationStage, rows: list[dict[str, Any]]) -> list[Decision]:
    """[rows] decisions, in order."""

    async def work() -> list[Decision]:
        held = [Row(f"file:{number}", number, fields) for number, fields in enumerate(rows, 1)]
        await stage.prepare(held, lambda done, total: asyncio.sleep(0))
        try:
            return [await stage.decide(index, row) for index, row in enumerate(held)]
        finally:
            await stage.close()

    return asyncio.run(work())
