"""Weights from trainers to engines by direct memory access. Trainers call `make_sender`; engines use `receiver`."""

from rollout.weights.sender import WeightSender
from rollout.weights.transport import make_sender

__all__ = ["WeightSender", "make_sender"]
