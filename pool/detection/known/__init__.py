"""The rows of the detection table of the families without a module."""
