"""Plans large runs: from a model, a workload and a cluster to memory, times, the best split and its settings."""
