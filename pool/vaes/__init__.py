"""VAEs of every published kind: their configurations, the names in their files, and how they are built and called."""
