"""The names that LoRA files use for a model's weights, for each family."""
