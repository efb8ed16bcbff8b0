"""Opens a file or folder as a checkpoint: family, components, tokenizer, LoRAs."""
