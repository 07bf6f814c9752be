"""The gateway: a process of its own that owns the client streams."""
