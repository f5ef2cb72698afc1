"""Weights from trainers to engines by direct memory access. Trainers call `make_sender`; engines use `receiver`."""

from rollout.weights.sender import Sender, make_sender

__all__ = ["Sender", "make_sender"]
