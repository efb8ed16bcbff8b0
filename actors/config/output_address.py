"""Addresses of output places: the path of a folder, or the URL of an object store. Imports no library."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from modelpool.pool.files.fetch.source_url import (
    EXTRAS,
    FILE_SCHEME,
    HTTP_SCHEMES,
    is_url,
    scheme_of,
    split_url,
    url_path,
)
from modelpool.pool.values.core.errors import unusable_field

#: a path of this machine, or a URL as text
OutputAddress: TypeAlias = Path | str


@dataclass(frozen=True, slots=True)
class OutputDefaults:
    """Where drivers of a pool write outputs unless they choose another place, and the template of the names of files;
    None: nowhere, and the usual names. `by_nodes`: nodes write the outputs that they made, where they can.
    """

    folder: OutputAddress | None = None
    name: str | None = None
    by_nodes: bool = True


NO_OUTPUT = OutputDefaults()

#: what pathlib makes of a URL
_FLATTENED = re.compile(rf"({'|'.join(EXTRAS)}|memory):/[^/]")
_EXPECTED = "a folder, or a URL such as s3://bucket/folder"


def output_address(given: str | Path, field: str = "output") -> OutputAddress:
    """Return the address of outputs: a folder as a path, also if it is a file:// URL, and another URL as text, without
    a slash at its end. Contacts no store.

    Raises UnusableField for a URL without a bucket, for http://, which cannot be written, and for one with a user name,
    a password or parameters, which would end up in logs and manifests.
    """
    if isinstance(given, str) and not given.strip():
        raise unusable_field(field, given, f"{_EXPECTED}; a dot is the current folder")
    if not isinstance(given, str) or not is_url(given):
        if _FLATTENED.match(str(given)):
            found = f"{str(given).partition(':')[0]}:/..."
            raise unusable_field(field, found, "a URL as text: pathlib removes one of its slashes")
        return Path(given)
    scheme, parts = scheme_of(given), split_url(field, given)
    if parts.query or parts.fragment:
        raise unusable_field(field, f"{scheme}://{parts.netloc}{parts.path}?...", "a URL without parameters")
    if scheme == FILE_SCHEME:
        return url_path(given)
    if scheme in HTTP_SCHEMES:
        raise unusable_field(field, given, f"{_EXPECTED}; {scheme}:// cannot be written")
    if not parts.netloc and (scheme in EXTRAS or not parts.path.strip("/")):
        raise unusable_field(field, given, "a URL with a bucket, such as s3://bucket/folder")
    return given.rstrip("/")


def local_folder(given: str | Path, field: str) -> Path:
    """Return the folder of outputs that a server reads, too. Raises UnusableField for any URL but file://."""
    address = output_address(given, field)
    if not isinstance(address, Path):
        expected = "a folder: outputs in a store are not served over HTTP; name one with --out or [serve] folder"
        raise unusable_field(field, address, expected)
    return address


def absolute_address(address: OutputAddress) -> OutputAddress:
    """Return an address that means the same in another working folder."""
    return address.absolute() if isinstance(address, Path) else address


def file_of(address: OutputAddress) -> str:
    """Return the name of the file or object at `address`."""
    return address.name if isinstance(address, Path) else address.rsplit("/", 1)[-1]
