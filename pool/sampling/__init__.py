"""Sampling in sigma space: schedules, samplers, guidance and noise."""
