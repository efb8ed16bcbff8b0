"""Upscalers: networks that enlarge images (ESRGAN and its relatives): detection, building and calling."""
