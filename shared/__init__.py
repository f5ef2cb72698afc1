"""Types and tools that all packages share. Imports nothing from the other packages."""

import os

from shared.cuda_builds import hide_cuda_builds

# torch then counts GPUs by NVML; its other way ruins CUDA in processes that are forked afterwards (vLLM sets this too)
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
hide_cuda_builds()
