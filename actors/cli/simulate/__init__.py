"""Commands in virtual time."""
