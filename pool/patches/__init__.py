"""Weight deltas as values: patches, patch sets and the LoRA files they come from."""
