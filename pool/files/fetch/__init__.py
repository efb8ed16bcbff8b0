"""Weights from sources: listing, fetching by ranges, the bounded cache of a node, sharing between nodes."""
