"""Schedules, samplers and noise."""
