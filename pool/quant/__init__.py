"""Packed weights: published quantization formats, read, written and computed with."""
