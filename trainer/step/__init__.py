"""One optimiser step on the trainer ranks: batches, forward and backward passes, sharding, the optimiser."""
