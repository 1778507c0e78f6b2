"""Names of content: keys, namespaces, layouts, hashes, checkpoints."""
