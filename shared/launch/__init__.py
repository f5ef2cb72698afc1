"""What the processes of a launch share: calls and messages, roles of ranks, heartbeats, sockets, the private folder."""
