"""Ablations: the same run with one setting changed, on several seeds, as one table and one plot. A command."""
