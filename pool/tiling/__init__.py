"""Runs done in parts: tiles that are blended, and batches that are split."""
