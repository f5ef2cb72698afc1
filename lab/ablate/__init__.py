"""Ablations: the same run with one setting changed, on several seeds, shown in one table and one plot."""
