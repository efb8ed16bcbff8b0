"""Models written to disk: patches merged, in the original single-file layout or as a folder of diffusers."""
