"""Types and tools that all packages share. Imports nothing from the other packages."""

import os
from contextlib import suppress

from shared.cuda_builds import hide_cuda_builds

# torch then counts GPUs by NVML; its other way ruins CUDA in processes that are forked afterwards (vLLM sets this too)
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
hide_cuda_builds()
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it once; its C++ warns of NUMA on a CPU
# torch makes its folder of compiled code at import, by default among the temporary files, where others may be first
_cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torchinductor")
with suppress(OSError):
    os.makedirs(_cache, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", _cache)
