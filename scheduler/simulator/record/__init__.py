"""The event log, its replay, and traces made from it."""
