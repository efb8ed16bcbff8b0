"""Checkpoints of sampling runs on disk: their files, the bounded folder, and the threads that write it."""
