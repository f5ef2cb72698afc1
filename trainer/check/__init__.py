"""Whether a launch would go: findings about machine, settings and data, and the plan that `--dry-run` prints."""
