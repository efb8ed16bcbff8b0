"""The simulated cluster: the core and its peers under virtual time, and the figures that come out."""
