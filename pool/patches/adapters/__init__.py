"""Kinds of adapters: each makes the delta of one weight from small factors."""
