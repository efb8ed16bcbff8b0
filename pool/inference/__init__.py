"""Sampling: noise, schedules, guidance, conditions, pixels, and the models that take part."""
