"""A task of inspect-ai, unmodified: python inspect_client.py URL PROBLEMS FOLDER; prints its score as JSON.

PROBLEMS: JSONL of {"problem", "answer"}. FOLDER: for its log.
"""

import json
import os
import sys
from pathlib import Path

url, problems, folder = sys.argv[1:]
os.environ |= {"SERVED_BASE_URL": f"{url}/v1", "SERVED_API_KEY": "none", "INSPECT_DISPLAY": "none"}

from inspect_ai import Task, eval  # noqa: E402
from inspect_ai.dataset import MemoryDataset, Sample  # noqa: E402
from inspect_ai.scorer import pattern  # noqa: E402

rows = [json.loads(line) for line in Path(problems).read_text().splitlines()]
samples = [Sample(input=row["problem"], target=row["answer"], id=number) for number, row in enumerate(rows)]
task = Task(dataset=MemoryDataset(samples), scorer=pattern(r"\\boxed\{(-?\d+)\}"))
(log,) = eval(task, model="openai-api/served/tiny", log_dir=folder, display="none", temperature=0, max_retries=1)
assert log.status == "success", log.error
messages = {sample.id: sample.output.message for sample in log.samples}


def parts(message):
    """(reasoning, text) of a message."""
    if isinstance(message.content, str):
        return "", message.content
    return ("".join(part.reasoning for part in message.content if part.type == "reasoning"),
            "".join(part.text for part in message.content if part.type == "text"))  # fmt: skip


print(json.dumps({
    "accuracy": log.results.scores[0].metrics["accuracy"].value,
    "responses": [parts(messages[number]) for number in range(len(rows))],
    "thinking_tokens": sum(usage.reasoning_tokens or 0 for usage in log.stats.model_usage.values()),
}))  # fmt: skip
