"""Data before a run: stages that read JSONL problems, keep, change or reject each, and say why."""
