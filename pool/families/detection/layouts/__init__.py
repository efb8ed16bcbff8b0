"""Key layouts of the architectures that are detected, and how sizes follow from shapes."""
