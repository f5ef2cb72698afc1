"""API keys: their file, their limits, and the command that makes them."""
