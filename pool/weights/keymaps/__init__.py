"""Maps between the tensors of a checkpoint and the parameters of a module."""
