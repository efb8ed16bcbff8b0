"""The web page of a pool."""
