"""Builds text encoders and assembles the text conditioning of each family."""
