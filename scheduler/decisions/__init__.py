"""Costs, queues and placement: which task runs where, and when."""
