"""Tables of cases beside the tests that read them: one JSON object a line."""

import json
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


def read_table(name: str, **values: str) -> list[dict[str, Any]]:
    """The rows of tests/`name`.jsonl that have these values."""
    lines = (TESTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if values.items() <= row.items()]
