"""Put rows through a stage of curation, as its runner does."""

from __future__ import annotations

import asyncio
from typing import Any

from curate.stage import Decision, Stage
from shared.jsonl import Row


def judge_rows(stage: Stage, rows: list[dict[str, Any]]) -> list[Decision]:
    """[rows] decisions, in order."""

    async def work() -> list[Decision]:
        held = [Row(f"file:{number}", number, fields) for number, fields in enumerate(rows, 1)]
        await stage.prepare(held, lambda done, total: asyncio.sleep(0))
        try:
            return [await stage.judge(index, row) for index, row in enumerate(held)]
        finally:
            await stage.close()

    return asyncio.run(work())
