"""Casting layers: modules that compute with weights that are elsewhere, in another dtype, or patched on the fly."""
