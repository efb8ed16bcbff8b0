"""Prompts: weights, chunks, tokenizers, templates, and their encoding."""
