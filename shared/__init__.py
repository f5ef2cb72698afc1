"""Types and tools that all packages share. Imports nothing from the other packages."""

from shared.cuda_builds import hide_cuda_builds

hide_cuda_builds()
