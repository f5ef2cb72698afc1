"""Sampling of completions: vLLM engines, their worker ranks, and the weight transfer that feeds them."""
