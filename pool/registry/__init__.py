"""Which files of weights there are on this machine: folders, names, aliases and hashes, remembered between runs."""
