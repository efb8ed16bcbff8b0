"""Commands about a running pool."""
