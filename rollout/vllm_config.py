"""Environment and settings with which vLLM starts in seconds inside a rank of torchrun. Import this before vllm.

On the CPU the engine process is forked (3-6 s instead of 30): the parent keeps one OpenMP thread, since a pool does
not survive a fork, and the child takes half of the user's OMP_NUM_THREADS, because engines share the cores with
trainers (MAESTRALE_ENGINE_THREADS for another number). Two small sampler functions are not compiled (15 s of a
C++ compiler); token_ranks.py replaces the one that is slow uncompiled.
torchrun's variables are removed from the environment: vLLM's process groups would wait for a server that never starts.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollout.token_ranks import count_ranks_by_row
from shared import launch_folder
from shared.config import Config
from shared.errors import ModelError
from shared.model.cpu import given_threads

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TORCHRUN_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
THREADS_VARIABLE = "MAESTRALE_ENGINE_THREADS"
"""CPU threads of an engine process"""
LEAST_BATCHED_TOKENS = 4096
CPU_BLOCK_TOKENS = 32
"""tokens of a KV cache block: a group shares the full blocks of its prompt, and few prompts fill vLLM's 128"""
WORKER_EXTENSION = "rollout.weights.vllm_backend.WorkerExtension"


def prepare_environment() -> None:
    """Set what vLLM reads at import, and remove what torchrun left. Idempotent; values the user set stay."""
    for name in [*TORCHRUN_VARIABLES, *(name for name in os.environ if name.startswith("TORCHELASTIC_"))]:
        os.environ.pop(name, None)
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not torch.cuda.is_available():
        defaults |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        defaults[THREADS_VARIABLE] = str(max(1, given_threads() // 2))
        os.environ["OMP_NUM_THREADS"] = "1"
        torch._C.set_num_threads(1)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # what vLLM's imports say about other people's deprecations, and that Triton is not needed on a CPU
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)


def build_vllm_config(config: Config, model_dir: str, *, seed: int) -> VllmConfig:
    """vLLM's settings for one engine of this run. Raises ModelError if the folder is no model that vLLM can serve."""
    settings = config.rollout
    return make_vllm_config(
        model_dir,
        dtype=config.model.dtype,
        max_tokens=config.model.max_tokens,
        max_sequences=settings.max_sequences,
        cache_bytes=settings.cache_bytes,
        tensor_parallel_size=settings.tensor_parallel,
        distributed_executor_backend="uni" if settings.tensor_parallel == 1 else "mp",
        seed=seed,
        skip_tokenizer_init=True,
        weight_transfer_config={"backend": "maestrale"},
        worker_extension_cls=WORKER_EXTENSION,
    )


def make_vllm_config(
    model_dir: str, *, dtype: str, max_tokens: int, max_sequences: int, cache_bytes: int | None, **more: Any
) -> VllmConfig:
    """Return vLLM's settings with the values that all engines here share, and `more` arguments. Raises ModelError.

    max_tokens: prompt and completion together. cache_bytes: for keys and values; None: vLLM decides.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    close_sockets()
    on_gpu = torch.cuda.is_available()
    arguments = AsyncEngineArgs(
        model=model_dir,
        dtype=dtype,
        max_model_len=max_tokens,
        max_num_seqs=max_sequences,
        kv_cache_memory_bytes=cache_bytes,
        enforce_eager=not on_gpu,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        enable_prefix_caching=True,
        use_tqdm_on_load=False,
        disable_log_stats=True,
        **({} if on_gpu else {"block_size": CPU_BLOCK_TOKENS, **whole_prefills(max_tokens, max_sequences)}),
        **more,
    )
    try:
        vllm_config = arguments.create_engine_config()
    except (ValueError, OSError) as error:
        raise ModelError(f"vLLM cannot serve the model folder {model_dir}: {error}") from error
    if not on_gpu:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # vLLM's CPU platform forces spawn while settings are made
        count_ranks_by_row()
    return vllm_config


def close_sockets() -> None:
    """Make vLLM put its sockets into a private folder, which a later start removes if this process is killed. A rank
    of a launch has such a folder already (its TMPDIR)."""
    variable = "VLLM_RPC_BASE_PATH"
    if variable not in os.environ and not Path(tempfile.gettempdir()).name.startswith(launch_folder.PREFIX):
        folder = launch_folder.make(launch_folder.temporary(), "engine")
        os.environ[variable] = str(folder.path)
        atexit.register(folder.leave)


def whole_prefills(max_tokens: int, max_sequences: int) -> dict[str, Any]:
    """Arguments for the CPU: prompts are never prefilled in chunks.

    vLLM 0.32 rewinds a request's random generator after a partial prefill, which CPU generators cannot do: a seeded
    request whose prompt is cut would end the engine.
    """
    tokens = max(max_tokens, max_sequences, LEAST_BATCHED_TOKENS)
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}


def read_stop_tokens(model_dir: str) -> list[int]:
    """Token ids that end a completion: eos_token_id of generation_config.json, else of config.json.

    Raises ModelError if neither names one: every completion would run to its length limit.
    """
    for name in ("generation_config.json", "config.json"):
        path = Path(model_dir) / name
        if not path.is_file():
            continue
        try:
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except json.JSONDecodeError as error:
            raise ModelError(f"{path} is not valid JSON: {error}") from error
        if value is not None:
            return sorted({int(token) for token in (value if isinstance(value, list) else [value])})
    raise ModelError(f"{model_dir} names no eos_token_id in generation_config.json or config.json: add it there")
