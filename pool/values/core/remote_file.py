"""`RemoteFile`: a file of weights at a source, as a value that travels to the nodes that fetch it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file at a source.

    path        its name below the source, with slashes; files of one model keep their relative places on every node
    url         where its bytes are
    size_bytes  its size
    version     distinguishes it from other content at the same place: an ETag, a version id, or times; "" if unknown
    sha256      of the complete file, in hexadecimal; "" if the source does not publish it
    """

    path: str
    url: str
    size_bytes: int
    version: str = ""
    sha256: str = ""
