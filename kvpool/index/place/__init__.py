"""Where a request should go."""
