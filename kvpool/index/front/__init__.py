"""Placing requests, and the two doors that they come through: Envoy's and the router's."""
