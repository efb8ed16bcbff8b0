"""Weights on a GPU: what moves, packed and patched weights, casting layers, patchers, memory."""
