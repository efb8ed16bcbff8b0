"""The owner of one GPU's weights: leases, pins, evictions, preloading."""
