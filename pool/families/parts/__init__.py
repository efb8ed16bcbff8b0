"""Types of the parts of a family's definition, and the arithmetic that several families share. Torch-free to import."""
