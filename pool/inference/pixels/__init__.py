"""Image operations, tiles, and VAE encoding and decoding of whole or tiled images."""
