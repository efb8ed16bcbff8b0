"""Writes checkpoints as single files and as diffusers folders."""
