"""Text encoders of every kind: planned from shapes, read as each family of models reads them, put together."""
