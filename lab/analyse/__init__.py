"""Where a run's weights went, and what the reward looks like around them (Magistral, 2506.10910, section 7.1)."""
