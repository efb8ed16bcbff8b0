"""Assigns tasks to workers: rules, reservations, batching, preload and prefetch."""
