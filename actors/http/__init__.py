"""HTTP interfaces of a pool: the native API, and those of OpenAI, A1111 and ComfyUI."""
