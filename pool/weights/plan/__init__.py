"""Pure byte arithmetic: what to evict, load, stream (partial loads) and preload, and why."""
