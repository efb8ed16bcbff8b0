"""The number of nodes: how many of each group the waiting work is worth."""
