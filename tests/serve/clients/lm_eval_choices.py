"""A task of lm-evaluation-harness by log-likelihood: python lm_eval_choices.py URL PROBLEMS FOLDER.

It prints its score and the log-likelihoods as JSON. PROBLEMS: JSONL of {"problem", "choices", "answer"}. FOLDER: for
the task's file.
"""

import json
import os
import sys
from pathlib import Path

url, problems, folder = sys.argv[1:]
os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": folder, "OPENAI_API_KEY": "none"}

import lm_eval  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

TASK = rf"""
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {problems}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{problem}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""
tasks = Path(folder) / "tasks"
tasks.mkdir()
(tasks / "choices.yaml").write_text(TASK)
found = lm_eval.simple_evaluate(
    model="local-completions",
    model_args=f"model=tiny,base_url={url}/v1/completions,max_retries=1",
    tasks=["choices"], task_manager=TaskManager(include_path=str(tasks), include_defaults=False),  # not its own 14,000
    bootstrap_iters=0, batch_size=4,
)  # fmt: skip
samples = sorted(found["samples"]["choices"], key=lambda sample: sample["doc_id"])
print(json.dumps({
    "accuracy": found["results"]["choices"]["acc,none"],
    "log_likelihoods": [[response[0][0] for response in sample["resps"]] for sample in samples],
}))  # fmt: skip
