"""Code shared by several kinds of components: configurations from shapes, classes, diffusers' converters."""
