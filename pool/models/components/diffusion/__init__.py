"""Builds and calls diffusion models: configurations, key names, forward calls."""
