"""Stores on a server through other clients than the native one."""
