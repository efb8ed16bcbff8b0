"""A small SQLite database that several processes of one machine share. Standard library only.

Knows transactions, waiting and damage; `pool.catalog.registry.registry_store` knows what the tables mean.

Rules:
1. Every use opens the file again, so that nothing is shared over a fork or between threads.
2. Writers are serialized: a transaction begins as a writer, waits for the one before, and is atomic.
3. A damaged database is kept under another name, never deleted, and replaced by a new one with the readable rows.
4. Every use holds a lock on a file next to it: shared to use the database, exclusive to create or replace it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from modelpool.pool.values.core.errors import OutputFailed

T = TypeVar("T")
_Row: TypeAlias = tuple[object, ...]

#: how long a process waits for earlier ones
BUSY_SECONDS = 60.0
#: the low byte of SQLite's error codes for a damaged file: SQLITE_CORRUPT, SQLITE_NOTADB
_DAMAGE = (11, 26)


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of a database.

    version   written to the file; another number is another layout
    tables    name -> column definitions of CREATE TABLE
    precious  tables that only a user could fill again
    """

    version: int
    tables: dict[str, str]
    precious: tuple[str, ...] = ()


class Database:
    """The database at `path`. Nothing is opened or created before the first use."""

    def __init__(self, path: Path, schema: Schema) -> None:
        self.path = path
        self._schema = schema

    def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of `query` on one state of the database. Raises OutputFailed if the database cannot be
        used."""
        return self._use(query, "BEGIN")

    def write(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """Apply `change` atomically; it may be called twice. Raises OutputFailed."""
        return self._use(change, "BEGIN IMMEDIATE")

    def _use(self, work: Callable[[sqlite3.Connection], T], begin: str) -> T:
        try:
            try:
                return self._once(work, begin)
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._set_aside(error)
            return self._once(work, begin)
        except (sqlite3.Error, OSError) as error:
            raise OutputFailed(f"{self.path}: cannot be used: {error}") from error

    def _once(self, work: Callable[[sqlite3.Connection], T], begin: str) -> T:
        for _ in range(2):
            with self._lock(exclusive=False), contextlib.closing(_connection(self.path)) as connection:
                if self._is_initialized(connection):
                    return _in_transaction(connection, work, begin)
            self._initialize()
        raise sqlite3.OperationalError("its tables disappeared right after their creation")

    def _is_initialized(self, connection: sqlite3.Connection) -> bool:
        [version] = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, self._schema.version):
            raise OutputFailed(
                f"{self.path}: written by another version of modelpool (layout {version}, expected "
                f"{self._schema.version}); move it away to create a new one"
            )
        return bool(version)

    def _initialize(self) -> None:
        with self._lock(exclusive=True), contextlib.closing(_connection(self.path)) as connection:
            if not self._is_initialized(connection):
                self._fill(connection, {})

    def _fill(self, connection: sqlite3.Connection, rows: dict[str, list[_Row]]) -> None:
        """Create the tables, with `rows` in them."""
        # if the file system does not support it, as some network ones, SQLite keeps its older journal
        connection.execute("PRAGMA journal_mode = WAL")

        def make(connection: sqlite3.Connection) -> None:
            for name, columns in self._schema.tables.items():
                connection.execute(f"CREATE TABLE {name} ({columns})")
                for row in rows.get(name, ()):
                    marks = ", ".join("?" * len(row))
                    connection.execute(f"INSERT OR IGNORE INTO {name} VALUES ({marks})", row)
            connection.execute(f"PRAGMA user_version = {self._schema.version}")

        _in_transaction(connection, make, "BEGIN IMMEDIATE")

    def _set_aside(self, error: sqlite3.DatabaseError) -> None:
        """Keep the damaged file under another name and create a new one, unless another process has done so.

        The new one replaces the old one atomically when it is complete: an interruption before that leaves the old one.
        """
        with self._lock(exclusive=True):
            if self._is_intact():
                return
            rescued = {table: self._rescue(table) for table in self._schema.precious}
            kept, replacement = self._free_name(), Path(f"{self.path}.new")
            replacement.unlink(missing_ok=True)
            with contextlib.closing(_connection(replacement)) as connection:
                self._fill(connection, rescued)
            shutil.copyfile(self.path, kept)
            # a log of another database would be replayed into it
            for end in ("-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(f"{self.path}{end}", f"{kept}{end}")
            os.replace(replacement, self.path)
        counts = ", ".join(f"{len(rows)} {table}" for table, rows in rescued.items())
        warnings.warn(
            f"{self.path} was damaged ({error}). It is kept as {kept.name} and replaced by a new one; the rows that "
            f"could be read were copied: {counts or 'none'}",
            RuntimeWarning,
            stacklevel=4,
        )

    def _is_intact(self) -> bool:
        try:
            with contextlib.closing(_connection(self.path)) as connection:
                return bool(connection.execute("PRAGMA integrity_check").fetchone() == ("ok",))
        except sqlite3.DatabaseError as error:
            if _is_damage(error):
                return False
            raise

    def _rescue(self, table: str) -> list[_Row]:
        """Return the readable rows of `table`; none if it cannot be read."""
        rows: list[_Row] = []
        with contextlib.suppress(sqlite3.Error), contextlib.closing(_connection(self.path)) as connection:
            rows.extend(connection.execute(f"SELECT * FROM {table} NOT INDEXED"))
        return rows

    def _free_name(self) -> Path:
        number = 1
        while (name := self.path.with_name(f"{self.path.name}.damaged-{number}")).exists():
            number += 1
        return name

    @contextlib.contextmanager
    def _lock(self, exclusive: bool) -> Iterator[None]:
        """Hold the lock file next to the database; the kernel releases it when the process ends."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if sys.platform == "win32":  # has no flock; there SQLite refuses to rename a file in use
            yield
            return
        import fcntl

        descriptor = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            yield
        finally:
            os.close(descriptor)


def _connection(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)


def _in_transaction(connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], T], begin: str) -> T:
    connection.execute(begin)
    try:
        done = work(connection)
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    return done


def _is_damage(error: sqlite3.Error) -> bool:
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF in _DAMAGE
