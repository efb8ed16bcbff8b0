"""The model families that run: components, sampling facts, text readings, guidance defaults."""
