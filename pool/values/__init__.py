"""Names, specifications, results and errors that all other rooms use; torch-free."""
