"""Tasks of lm-evaluation-harness, unmodified, one by responses and one by log-likelihood: python lm_eval_client.py URL
PROBLEMS CHOICES FOLDER; prints their scores as JSON.

PROBLEMS: JSONL of {"problem", "answer"}. CHOICES: of {"problem", "choices", "answer"}. FOLDER: for the tasks' files.
"""

import json
import os
import sys
from pathlib import Path

url, problems, choices, folder = sys.argv[1:]
os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": folder, "OPENAI_API_KEY": "none"}

import lm_eval  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

COMMON = """
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
doc_to_text: "{{{{problem}}}}"
"""
APPLES = r"""
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: [], max_gen_toks: 300, do_sample: false, temperature: 0}
filter_list:
  - name: boxed
    filter:
      - {function: regex, regex_pattern: '\\boxed\{(-?\d+)\}', group_select: -1}
      - {function: take_first}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
CHOICES = """
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
tasks = Path(folder) / "tasks"
tasks.mkdir()
(tasks / "apples.yaml").write_text(COMMON.format(task="apples", file=problems) + APPLES)
(tasks / "choices.yaml").write_text(COMMON.format(task="choices", file=choices) + CHOICES)


def evaluate(task, model, settings, **more):
    """The scores of a task, and its samples in order."""
    manager = TaskManager(include_path=str(tasks))
    found = lm_eval.simple_evaluate(
        model=model, model_args=f"model=tiny,max_retries=1,base_url={url}/v1/{settings}", tasks=[task],
        task_manager=manager, bootstrap_iters=0, **more,
    )  # fmt: skip
    return found["results"][task], sorted(found["samples"][task], key=lambda sample: sample["doc_id"])


answered, _ = evaluate("apples", "local-chat-completions", "chat/completions,num_concurrent=4,eos_string=none",
                       apply_chat_template=True)  # fmt: skip
chosen, samples = evaluate("choices", "local-completions", "completions", batch_size=4)
print(json.dumps({
    "accuracy": answered["exact_match,boxed"],
    "accuracy of choices": chosen["acc,none"],
    "log_likelihoods": [[response[0][0] for response in sample["resps"]] for sample in samples],
}))  # fmt: skip
