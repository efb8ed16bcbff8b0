"""Synthetic workloads and traces as lines of text."""
