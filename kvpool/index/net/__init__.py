"""Connections: addresses, ports, TLS, sockets of publishers and workers."""
