"""Prompts: tokens, weights and chunks, and their encoding."""
