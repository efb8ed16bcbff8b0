"""Builds and calls VAEs."""
