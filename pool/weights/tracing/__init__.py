"""Dry runs on the meta device: peak bytes, FLOPs, module order."""
