"""Examples that users start from; each is a folder of files that settings name by their path."""
