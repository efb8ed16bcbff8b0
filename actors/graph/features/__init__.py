"""One module for each request feature: its checks, defaults, stage parameters, recipe fields and lines."""
