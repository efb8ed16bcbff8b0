"""Brings the images and videos of a request into the pool."""
