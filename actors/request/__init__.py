"""GenerateRequest and its parts: fields, ranges and parsing."""
