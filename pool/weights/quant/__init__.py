"""Tensors of files as views of memory-mapped bytes, and file hashes."""
