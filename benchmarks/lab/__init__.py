"""Baseline placement policies of other systems, the Katz workload, cache curves and bounds."""
