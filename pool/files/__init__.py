"""Files of weights at the byte level, and their sources."""
