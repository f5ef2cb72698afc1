"""Checkpoints: written, verified, read, and what a resumed run may change."""
