"""Evaluation of a model through the HTTP API of its server: `python -m evaluation`."""
