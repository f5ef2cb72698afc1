"""Generates one response: chooses its language, renders its prompt, and separates thoughts from answer."""
