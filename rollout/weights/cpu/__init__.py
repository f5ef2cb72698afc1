"""What only engines on a CPU need: weights repacked for the kernels."""
