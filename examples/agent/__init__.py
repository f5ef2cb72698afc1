"""The example of an environment: a number is guessed, and found by bisection in the end."""
