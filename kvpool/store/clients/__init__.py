"""Stores on a server through clients other than the native one."""
