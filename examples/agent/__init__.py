"""The example of an agent: a program for OpenAI's API that asks a tool, and is trained as it is."""
