"""Vision encoders: built from the tensors of a file, shown pictures, read."""
