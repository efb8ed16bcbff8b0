"""Weight deltas as values: LoRA and its relatives, patch sets, adapter files."""
