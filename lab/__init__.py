"""Experiments on training: ablations, plots of the reward around a run's weights, plans of large runs."""
