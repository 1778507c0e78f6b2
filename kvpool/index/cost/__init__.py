"""What a prompt costs at each worker, and who gets it."""
