"""The HTTP interface of A1111."""
