"""Words and tools of all rooms. Imports nothing from the other rooms."""
