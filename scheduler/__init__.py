"""Decisions: which task runs on which worker. Standard library only; no torch, no ray, no clock, no randomness."""
