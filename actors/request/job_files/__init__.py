"""Reads the rows of job files: JSON lines, text, CSV, Parquet and datasets, from paths and URLs."""
