"""URLs of sources: their schemes, the libraries that read them, and their form. Imports no library."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from modelpool.pool.core.errors import unusable_field

#: schemes read with the standard library
HTTP_SCHEMES = ("http", "https")
FILE_SCHEME = "file"
#: schemes read through fsspec, with the extra of this project that installs the library
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "hf": "hf"}

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def is_url(text: str) -> bool:
    """Whether `text` begins with a scheme."""
    return _SCHEME.match(text) is not None


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, in lower case."""
    return url.partition("://")[0].lower()


def checked_source(field: str, text: str) -> str:
    """Return the URL of a source as configured: a path becomes a file:// URL, and folders end with a slash.

    Raises UnusableField for a URL without a host or bucket, and for a user name or password in it, which would end up
    in logs.
    """
    if not is_url(text):
        path = Path(text).expanduser()
        if not path.is_absolute():
            raise unusable_field(field, text, "a URL such as s3://bucket/models/, or an absolute path of a folder")
        return path_url(path)
    parts = urlsplit(text)
    if parts.username is not None or parts.password is not None:
        raise unusable_field(field, f"{parts.scheme}://...@{parts.hostname}", "a URL without user name and password")
    if not parts.netloc and parts.scheme != FILE_SCHEME and not parts.path.strip("/"):
        raise unusable_field(field, text, "a URL with a host or bucket, such as s3://bucket/models/")
    return text


def path_url(path: Path) -> str:
    """Return the file:// URL of an absolute path."""
    return f"file://{quote(str(path))}"


def url_path(url: str) -> Path:
    """Return the path of a file:// URL."""
    return Path(unquote(urlsplit(url).path))
