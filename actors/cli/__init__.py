"""The modelpool command."""
