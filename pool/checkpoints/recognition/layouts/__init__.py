"""The architectures that are recognised: keys that give them away, and how sizes are read off shapes."""
