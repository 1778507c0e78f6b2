"""From a request's arrival to its load: what the pool has of its prompt, what is offered, and what is loaded."""
