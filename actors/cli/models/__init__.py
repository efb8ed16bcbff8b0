"""Commands about files of weights."""
