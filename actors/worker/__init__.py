"""The actor that owns one GPU, its prefetch thread and its meters."""
