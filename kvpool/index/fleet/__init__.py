"""Who holds which blocks, and who serves which names."""
