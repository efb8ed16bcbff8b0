"""The model files on this machine: folders, names, aliases and hashes, remembered between runs."""
