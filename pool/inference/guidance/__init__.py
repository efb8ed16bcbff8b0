"""Guiders: classifier-free guidance, APG, CFG rescale, per-frame guidance, and the call of the model."""
