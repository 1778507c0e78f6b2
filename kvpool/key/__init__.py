"""Names of content and proofs that bytes match them: keys, namespaces, layouts, hashes, records."""
