"""Casting layers: modules that compute with weights elsewhere, in another dtype (fp8), or patched on the fly."""
