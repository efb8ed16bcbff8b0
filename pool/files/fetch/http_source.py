"""`HttpSource`: files of a web server with range requests: one file, or the listing of a folder as web servers write
it. Standard library only.

Servers without range requests are refused: headers of files could not be read without reading all of them.
"""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from modelpool.pool.files.fetch.fetch_errors import FileGone, Interrupted, SourceFailed
from modelpool.pool.files.fetch.source import (
    FIRST_PAUSE_SECONDS,
    MAX_FILES,
    PIECE_BYTES,
    TRIES,
    is_wanted,
    published_sums,
    read_all,
)
from modelpool.pool.values.core.remote_file import RemoteFile

TIMEOUT_SECONDS = 30.0
#: folders of a listing are followed to this depth
MAX_DEPTH = 6
#: larger answers are no listing of a folder
MAX_LISTING_BYTES = 16 << 20
#: files described at once
DESCRIBED_AT_ONCE = 8

_RANGE_OF = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
#: answers that may change when the request is repeated
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})


class HttpSource:
    """Files below one URL. Any number of threads may use it."""

    def __init__(
        self, url: str, headers: Mapping[str, str] | None = None, open_url: Callable[..., Any] = urllib.request.urlopen
    ) -> None:
        """`headers` are sent with every request; `open_url` opens one, as `urllib.request.urlopen` does."""
        self.url = url
        self._open_url = open_url
        self._headers = {"Accept-Encoding": "identity", **(headers or {})}

    def files(self) -> tuple[RemoteFile, ...]:
        """See `FileSource`. A URL that does not end with a slash is one file."""
        if not self.url.endswith("/"):
            name = unquote(urlsplit(self.url).path.rsplit("/", 1)[-1])
            return (self._describe(name, self.url),)
        found: dict[str, str] = {}
        self._list(self.url, "", 0, found)
        with ThreadPoolExecutor(DESCRIBED_AT_ONCE, thread_name_prefix="describe") as executor:
            files = list(executor.map(lambda item: self._describe(*item), sorted(found.items())))
        sums = published_sums(files, lambda file: read_all(self, file))
        return tuple(RemoteFile(f.path, f.url, f.size_bytes, f.version, sums.get(f.path, f.sha256)) for f in files)

    def read(self, file: RemoteFile, begin: int, end: int) -> Iterator[bytes]:
        """See `FileSource`."""
        if begin >= end:
            return
        with self._open(file.url, {"Range": f"bytes={begin}-{end - 1}"}) as answer:
            self._expect_range(answer, file, begin, end)
            while begin < end:
                try:
                    piece = answer.read(min(PIECE_BYTES, end - begin))
                except (OSError, http.client.HTTPException) as error:
                    raise Interrupted(str(error) or type(error).__name__) from error
                if not piece:
                    raise Interrupted(f"the transfer ended at byte {begin}")
                begin += len(piece)
                yield piece

    def check(self, file: RemoteFile) -> None:
        """See `FileSource`. Each answer was compared with the listed version."""

    def answer(self, url: str) -> Any:
        """Open `url`, repeating a request that fails for a moment. Raises SourceFailed."""
        return self._patiently(url, {})

    def _expect_range(self, answer: Any, file: RemoteFile, begin: int, end: int) -> None:
        """Raise unless `answer` has the requested bytes of the file that was listed."""
        if answer.status != 206:
            if answer.status == 200 and begin == 0 and end == file.size_bytes:
                return  # all of it was requested
            raise SourceFailed(f"{file.url}: the server ignores range requests, expected one that answers them")
        found = _RANGE_OF.fullmatch(answer.headers.get("Content-Range", "").strip())
        if found is None or int(found[1]) != begin:
            raise SourceFailed(
                f"{file.url}: found the range {answer.headers.get('Content-Range')!r}, expected {begin}-"
            )
        if found[3] != "*" and int(found[3]) != file.size_bytes:
            raise FileGone(f"{file.url}: has {found[3]} bytes now, expected {file.size_bytes} as it was listed")
        version = _version(answer.headers)
        if file.version and version and version != file.version:
            raise FileGone(f"{file.url}: was replaced since it was listed ({version}, expected {file.version})")

    def _describe(self, path: str, url: str) -> RemoteFile:
        with self._patiently(url, {"Range": "bytes=0-0"}) as answer:
            found = _RANGE_OF.fullmatch(answer.headers.get("Content-Range", "").strip())
            if answer.status == 206 and found is not None and found[3] != "*":
                size = int(found[3])
            elif answer.headers.get("Content-Length", "").isdecimal():
                size = int(answer.headers["Content-Length"])  # an empty file, or no range requests: refused when read
            else:
                raise SourceFailed(f"{url}: the server reports no size, expected one that answers range requests")
            return RemoteFile(path, url, size, _version(answer.headers))

    def _list(self, url: str, below: str, depth: int, found: dict[str, str]) -> None:
        with self._patiently(url, {}) as answer:
            try:
                text = answer.read(MAX_LISTING_BYTES + 1)
            except (OSError, http.client.HTTPException) as error:
                raise SourceFailed(f"{url}: cannot be listed: {error}") from error
        if len(text) > MAX_LISTING_BYTES:
            raise SourceFailed(f"{url}: an answer of more than {MAX_LISTING_BYTES} bytes, expected a list of files")
        for name in _entries(text.decode("utf-8", "replace"), url):
            place = urljoin(url, name)
            path = below + unquote(name)
            if name.endswith("/"):
                if depth < MAX_DEPTH and not unquote(name).startswith("."):
                    self._list(place, path, depth + 1, found)
            elif is_wanted(path):
                found[path] = place
            if len(found) > MAX_FILES:
                raise SourceFailed(f"{self.url}: more than {MAX_FILES} files, expected a folder of models")

    def _patiently(self, url: str, headers: Mapping[str, str]) -> Any:
        """Open `url`, repeating requests that fail for a moment."""
        import time

        pause = FIRST_PAUSE_SECONDS
        for left in range(TRIES - 1, -1, -1):
            try:
                return self._open(url, headers)
            except Interrupted as broken:
                if not left:
                    raise SourceFailed(f"{url}: cannot be reached, after {TRIES} tries: {broken}") from None
                time.sleep(pause)
                pause *= 2
        raise AssertionError("the last try returns or raises")

    def _open(self, url: str, headers: Mapping[str, str]) -> Any:
        request = urllib.request.Request(url, headers={**self._headers, **headers})
        try:
            return self._open_url(request, timeout=TIMEOUT_SECONDS)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in _TRANSIENT:
                raise Interrupted(f"HTTP {error.code} {error.reason}") from None
            if error.code in (404, 410):
                raise FileGone(f"{url}: no such file (HTTP {error.code})") from None
            if error.code == 416:
                raise FileGone(f"{url}: is shorter than when it was listed (HTTP 416)") from None
            raise SourceFailed(f"{url}: HTTP {error.code} {error.reason}") from None
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            raise Interrupted(str(getattr(error, "reason", "") or error)) from None


def _version(headers: Any) -> str:
    tag = headers.get("ETag", "")
    if tag and not tag.startswith("W/"):
        return str(tag.strip('"'))
    return str(headers.get("Last-Modified", "") or tag)


def _entries(text: str, url: str) -> Iterator[str]:
    """Yield the relative names in a listing that are directly in this folder; folders end with a slash."""
    parser = _Links()
    parser.feed(text)
    base = urlsplit(url)
    folder = base.path
    for link in dict.fromkeys(parser.links):
        place = urlsplit(urljoin(url, link))
        if (place.scheme, place.netloc) != (base.scheme, base.netloc) or place.query or place.fragment:
            continue
        name = place.path.removeprefix(folder)
        if name == place.path or not name or "/" in name.removesuffix("/") or unquote(name) in ("./", "../", "..", "."):
            continue
        if "/" in unquote(name).removesuffix("/") or "\0" in unquote(name):
            continue
        yield name


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the targets of links."""
        if tag == "a":
            self.links += [value for key, value in attrs if key == "href" and value]
