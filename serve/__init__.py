"""Serves a trained model over HTTP with an OpenAI-compatible API, through which it is also evaluated."""
