"""A task of lm-evaluation-harness, unmodified: python lm_eval_client.py URL PROBLEMS FOLDER; prints its score as JSON.

PROBLEMS: JSONL of {"problem", "answer"}. FOLDER: for the task's file.
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
task: apples
dataset_path: json
dataset_kwargs: {{data_files: {{test: {problems}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{problem}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: [], max_gen_toks: 300, do_sample: false, temperature: 0}}
filter_list:
  - name: boxed
    filter:
      - {{function: regex, regex_pattern: '\\boxed\{{(-?\d+)\}}', group_select: -1}}
      - {{function: take_first}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
tasks = Path(folder) / "tasks"
tasks.mkdir()
(tasks / "apples.yaml").write_text(TASK)
found = lm_eval.simple_evaluate(
    model="local-chat-completions",
    model_args=f"model=tiny,base_url={url}/v1/chat/completions,num_concurrent=4,max_retries=1,eos_string=none",
    tasks=["apples"], task_manager=TaskManager(include_path=str(tasks)), apply_chat_template=True, bootstrap_iters=0,
)  # fmt: skip
samples = sorted(found["samples"]["apples"], key=lambda sample: sample["doc_id"])
print(json.dumps({
    "accuracy": found["results"]["apples"]["exact_match,boxed"],
    "responses": [sample["resps"][0][0] for sample in samples],
}))  # fmt: skip
