"""Applies the options of a run to the blocks and the attention of diffusers modules."""
