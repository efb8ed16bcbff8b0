"""Detects from keys and shapes which model, VAE or encoder a file holds."""
