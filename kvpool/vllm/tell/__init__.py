"""What others are told: indexes of this worker and its blocks, operators of requests."""
