"""URLs of sources: their schemes, the libraries that read them, and their form. Imports no library."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import SplitResult, quote, unquote, urlsplit

from modelpool.pool.values.core.errors import unusable_field

#: schemes read with the standard library
HTTP_SCHEMES = ("http", "https")
FILE_SCHEME = "file"
#: schemes read through fsspec, with the extra of this project that installs the library
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "hf": "hf"}

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
#: a user name and password in a text. A password may contain slashes, so all before the last @ is taken for it
_CREDENTIALS = re.compile(r"://\S*@")
_IPV6 = re.compile(r"\[[0-9a-f:.]*\]", re.IGNORECASE)


def is_url(text: str) -> bool:
    """Whether `text` begins with a scheme."""
    return _SCHEME.match(text) is not None


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, in lower case."""
    return url.partition("://")[0].lower()


def split_url(field: str, url: str) -> SplitResult:
    """Split a URL. Raises UnusableField if that fails, and if the URL has or may have a user name or password, which
    would end up in logs. The error does not contain them.

    A parser ends the host at a slash, also at one in a password. So a colon before an @ is refused wherever it is.
    """
    scheme, rest = scheme_of(url), url.partition("://")[2]
    host, before_at = rest.partition("/")[0], rest.rpartition("@")[0]
    port = _IPV6.sub("", host).partition(":")[2]
    if scheme == FILE_SCHEME:
        has_credentials = "@" in host
    else:
        has_credentials = "@" in host or ":" in before_at or (bool(port) and (scheme in EXTRAS or not port.isdigit()))
    if has_credentials:
        found = re.split("[/?#]", rest.rpartition("@")[2])[0] if "@" in rest else ""
        expected = "a URL without user name and password; an @ in the path of one with a port is written %40"
        raise unusable_field(field, f"{scheme}://...@{found}", expected)
    try:
        return urlsplit(url)
    except ValueError as problem:
        found = f"{scheme}://{re.split('[/?#]', rest)[0]}"
        raise unusable_field(field, found, f"a URL with a host or bucket ({problem})") from None


def without_credentials(text: str) -> str:
    """Return a text, such as an error of a library, without the user names and passwords of the URLs in it."""
    return _CREDENTIALS.sub("://...@", text)


def checked_source(field: str, text: str) -> str:
    """Return the URL of a source as configured: a path becomes a file:// URL, and folders end with a slash.

    Raises UnusableField for a URL without a host or bucket, and for a user name or password in it; see `split_url`.
    """
    if not is_url(text):
        path = Path(text).expanduser()
        if not path.is_absolute():
            raise unusable_field(field, text, "a URL such as s3://bucket/models/, or an absolute path of a folder")
        return path_url(path)
    parts = split_url(field, text)
    if not parts.netloc and parts.scheme != FILE_SCHEME and not parts.path.strip("/"):
        raise unusable_field(field, text, "a URL with a host or bucket, such as s3://bucket/models/")
    return text


def path_url(path: Path) -> str:
    """Return the file:// URL of an absolute path."""
    return f"file://{quote(str(path))}"


def url_path(url: str) -> Path:
    """Return the path of a file:// URL."""
    return Path(unquote(urlsplit(url).path))
