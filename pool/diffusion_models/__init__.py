"""Diffusion models of every published kind but UNets: their classes, the names in their files, how they are called."""
