"""Names of the files in forms. Older clients (urllib3 1, .NET, aiohttp) write other characters than ASCII as
`filename*=utf-8''...` (RFC 5987), alone or next to an escaped `filename`, which the parser of forms does not read.
Pure.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

_EXTENDED = re.compile(rb";\s*filename\*\s*=\s*([\w.-]*)'[^';\r\n]*'([^;\s\r\n]*)", re.IGNORECASE)
_PLAIN = re.compile(rb';\s*filename\s*=\s*("(?:[^"\\\r\n]|\\.)*"|[^;\r\n]*)', re.IGNORECASE)
_BOUNDARY = re.compile(rb'boundary\s*=\s*"?([^";\s]+)', re.IGNORECASE)
_END_OF_HEAD = b"\r\n\r\n"


def with_plain_names(body: bytes, content_type: str) -> bytes:
    """Return the body of a form in which every file has its name as `filename`, in UTF-8."""
    boundary = _BOUNDARY.search(content_type.encode("latin-1", "replace"))
    if boundary is None or not _EXTENDED.search(body):
        return body
    edge = b"--" + boundary[1]
    parts = body.split(edge)
    return edge.join(_with_plain_name(part) for part in parts)


def _with_plain_name(part: bytes) -> bytes:
    head, end, content = part.partition(_END_OF_HEAD)
    match = _EXTENDED.search(head)
    if match is None or not end:
        return part
    try:
        name = unquote_to_bytes(match[2]).decode(match[1].decode() or "utf-8")
    except (LookupError, UnicodeDecodeError):  # the plain name, if there is one, counts
        return part
    escaped = re.sub(r'(["\\])', r"\\\1", name).encode("utf-8", "replace")
    if b"\r" in escaped or b"\n" in escaped:
        return part
    start = _PLAIN.sub(b"", head[: match.start()])
    rest = _PLAIN.sub(b"", head[match.end() :])
    return start + b'; filename="' + escaped + b'"' + rest + end + content
