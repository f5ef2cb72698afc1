"""How one response is made: its language, its prompt, its thoughts and its answer."""
