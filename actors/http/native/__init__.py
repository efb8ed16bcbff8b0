"""The HTTP interface of the pool itself."""
