"""Clients of the index's services."""
