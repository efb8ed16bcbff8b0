"""Predicts the bytes that a task would move and the seconds that it would take."""
