"""Answers what a named model, LoRA or ControlNet is and what running it needs."""
