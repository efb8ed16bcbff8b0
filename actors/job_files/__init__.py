"""Reads the rows of job files: JSON lines, text, CSV, Parquet and folders of datasets, from paths and URLs."""
