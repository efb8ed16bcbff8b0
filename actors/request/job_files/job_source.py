"""`JobSource`: the file or folder at a path or URL, through fsspec for URLs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from modelpool.pool.files.fetch.file_system import open_file_system
from modelpool.pool.files.fetch.source_url import (
    FILE_SCHEME,
    is_url,
    scheme_of,
    split_url,
    url_path,
    without_credentials,
)
from modelpool.pool.values.core.errors import UserError


@dataclass(frozen=True, slots=True)
class JobSource:
    """A file or folder. `name` is how messages name it; `system` is its fsspec file system, None for a path of this
    machine; `path` is its path in there.
    """

    name: str
    system: Any
    path: str

    @property
    def ending(self) -> str:
        """The suffix of its name, in lower case."""
        return PurePosixPath(self.path).suffix.lower()

    def is_folder(self) -> bool:
        """Whether it is a folder. Raises UserError for a store that cannot be reached."""
        with self._failures_named():
            return Path(self.path).is_dir() if self.system is None else bool(self.system.isdir(self.path))

    def files(self) -> list[JobSource]:
        """Return the files in this folder and the folders in it, sorted by their paths. Hidden ones are left out."""
        with self._failures_named():
            if self.system is None:
                found = [str(each) for each in Path(self.path).rglob("*") if each.is_file()]
            else:
                found = list(self.system.find(self.path))
        inside = {each: PurePosixPath(each).relative_to(PurePosixPath(self.path)) for each in found}
        return [
            JobSource(f"{self.name.rstrip('/')}/{relative}", self.system, each)
            for each, relative in sorted(inside.items())
            if not any(part.startswith(".") for part in relative.parts)
        ]

    @contextlib.contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Open the file for reading. Raises UserError naming it, also while the block reads."""
        with self._failures_named(), self._open() as file:
            yield cast(BinaryIO, file)

    def _open(self) -> Any:
        return Path(self.path).open("rb") if self.system is None else self.system.open(self.path, "rb")

    @contextlib.contextmanager
    def _failures_named(self) -> Iterator[None]:
        try:
            yield
        except (UserError, GeneratorExit):
            raise
        except FileNotFoundError:
            raise UserError(f"{self.name}: cannot be read (No such file or directory)") from None
        except Exception as error:  # each library has its own errors
            if self.system is None:
                if not isinstance(error, OSError):
                    raise
                raise UserError(f"{self.name}: cannot be read ({error.strerror or error})") from error
            raise UserError(f"{self.name}: cannot be read ({without_credentials(f'{error}')})") from error


def job_source(address: str) -> JobSource:
    """Return the source at a path or URL. Contacts no store. Raises UserError for a URL with credentials, and without
    the library of its scheme.
    """
    if not is_url(address):
        return JobSource(address, None, address)
    split_url("job file", address)
    if scheme_of(address) == FILE_SCHEME:
        return JobSource(address, None, str(url_path(address)))
    system = open_file_system(address)
    return JobSource(address, system, str(system._strip_protocol(address)))
