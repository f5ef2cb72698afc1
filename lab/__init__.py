"""Experiments on training: ablations, pictures of the loss, plans of large runs."""
