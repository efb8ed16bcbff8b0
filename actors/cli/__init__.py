"""The `modelpool` command. Thin: parses arguments, calls the client, prints."""
