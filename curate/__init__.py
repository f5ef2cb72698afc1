"""Curation of training data: stages that read JSONL problems and keep, change or reject each, with a reason."""
