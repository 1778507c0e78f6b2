"""The index's protocol, for client and server."""
