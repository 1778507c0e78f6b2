"""How workers and indexes find each other in the pool."""
