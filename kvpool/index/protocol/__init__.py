"""The index's protocol as both sides read and write it."""
