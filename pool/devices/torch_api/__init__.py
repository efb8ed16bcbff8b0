"""Private and experimental torch names, behind one module with a self-test."""
