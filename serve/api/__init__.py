"""The HTTP interface: request bodies, responses, authentication and limits."""
