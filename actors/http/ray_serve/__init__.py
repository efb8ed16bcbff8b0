"""The HTTP interfaces as an application of Ray Serve."""
