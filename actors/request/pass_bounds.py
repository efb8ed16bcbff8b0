"""The bound of passes of a request. Apart from their fields: the table of fields imports no pydantic."""

from __future__ import annotations

#: passes of one request after its first sampling run
MAX_PASSES = 16
