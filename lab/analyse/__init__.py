"""Analyses the path of a run's weights, and the reward around it (Magistral, 2506.10910, section 7.1)."""
