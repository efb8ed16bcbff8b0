"""`HubSource`: the files of one revision of a repository on the Hugging Face hub, or on a server that answers like it.

The revision is resolved to a commit once, so the listed files are the files that are read: a branch that moves
meanwhile changes nothing. Large files have a published SHA-256, small ones git's own hash of their content; both are
compared by `pool.files.fetch.hub_download`. Standard library only.
Source: "Hub API Endpoints" and "Downloading files" in the documentation of the hub.
"""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPMessage
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from modelpool.pool.files.fetch.fetch_errors import FileGone, SourceFailed
from modelpool.pool.files.fetch.http_source import HttpSource
from modelpool.pool.files.fetch.source import MAX_FILES
from modelpool.pool.values.core.errors import counted
from modelpool.pool.values.core.remote_file import RemoteFile

#: the revision that the hub uses if none is named
MAIN = "main"
#: larger descriptions of a repository are refused
MAX_DESCRIPTION_BYTES = 64 << 20
#: what the hub says about a refusal, in a header of its answers
_REASON = "X-Error-Code"
_NO_TOKEN, _NOT_ALLOWED, _NOT_FOUND = 401, 403, (404, 410)
#: names and hashes in an answer: they become parts of paths on this machine
_REPOSITORY = re.compile(r"[\w\-][\w.\-]*/[\w\-][\w.\-]*")
_COMMIT = re.compile(r"[\w\-][\w.\-]*")
_HASH = re.compile(r"[0-9a-f]{40,64}")


@dataclass(frozen=True, slots=True)
class Hub:
    """A hub: the URL of its server, and the token of the user; "" for none. The token is sent to that server alone."""

    endpoint: str
    token: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request to this server."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. `git_sha1` is the hash that git has of the content, "" for files that git does not store:
    those have a `sha256` in `file`."""

    file: RemoteFile
    git_sha1: str = ""


@dataclass(frozen=True, slots=True)
class HubRevision:
    """What a revision of a repository contains. `commit` is the one that `revision` means now."""

    repository: str
    revision: str
    commit: str
    files: Mapping[str, HubFile]


class HubSource:
    """Reads files of one hub. See `FileSource`; any number of threads may use it."""

    def __init__(self, hub: Hub) -> None:
        self.url = hub.endpoint.rstrip("/")
        self._hub = hub
        parts = urlsplit(self.url)
        self._opener = urllib.request.build_opener(_TokenStays((parts.scheme, parts.netloc)))
        self._http = HttpSource(self.url, hub.headers, self._open)
        #: URLs of this hub with the name of a repository, and a revision
        self._place = re.compile(rf"{re.escape(self.url)}/(?:api/models/)?(.+?)/(?:revision|resolve)/([^/?]+)(.*)")

    def revision(self, repository: str, revision: str = "") -> HubRevision:
        """Return the files of a revision: a branch, tag or commit; "" is the main branch.

        Raises SourceFailed, with what to do, for a repository or revision that does not exist or is not open to this
        user, and for a hub that cannot be reached.
        """
        wanted = revision or MAIN
        url = f"{self.url}/api/models/{quote(repository)}/revision/{quote(wanted, safe='')}?blobs=true"
        described = self._described(url)
        try:
            # a repository that was renamed answers with its new name, which becomes the name of a folder
            name = _checked(_REPOSITORY, "id", described.get("id") or repository)
            commit = _checked(_COMMIT, "sha", described["sha"])
            found = {file.file.path: file for file in self._files(name, commit, described["siblings"])}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            without = f"an answer without {error}" if isinstance(error, KeyError) else f"an answer with {error}"
            raise SourceFailed(f"{url}: found {without}, expected the hub's list of files") from None
        if len(found) > MAX_FILES:
            raise SourceFailed(f"{repository}: has {counted(len(found), 'file')}, expected at most {MAX_FILES}")
        return HubRevision(name, wanted, commit, found)

    def files(self) -> tuple[RemoteFile, ...]:
        """See `FileSource`. A hub is not listed as a whole: `revision` lists a repository."""
        return ()

    def read(self, file: RemoteFile, begin: int, end: int) -> Iterator[bytes]:
        """See `FileSource`."""
        return self._http.read(file, begin, end)

    def check(self, file: RemoteFile) -> None:
        """See `FileSource`. The URL contains the commit, so the file cannot change."""

    def _described(self, url: str) -> Any:
        """Return the JSON object at `url`. Raises SourceFailed."""
        with self._http.answer(url) as answer:
            try:
                text = answer.read(MAX_DESCRIPTION_BYTES + 1)
            except (OSError, http.client.HTTPException) as error:
                raise SourceFailed(f"{url}: the answer broke off: {error}") from error
        try:
            if len(text) > MAX_DESCRIPTION_BYTES:
                raise ValueError("it is too long")
            found = json.loads(text)
            if not isinstance(found, dict):
                raise ValueError("it is no object")
        except ValueError as error:
            raise SourceFailed(f"{url}: found no JSON ({error}), expected the hub's list of files") from None
        return found

    def _files(self, repository: str, commit: str, siblings: Any) -> Iterator[HubFile]:
        for each in siblings:
            path, stored = str(each["rfilename"]), each.get("lfs") or {}
            size_bytes = int(stored["size"] if stored else each["size"])
            if size_bytes < 0:
                raise ValueError(f"a size of {size_bytes} bytes")
            url = f"{self.url}/{quote(repository)}/resolve/{quote(commit)}/{quote(path)}"
            sha256 = _checked(_HASH, "sha256", stored["sha256"]) if stored.get("sha256") else ""
            sha1 = _checked(_HASH, "blobId", each["blobId"]) if each.get("blobId") and not sha256 else ""
            # no version: the commit is in the URL, and the ETag is of the server that the hub sends clients to
            yield HubFile(RemoteFile(path, url, size_bytes, "", sha256), sha1)

    def _open(self, request: urllib.request.Request, timeout: float) -> Any:
        """Open `request`; a refusal by the hub itself is explained. Raises as `urllib.request.urlopen`, and
        SourceFailed."""
        try:
            return self._opener.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            place = self._place.fullmatch(error.url or request.full_url)
            if place is None or error.code not in (_NO_TOKEN, _NOT_ALLOWED, *_NOT_FOUND):
                raise
            error.close()
            repository, revision, path = unquote(place[1]), unquote(place[2]), unquote(place[3])
            if error.code in _NOT_FOUND and "/api/models/" not in place[0]:
                raise FileGone(
                    f"{repository}: the hub lists {path.lstrip('/')}, but does not have it any more"
                ) from None
            raise SourceFailed(self._refusal(repository, revision, error.code, error.headers)) from None

    def _refusal(self, repository: str, revision: str, status: int, headers: Message) -> str:
        """Return why the hub refuses, and what to do."""
        reason, page = headers.get(_REASON, ""), f"{self.url}/{repository}"
        if reason == "RevisionNotFound":
            return f"{repository}: the hub has no revision {revision!r} of it; {page} lists its branches"
        if reason == "GatedRepo" or status == _NOT_ALLOWED:
            asks = "" if self._hub.token else ", and set HF_TOKEN to a token of the account that has access"
            return f"{repository}: access is restricted (HTTP {status}): ask for it on {page}{asks}"
        if status == _NO_TOKEN and self._hub.token:
            return f"{repository}: the hub does not accept this token (HTTP {status}); expected a valid one in HF_TOKEN"
        private = "" if self._hub.token else "; if it is private, set HF_TOKEN to a token of its owner"
        return f"{repository}: the hub has no such repository for this user (HTTP {status}){private}"


def _checked(pattern: re.Pattern[str], field: str, value: object) -> str:
    """Return a text of an answer. Raises ValueError if it does not match."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{field} {str(value)[:100]!r}")
    return value


class _TokenStays(urllib.request.HTTPRedirectHandler):
    """Follows the hub to the servers that store its files, without the token: they get a signed URL."""

    def __init__(self, hub: tuple[str, str]) -> None:
        self._hub = hub  # scheme and host

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        """Return the request to the new place, with the token only if that is the hub itself."""
        followed = super().redirect_request(req, fp, code, msg, headers, newurl)
        place = urlsplit(newurl)
        if followed is not None and (place.scheme, place.netloc) != self._hub:
            followed.remove_header("Authorization")
        return followed
