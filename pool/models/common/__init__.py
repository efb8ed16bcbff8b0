"""What several kinds of components share: configurations from shapes, classes, diffusers' converters."""
