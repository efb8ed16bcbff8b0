"""File formats at the byte level: safetensors, torch pickles, GGUF, folders, the page cache, atomic writes."""
