"""Pure byte arithmetic: what to evict, load, stream and preload, and why."""
