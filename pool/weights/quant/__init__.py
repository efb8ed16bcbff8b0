"""Packed weights of files: fp8, int8, GGUF and bitsandbytes formats, their codecs, and native kernels; mapped files."""
