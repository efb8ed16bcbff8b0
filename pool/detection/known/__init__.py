"""The rows of the detection table, one for each model family."""
