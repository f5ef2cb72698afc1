"""The decoder that is trained: its layers, log-probs, packed batches, and Hugging Face folders."""
