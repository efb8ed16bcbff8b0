"""Stores the registry's data between runs: added locations, aliases, and the hashes of files.

Knows tables. The facts of a file are read from its header each time: a later version may extract more.
"""

from __future__ import annotations

import dataclasses
import logging
import sqlite3
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from modelpool.pool.catalog.registry.database import Database, Schema
from modelpool.pool.catalog.registry.folder_scan import Fingerprint
from modelpool.pool.catalog.registry.hashes import FileHashes
from modelpool.pool.catalog.registry.weight_file_names import folded
from modelpool.pool.files.formats.byte_ranges import ByteRange
from modelpool.pool.models.loading.content_digest import DIGEST_BYTES
from modelpool.pool.values.core.user_folders import cache_folder, state_folder

logger = logging.getLogger(__name__)

DATABASE_FILE = "models.sqlite3"
#: a second database: digests of the tensors of files, which can be computed again
CONTENTS_FILE = "contents.sqlite3"
#: maximum number of files with stored tensor digests: a checkpoint takes some 80 KiB
MAX_CONTENTS = 5_000
#: maximum number of files with stored hashes; the oldest entries are removed first
MAX_FILES = 50_000

SCHEMA = Schema(
    version=1,
    tables={
        "places": "path TEXT PRIMARY KEY NOT NULL",
        "aliases": "folded TEXT PRIMARY KEY NOT NULL, name TEXT NOT NULL, path TEXT, sha256 TEXT, "
        "CHECK ((path IS NULL) <> (sha256 IS NULL))",
        # one row per file; valid while the file's size and times are unchanged
        "hashes": "path TEXT PRIMARY KEY NOT NULL, size_bytes INTEGER NOT NULL, modified_ns INTEGER NOT NULL, "
        "changed_ns INTEGER NOT NULL, sha256 TEXT NOT NULL, autov1 TEXT NOT NULL, data_sha256 TEXT NOT NULL",
    },
    precious=("places", "aliases"),
)
CONTENTS_SCHEMA = Schema(
    version=1,
    tables={
        "contents": "path TEXT PRIMARY KEY NOT NULL, size_bytes INTEGER NOT NULL, modified_ns INTEGER NOT NULL, "
        "changed_ns INTEGER NOT NULL, digests BLOB NOT NULL",
    },
)
#: one range of a file: begin, end and digest
_RANGE = struct.Struct(f"<QQ{DIGEST_BYTES}s")


@dataclass(frozen=True, slots=True)
class Alias:
    """A user-defined name of a file: of the file at `path`, or of the content with `sha256`; one of them is empty."""

    name: str
    path: str = ""
    sha256: str = ""

    @property
    def target(self) -> str:
        """The target as text."""
        return self.path or self.sha256


@dataclass(frozen=True, slots=True)
class HashRecord:
    """The hashes of one state of a file."""

    fingerprint: Fingerprint
    hashes: FileHashes


@dataclass(frozen=True, slots=True)
class ContentRecord:
    """The digests of the tensors of one state of a file, by their ranges."""

    fingerprint: Fingerprint
    digests: Mapping[ByteRange, bytes]


class RegistryStore:
    """Reads and writes the registry's database, each call in one transaction. Raises OutputFailed if that is
    impossible."""

    def __init__(self, folder: Path, contents_folder: Path | None = None) -> None:
        """`folder` is created when something is stored, and so is `contents_folder`, which is for the digests of
        tensors (by default `folder`). Digests that an earlier version has stored in `folder` are still read."""
        self._database = Database(folder / DATABASE_FILE, SCHEMA)
        self._contents = Database((contents_folder or folder) / CONTENTS_FILE, CONTENTS_SCHEMA)
        former = folder / CONTENTS_FILE
        self._former_contents = Database(former, CONTENTS_SCHEMA) if former != self._contents.path else None

    @property
    def path(self) -> Path:
        """The database's file."""
        return self._database.path

    def locations(self) -> tuple[Path, ...]:
        """Return the added locations, in the order of their addition."""
        if not self.path.exists():  # a query creates nothing
            return ()
        rows = self._database.read(lambda db: db.execute("SELECT path FROM places ORDER BY rowid").fetchall())
        return tuple(Path(path) for (path,) in rows)

    def add_location(self, path: Path) -> bool:
        """Add a location. Return whether it is new."""
        insert = "INSERT OR IGNORE INTO places VALUES (?)"
        return self._database.write(lambda db: db.execute(insert, (str(path),)).rowcount) == 1

    def remove_location(self, path: Path) -> bool:
        """Remove a location. Return whether it existed."""
        delete = "DELETE FROM places WHERE path = ?"
        return self._database.write(lambda db: db.execute(delete, (str(path),)).rowcount) == 1

    def aliases(self) -> tuple[Alias, ...]:
        """Return every alias, by name."""
        if not self.path.exists():
            return ()
        select = "SELECT name, path, sha256 FROM aliases ORDER BY folded"
        rows = self._database.read(lambda db: db.execute(select).fetchall())
        return tuple(Alias(name, path or "", sha256 or "") for name, path, sha256 in rows)

    def set_alias(self, alias: Alias) -> Alias | None:
        """Store `alias`, and return the previous one of that name."""

        def change(db: sqlite3.Connection) -> Alias | None:
            before = _alias(db, alias.name)
            row = (folded(alias.name), alias.name, alias.path or None, alias.sha256 or None)
            db.execute("INSERT OR REPLACE INTO aliases VALUES (?, ?, ?, ?)", row)
            return before

        return self._database.write(change)

    def remove_alias(self, name: str) -> Alias | None:
        """Remove the alias `name` and return it."""

        def change(db: sqlite3.Connection) -> Alias | None:
            before = _alias(db, name)
            db.execute("DELETE FROM aliases WHERE folded = ?", (folded(name),))
            return before

        return self._database.write(change)

    def hash_record(self, path: str) -> HashRecord | None:
        """Return the stored hashes of the file at the real path `path`."""
        if not self.path.exists():
            return None
        select = "SELECT * FROM hashes WHERE path = ?"
        row = self._database.read(lambda db: db.execute(select, (path,)).fetchone())
        return None if row is None else HashRecord(Fingerprint(*row[1:4]), FileHashes(*row[4:]))

    def hashes(self) -> dict[str, HashRecord]:
        """Return all stored hashes, by real path."""
        if not self.path.exists():
            return {}
        rows = self._database.read(lambda db: db.execute("SELECT * FROM hashes").fetchall())
        return {row[0]: HashRecord(Fingerprint(*row[1:4]), FileHashes(*row[4:])) for row in rows}

    def save_hashes(self, path: str, record: HashRecord) -> None:
        """Store the hashes of the file at the real path `path`."""

        def change(db: sqlite3.Connection) -> None:
            hashes = dataclasses.astuple(record.hashes)
            # a replaced row becomes the newest
            db.execute(
                f"INSERT OR REPLACE INTO hashes VALUES ({', '.join('?' * 7)})",
                (path, *dataclasses.astuple(record.fingerprint), *hashes),
            )
            oldest = "SELECT rowid FROM hashes ORDER BY rowid DESC LIMIT -1 OFFSET ?"
            db.execute(f"DELETE FROM hashes WHERE rowid IN ({oldest})", (MAX_FILES,))

        self._database.write(change)

    def content_record(self, path: str) -> ContentRecord | None:
        """Return the stored digests of the file at the real path `path`."""
        found = _content(self._contents, path)
        if found is None and self._former_contents is not None:
            found = _content(self._former_contents, path)
            if found is not None:
                logger.warning(
                    "the digests of %s were in %s; they are now in %s",
                    path,
                    self._former_contents.path,
                    self._contents.path,
                )
                self.save_content(path, found)
        return found

    def save_content(self, path: str, record: ContentRecord) -> None:
        """Store the digests of the file at the real path `path`."""
        packed = b"".join(_RANGE.pack(*place, digest) for place, digest in record.digests.items())

        def change(db: sqlite3.Connection) -> None:
            row = (path, *dataclasses.astuple(record.fingerprint), packed)
            db.execute(f"INSERT OR REPLACE INTO contents VALUES ({', '.join('?' * 5)})", row)
            oldest = "SELECT rowid FROM contents ORDER BY rowid DESC LIMIT -1 OFFSET ?"
            db.execute(f"DELETE FROM contents WHERE rowid IN ({oldest})", (MAX_CONTENTS,))

        self._contents.write(change)


def open_store(folder: Path | None = None) -> RegistryStore:
    """Return the store in `folder`; without one the user's store, in the folders of the user's state and caches."""
    return RegistryStore(state_folder(), cache_folder()) if folder is None else RegistryStore(folder)


def _content(database: Database, path: str) -> ContentRecord | None:
    if not database.path.exists():
        return None
    select = "SELECT * FROM contents WHERE path = ?"
    row = database.read(lambda db: db.execute(select, (path,)).fetchone())
    if row is None or len(row[4]) % _RANGE.size:
        return None
    return ContentRecord(Fingerprint(*row[1:4]), {(b, e): digest for b, e, digest in _RANGE.iter_unpack(row[4])})


def _alias(db: sqlite3.Connection, name: str) -> Alias | None:
    row = db.execute("SELECT name, path, sha256 FROM aliases WHERE folded = ?", (folded(name),)).fetchone()
    return None if row is None else Alias(row[0], row[1] or "", row[2] or "")
