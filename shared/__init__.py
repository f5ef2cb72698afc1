"""Words and tools of all rooms. Imports nothing from the other rooms."""

from shared.guard import hide_cuda_builds

hide_cuda_builds()
