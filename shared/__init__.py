"""Types and tools that all packages share. Imports nothing from the other packages."""

from shared.guard import hide_cuda_builds

hide_cuda_builds()
