"""What a file of weights is, from the keys and shapes of its tensors alone."""
