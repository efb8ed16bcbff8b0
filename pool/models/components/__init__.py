"""Builds components on the meta device from the shapes of a checkpoint."""
