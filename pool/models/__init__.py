"""Builds, opens and saves the components of a model."""
