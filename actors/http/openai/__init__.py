"""The HTTP interface of OpenAI's images API."""
