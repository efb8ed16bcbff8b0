"""Value types, names and errors that all other folders use; torch-free."""
