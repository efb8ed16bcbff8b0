"""HTTP interfaces of a pool: the native API, and the APIs of OpenAI, A1111 and ComfyUI."""
