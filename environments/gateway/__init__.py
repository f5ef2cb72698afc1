"""The gateway of a run: agents ask the policy over HTTP, as they would ask any server that speaks OpenAI's API."""
