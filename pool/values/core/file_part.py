"""`FilePart`: the file that a component is in, as messages between processes name it."""

from __future__ import annotations

from dataclasses import dataclass

from modelpool.pool.values.core.assembly import Assembly
from modelpool.pool.values.core.remote_file import RemoteFile
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.values.specs.wire_value import WireValue


@dataclass(frozen=True, slots=True)
class FilePart(WireValue):
    """The file that contains a component, or the file that lists the files that do. `role` is None if the component is
    the complete file, such as a LoRA; `assembly` has the files of its model if a configuration specifies them; `files`
    are those to fetch first, if it is of a source; `sha256` is of all of the files, as a reference to them names it."""

    path: str
    role: Role | None = None
    assembly: Assembly | None = None
    files: tuple[RemoteFile, ...] = ()
    sha256: str = ""
