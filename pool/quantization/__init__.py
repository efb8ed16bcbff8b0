"""Quantized weights: published formats, read, written, computed with."""
