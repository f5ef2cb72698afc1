"""TRL's GRPOTrainer on the prompts of the end-to-end benchmark; prints one line of JSON for every optimiser step.

    .venv/peers/trl/bin/python benchmarks/peers/trl_grpo.py SETTINGS.json

    {"trl": "1.16.0", "transformers": ..., "torch": ..., "threads": 2}          first
    {"step": 1, "seconds": 31.2, "tokens": 7412}                                prompt and completion tokens of the step

Run by the interpreter of TRL's own environment (`make install-peers`): it imports nothing of this project.

Ways to sample ("generation"): "generate" is transformers' own, with a cache that grows. A cache of fixed size and
continuous batching, which TRL 1.16 has too, were slower or took more memory on two cores. Without a GPU vLLM is no way,
as we read the code (it was not tried): its server takes weights over NCCL only, and the colocated engine loads them
into the parameters, of which vLLM's CPU build keeps packed copies.
On a GPU "vllm" is that colocated engine (benchmarks/gpu_check; not run on a card yet).
Ways to compute ("precision"): "float32"; "autocast", products in bfloat16 over float32 weights and moments, as ours.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

VLLM_SHARE = 0.3
"""of the card's memory, for TRL's colocated engine (its own default)"""


def reserve_output() -> TextIO:
    """The standard output for our lines alone: what libraries print goes to the standard error."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lines


def well_formed(completions: list[str], **_: Any) -> list[float]:
    """A reward like the format's: 1 for thoughts that are closed and an answer in a box."""
    return [float("</think>" in text and "\\boxed{" in text) for text in completions]


class Steps(TrainerCallback):
    """Writes a line after every optimiser step."""

    def __init__(self, lines: TextIO):
        self.lines, self.last_s, self.tokens = lines, time.perf_counter(), 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The clock starts."""
        self.last_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Seconds and tokens since the last."""
        now, tokens = time.perf_counter(), int(state.num_input_tokens_seen)
        row = {"step": state.global_step, "seconds": now - self.last_s, "tokens": tokens - self.tokens}
        print(json.dumps(row), file=self.lines)
        self.last_s, self.tokens = now, tokens


def arguments(settings: dict[str, Any], folder: str) -> GRPOConfig:
    """GRPO with everything left out that ours does not do: no reference model, no checkpoints, no reports."""
    completions = settings["prompts_per_step"] * settings["group_size"]
    gpu = torch.cuda.is_available()
    return GRPOConfig(
        output_dir=folder, max_steps=settings["steps"], use_cpu=not gpu, seed=0,
        per_device_train_batch_size=settings["batch"], gradient_accumulation_steps=completions // settings["batch"],
        num_generations=settings["group_size"], max_completion_length=settings["max_completion_tokens"],
        temperature=1.0, beta=0.0, num_iterations=1, learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant", warmup_steps=0, optim="adamw_torch_fused", weight_decay=0.0, max_grad_norm=1.0,
        bf16=settings["precision"] == "autocast", gradient_checkpointing=False, shuffle_dataset=False,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        use_vllm=settings["generation"] == "vllm", vllm_mode="colocate", vllm_gpu_memory_utilization=VLLM_SHARE,
        save_strategy="no", report_to="none", logging_steps=1, disable_tqdm=True, dataloader_pin_memory=gpu,
    )  # fmt: skip


def main(settings: dict[str, Any]) -> None:
    """Train for so many steps."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the benchmark
    lines = reserve_output()
    torch.set_num_threads(settings["threads"])
    versions = {name: importlib.metadata.version(name) for name in ("trl", "transformers", "torch")}
    print(json.dumps({**versions, "threads": torch.get_num_threads()}), file=lines)
    prompts = Dataset.from_list([{"prompt": text} for text in json.loads(Path(settings["prompts"]).read_text())])
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=settings["model"], reward_funcs=well_formed, args=arguments(settings, folder), train_dataset=prompts,
            callbacks=[Steps(lines)],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
