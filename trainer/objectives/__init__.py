"""Learning objectives: formulas from rewards and log-probs to the loss of a step."""
