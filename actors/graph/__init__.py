"""Converts a request to a task graph: stage parameters, recipe and checks."""
