"""Estimates the activation bytes of a stage before it runs, corrected by measurements."""
