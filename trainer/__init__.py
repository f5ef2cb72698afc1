"""Completions in, weights out: the controller and its ledger, advantages, losses, FSDP2 ranks, checkpoints."""
