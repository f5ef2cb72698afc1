"""The trained model for other people, over HTTP, and its evaluation through that same door."""
