"""What content is called, and how bytes prove that they are it: keys, namespaces, layouts, hashes, records."""
