"""Environment and settings with which vLLM starts in seconds inside a rank of torchrun. Import this before vllm.

On GPUs engine processes are spawned: one that is forked from a process that asked CUDA anything cannot use it.
Triton's attention, which vLLM takes for float32, would round its products to TF32: then the log-probs of an engine
differ from the trainers' by more than the proof of an update allows.
On the CPU the engine process is forked (3-6 s instead of 30): the parent keeps one OpenMP thread, since a pool does
not survive a fork, and the child takes half of the user's OMP_NUM_THREADS, because engines share the cores with
trainers; that of a server measures how many are fastest (MAESTRALE_ENGINE_THREADS for a number). Two small sampler
functions are not compiled (15 s of a C++ compiler); `count_at_least` replaces the one that is slow uncompiled.
torchrun's variables are removed from the environment: vLLM's process groups would wait for a server that never starts.
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shared.config import Config
from shared.errors import ConfigError, ModelError
from shared.launch import launch_folder
from shared.model.cpu.fused_layers import TF32_ADVICE
from shared.model.cpu.processor import given_threads
from shared.model.folder import load_config, token_ids
from shared.model.implementation import VISION_LANGUAGE, adapted_names, read_shape

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TORCHRUN_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
THREADS_VARIABLE = "MAESTRALE_ENGINE_THREADS"
"""CPU threads of an engine process; "1-8": as many of one to eight as are fastest when it starts"""
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
FOLDER_VARIABLE = "VLLM_RPC_BASE_PATH"
KERNEL_CACHE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
"""products that oneDNN keeps prepared, one for each shape of a weight and number of tokens in a batch; each takes
0.3 MiB, whatever the model, and 1 ms to prepare anew. oneDNN's own 1,024 let an engine grow by 275 MiB"""
LEAST_BATCHED_TOKENS = 4096
CPU_CACHE_BYTES = 256 << 20
"""keys and values of an engine on the CPU where no setting says how many"""
GPU_SHARE = 0.92
"""share of its GPU's memory that an engine alone on it uses for weights, keys, values and work: vLLM's default"""
LEAST_GPU_SHARE = 0.01
"""share given to vLLM where the bytes for keys and values are set: it refuses to start where less is free, whatever it
needs, so with a larger one it would not start again, or with another process on the GPU"""
TRANSFER_TENSORS, TRANSFER_BYTES = 2, 512 << 20
"""extra memory of a weight update on the engine's GPU: copies of so many of the largest tensors, and so many bytes for
another process that uses the GPU"""
CPU_BLOCK_TOKENS = 32
"""tokens of a KV cache block: a group shares the full blocks of its prompt, and few prompts fill vLLM's 128"""
WORKER_EXTENSION = "rollout.weights.vllm_backend.WorkerExtension"
CPU_WORKER = "rollout.cpu_worker.CpuWorker"


def prepare_environment(threads: int | str = 0) -> None:
    """Set what vLLM reads at import, and remove what torchrun left. Idempotent; values the user set stay.

    threads: of an engine on a CPU, as in THREADS_VARIABLE; 0 for half of OMP_NUM_THREADS. Raises ConfigError for a
    start method that cannot work on GPUs.
    """
    for name in [*TORCHRUN_VARIABLES, *(name for name in os.environ if name.startswith("TORCHELASTIC_"))]:
        os.environ.pop(name, None)
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not torch.cuda.is_available():
        defaults |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", KERNEL_CACHE: "256"}
        defaults[THREADS_VARIABLE] = str(threads or max(1, given_threads() // 2))
        os.environ["OMP_NUM_THREADS"] = "1"
        torch._C.set_num_threads(1)
        for name in ("vllm.triton_utils.importing", "torch._library.triton"):  # it is not needed on a CPU
            logging.getLogger(name).setLevel(logging.ERROR)
    else:
        defaults |= {START_METHOD: "spawn", "TRITON_F32_DEFAULT": "ieee", "TQDM_DISABLE": "1"}
        defaults["PYTHONWARNINGS"] = f"ignore:{TF32_ADVICE}:UserWarning"
        if (asked := os.environ.get(START_METHOD, "spawn")) != "spawn":
            raise ConfigError(
                f"{START_METHOD}={asked} in the environment: an engine on a GPU cannot start by {asked}, since CUDA "
                "does not work in a process forked from one that has asked for it; unset it, or set it to spawn"
            )
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # what vLLM's imports say about other people's deprecations
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")


def build_vllm_config(
    config: Config, model_dir: str, *, seed: int, device: torch.device, cache_bytes: int | None = None
) -> VllmConfig:
    """vLLM's settings for one engine of this run. Raises ModelError if the folder is no model that vLLM can serve.

    device: its first GPU, or the CPU. cache_bytes: those that the engine found free when it started before.
    """
    settings, sleeps = config.rollout, config.placement.colocate == "turns" and device.type == "cuda"
    cache_bytes = settings.cache_bytes or cache_bytes
    more: dict[str, Any] = {"enable_sleep_mode": True} if sleeps else {}
    if config.model.dtype != "float32":  # rounded logits are twice as far from the trainers'
        more["hf_overrides"] = {"head_dtype": "float32"}
    if config.sends_adapters:
        from rollout.weights.adapters import engine_arguments

        more |= engine_arguments(config.lora.rank, adapted_layers(config, model_dir))
    replays = config.model.router_replay and is_mixture(config, model_dir)
    if replays and device.type == "cuda":
        more["enable_return_routed_experts"] = True
    if device.type == "cuda" and cache_bytes is None:
        total = torch.cuda.get_device_properties(device).total_memory
        more["gpu_memory_utilization"] = own_gpu_share(config, model_dir, total)
    made = make_vllm_config(
        model_dir, dtype=config.model.dtype, max_tokens=config.model.max_tokens, max_sequences=settings.max_sequences,
        cache_bytes=cache_bytes, tensor_parallel=settings.tensor_parallel, seed=seed, skip_tokenizer_init=True,
        weight_transfer_config={"backend": "maestrale"}, worker_extension_cls=WORKER_EXTENSION, **more,
    )  # fmt: skip
    if replays and device.type != "cuda":  # vLLM would refuse the flag above; routes.py returns them
        made.aux_output_config.enable_return_routed_experts = True
    return made


def is_mixture(config: Config, model_dir: str) -> bool:
    """Whether the folder's model is a mixture of experts that can be trained."""
    try:
        shape = read_shape(load_config(Path(model_dir)), config.model.implementation, config.model.max_tokens)
    except ModelError:
        return False
    return shape.experts > 0


def adapted_layers(config: Config, model_dir: str) -> list[str]:
    """Last parts of the names of the layers that lora.targets chooses. Raises ConfigError for one that names none."""
    described = load_config(Path(model_dir))
    shape = read_shape(described, config.model.implementation, config.model.max_tokens)
    names = adapted_names(shape, described, config.lora.rank, config.lora.targets)
    return sorted({name.rpartition(".")[2] for name in names})


def own_gpu_share(config: Config, model_dir: str, total_bytes: int) -> float:
    """Share of a GPU's memory for the engine that has it for itself: GPU_SHARE less what a weight update takes."""
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    largest = read_shape(load_config(Path(model_dir))).largest_tensor * dtype.itemsize
    return GPU_SHARE - (TRANSFER_TENSORS * largest + TRANSFER_BYTES) / total_bytes


def make_vllm_config(
    model_dir: str, *, dtype: str, max_tokens: int, max_sequences: int, cache_bytes: int | None,
    tensor_parallel: int = 1, **more: Any,
) -> VllmConfig:  # fmt: skip
    """Return vLLM's settings with the values that all engines here share, and `more` arguments. Raises ModelError.

    max_tokens: prompt and completion together. cache_bytes: for keys and values; None: CPU_CACHE_BYTES, on a GPU what
    is free of the share `gpu_memory_utilization`. tensor_parallel: GPUs of the engine.
    """
    if load_config(Path(model_dir)).get("model_type") in VISION_LANGUAGE and not importlib.util.find_spec(
        "torchvision"
    ):
        raise ModelError(
            f"{model_dir}: vLLM takes a vision-language model only where torchvision is installed, which its CPU build "
            'lacks: install the build that fits torch, take its text model, or set mode = "sft"'
        )
    from vllm.engine.arg_utils import AsyncEngineArgs

    close_sockets()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        more |= {"worker_cls": CPU_WORKER, "block_size": CPU_BLOCK_TOKENS, **whole_prefills(max_tokens, max_sequences)}
    if on_gpu and cache_bytes is not None:
        more["gpu_memory_utilization"] = LEAST_GPU_SHARE
    arguments = AsyncEngineArgs(
        model=model_dir,
        dtype=dtype,
        max_model_len=max_tokens,
        max_num_seqs=max_sequences,
        kv_cache_memory_bytes=cache_bytes if on_gpu else cache_bytes or CPU_CACHE_BYTES,
        tensor_parallel_size=tensor_parallel,
        trust_remote_code=False,
        distributed_executor_backend="uni" if tensor_parallel == 1 else "mp",
        language_model_only=True,  # a vision-language model loads its text part alone
        enforce_eager=not on_gpu,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        enable_prefix_caching=True,
        use_tqdm_on_load=False,
        disable_log_stats=True,
        **more,
    )
    try:
        vllm_config = arguments.create_engine_config()
    except (ValueError, OSError) as error:
        raise ModelError(f"vLLM cannot serve the model folder {model_dir}: {error}") from error
    os.environ[START_METHOD] = "spawn" if on_gpu else "fork"  # vLLM's CPU platform forces spawn while settings are made
    if not on_gpu:
        count_ranks_by_row()
        if more.get("enable_lora"):
            from rollout.weights.adapters import multiply_by_adapter

            multiply_by_adapter()
    return vllm_config


def close_sockets() -> None:
    """Make vLLM put its sockets and the engine process's files (`FOLDER_VARIABLE`) into a private folder, which a later
    start removes if this process is killed. A rank of a launch has such a folder already (its TMPDIR)."""
    if FOLDER_VARIABLE not in os.environ and not Path(tempfile.gettempdir()).name.startswith(launch_folder.PREFIX):
        folder = launch_folder.make(launch_folder.temporary(), "engine")
        os.environ[FOLDER_VARIABLE] = str(folder.path)
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
        if ids := token_ids(path, "eos_token_id"):
            return sorted({*ids})
    raise ModelError(f"{model_dir} names no eos_token_id in generation_config.json or config.json: add it there")


def count_ranks_by_row() -> None:
    """Make vLLM in this process, and those it forks, use `count_at_least`, unless its own function is compiled.

    Uncompiled, its `batched_count_greater_than` widens a truth value for every token and word to 64 bits: with
    SmolLM2-135M's 49,152 words a decode step of 64 sequences took 442 ms; row by row it takes 392 (one thread,
    bfloat16, a CPU without matrix units).
    """
    if os.environ.get("TORCHDYNAMO_DISABLE") != "1":
        return
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = count_at_least


def count_at_least(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[rows] int64: how many elements of each row of x [rows, words] are at least the row's value [rows, 1]."""
    counts = [torch.count_nonzero(row >= value) for row, value in zip(x.unbind(), values.unbind(), strict=True)]
    return torch.stack(counts)
