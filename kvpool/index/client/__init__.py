"""The other side of the index's services: what asks it and publishes to it."""
