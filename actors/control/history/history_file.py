"""`HistoryFile`: the history of a pool in one SQLite file: its writer, and its bounds.

Rules
1. One process writes: a lock on a file next to it. Others read (`history_reader`), also while it writes.
2. A batch is one transaction, with the number of the last record of the spool that it has: nothing is lost or counted
   twice when the writer is killed.
3. The oldest rows are removed: events by their number, costs by the batch that changed them last. Neither depends on
   the wall clock, which may be set back.
4. Times are wall-clock times. Costs are sums for whole hours, so that their number does not grow with the number of
   runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from modelpool.actors.control.history.history_values import (
    SUM_FIELDS,
    HistoryBatch,
    HistoryEvent,
    record_in_text,
)
from modelpool.actors.control.history.spool import SpooledRecord
from modelpool.pool.values.core.errors import UserError

#: how long a statement waits for another process's lock, which only a backup or a person's sqlite3 holds
BUSY_SECONDS = 10.0
#: events that are equal within this time are one row
TOGETHER_SECONDS = 60.0
#: rows that later events may be added to
MOST_OPEN_ROWS = 256
#: rows that one transaction removes, at most: a longer one would need a long write-ahead log
REMOVED_TOGETHER = 20_000
#: part of the rows that is removed at once if the file is too large
REMOVED_PART = 0.1
#: the write-ahead log is cut to this size
LOG_BYTES = 4 << 20

#: the statements that bring a history from version N to N + 1
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE meta (name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID",
        """CREATE TABLE event (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            at REAL NOT NULL,
            until REAL NOT NULL,
            count INTEGER NOT NULL,
            kind TEXT NOT NULL,
            node TEXT NOT NULL,
            worker TEXT NOT NULL,
            node_group TEXT NOT NULL,
            text TEXT NOT NULL
        )""",
        f"""CREATE TABLE cost (
            hour INTEGER NOT NULL,
            user TEXT NOT NULL,
            model TEXT NOT NULL,
            lora TEXT NOT NULL,
            node_group TEXT NOT NULL,
            {", ".join(f"{name} REAL NOT NULL" for name in SUM_FIELDS)},
            batch INTEGER NOT NULL,
            PRIMARY KEY (hour, user, model, lora, node_group)
        ) WITHOUT ROWID""",
        "CREATE INDEX cost_by_batch ON cost (batch)",
        """CREATE TABLE node_cost (
            hour INTEGER NOT NULL,
            node_group TEXT NOT NULL,
            cost REAL NOT NULL,
            batch INTEGER NOT NULL,
            PRIMARY KEY (hour, node_group)
        ) WITHOUT ROWID""",
        "CREATE TABLE spool (name TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID",
    ),
)
VERSION = len(MIGRATIONS)

_KEY_COLUMNS = "hour, user, model, lora, node_group"
_ADD_COST = (
    f"INSERT INTO cost ({_KEY_COLUMNS}, {', '.join(SUM_FIELDS)}, batch) "
    f"VALUES ({', '.join('?' * (6 + len(SUM_FIELDS)))}) ON CONFLICT ({_KEY_COLUMNS}) DO UPDATE SET "
    f"{', '.join(f'{name} = {name} + excluded.{name}' for name in SUM_FIELDS)}, batch = excluded.batch"
)
_ADD_NODE_COST = (
    "INSERT INTO node_cost (hour, node_group, cost, batch) VALUES (?, ?, ?, ?) "
    "ON CONFLICT (hour, node_group) DO UPDATE SET cost = cost + excluded.cost, batch = excluded.batch"
)
_ADD_EVENT = (
    "INSERT INTO event (at, until, count, kind, node, worker, node_group, text) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
#: tables with costs, and the columns of their keys
_COST_TABLES = {"cost": _KEY_COLUMNS, "node_cost": "hour, node_group"}


class HistoryFailed(UserError):
    """A history that cannot be opened, read or written. The message names the file and the reason."""


class HistoryBusy(HistoryFailed):
    """Another process writes the history."""


@dataclass(frozen=True, slots=True)
class HistoryBounds:
    """The most that is kept: events, rows of costs (one hour, user, model, LoRA and group each), bytes of the file."""

    events: int = 200_000
    cost_rows: int = 500_000
    size_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True)
class LeftHistory:
    """What an earlier writer has left.

    level        of the account of the pool, whose money is in the history up to it
    was_running  the writer was killed, and its pool goes on
    """

    level: float = 0.0
    was_running: bool = False


#: the bounds of a pool
USUAL_BOUNDS = HistoryBounds()


class HistoryFile:
    """An open history. One thread uses it. `close` releases it."""

    def __init__(self, path: Path, bounds: HistoryBounds = USUAL_BOUNDS) -> None:
        """Open or create the history at `path`. Raises HistoryFailed, and HistoryBusy if another process has it."""
        self.path = path
        self._bounds = bounds
        #: rows that equal events are added to: number and first time, by kind and `HistoryEvent.same`
        self._open_rows: dict[tuple[str, str], tuple[int, float]] = {}
        self._lock_file = _locked(path)
        try:
            with failures_named(path):
                self._connection = _opened(path)
                values = dict(self._connection.execute("SELECT name, value FROM meta").fetchall())
        except BaseException:
            self._lock_file.close()
            raise
        self.left = LeftHistory(values.get("level", 0.0), bool(values.get("running", 0.0)))
        self._batch = int(values.get("batch", 0.0))

    def stored_number(self, spool: str) -> int:
        """Return the number of the last record of a spool that is stored; 0 if none is."""
        with failures_named(self.path):
            found = self._connection.execute("SELECT number FROM spool WHERE name = ?", (spool,)).fetchone()
        return 0 if found is None else int(found[0])

    def write(self, batch: HistoryBatch) -> None:
        """Add a batch, as one transaction. Raises HistoryFailed; then nothing of it is stored."""
        open_rows = dict(self._open_rows)
        try:
            with failures_named(self.path), _transaction(self._connection):
                self._add(batch)
        except BaseException:
            self._open_rows = open_rows
            raise

    def prune(self) -> None:
        """Remove the oldest rows beyond the bounds. Raises HistoryFailed."""
        with failures_named(self.path):
            self._prune_rows(self._bounds.events, self._bounds.cost_rows)
            for _ in range(int(3 / REMOVED_PART)):
                if self.used_bytes() <= self._bounds.size_bytes:
                    return
                events, costs = self._event_count(), sum(map(self._row_count, _COST_TABLES))
                # of whichever has more rows; costs are smaller and asked for longer
                if events >= min(costs, 1000):
                    self._prune_rows(int(events * (1 - REMOVED_PART)), self._bounds.cost_rows)
                elif costs > 1:
                    self._prune_rows(self._bounds.events, int(costs * (1 - REMOVED_PART)))
                else:
                    return

    def used_bytes(self) -> int:
        """Return the bytes of the file that rows take."""
        pages, free, page_bytes = (
            int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * page_bytes

    def close(self) -> None:
        """Release the history. Idempotent."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()
        self._lock_file.close()

    def _add(self, batch: HistoryBatch) -> None:
        connection = self._connection
        self._batch += 1
        rows = [
            (key.hour, *map(storable_text, key[1:]), *sums.values(), self._batch) for key, sums in batch.costs.items()
        ]
        connection.executemany(_ADD_COST, rows)
        node_rows = [
            (hour, storable_text(group), cost, self._batch) for (hour, group), cost in batch.node_costs.items()
        ]
        connection.executemany(_ADD_NODE_COST, node_rows)
        for event in batch.events:
            self._add_event(event)
        noted: dict[str, float] = {"batch": float(self._batch), "running": float(not batch.is_last)}
        if batch.level is not None:
            noted["level"] = batch.level
        connection.executemany("INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)", noted.items())
        if batch.spool:
            connection.execute(
                "INSERT OR REPLACE INTO spool (name, number) VALUES (?, ?)", (batch.spool, batch.sequence)
            )

    def _add_event(self, event: HistoryEvent) -> None:
        key = (event.kind, event.same)
        text = storable_text(event.text)
        if event.same and (found := self._open_rows.get(key)) is not None:
            number, first_at = found
            if 0.0 <= event.last_at - first_at <= TOGETHER_SECONDS:
                self._connection.execute(
                    "UPDATE event SET count = count + ?, until = ?, text = ? WHERE number = ?",
                    (event.count, event.last_at, text, number),
                )
                return
        added = self._connection.execute(
            _ADD_EVENT,
            (
                event.at,
                event.last_at,
                event.count,
                *map(storable_text, (event.kind, event.node, event.worker, event.group)),
                text,
            ),
        )
        if event.same:
            self._open_rows.pop(key, None)
            self._open_rows[key] = int(added.lastrowid or 0), event.at
            while len(self._open_rows) > MOST_OPEN_ROWS:
                del self._open_rows[next(iter(self._open_rows))]

    def _event_count(self) -> int:
        """Rows between the oldest and the newest event: only the oldest ones are ever removed."""
        (first, last) = self._connection.execute("SELECT min(number), max(number) FROM event").fetchone()
        return 0 if last is None else int(last) - int(first) + 1

    def _row_count(self, table: str) -> int:
        return int(self._connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])

    def _prune_rows(self, most_events: int, most_cost_rows: int) -> None:
        removed = 0
        while (over := self._event_count() - most_events) > 0:
            count = min(over, REMOVED_TOGETHER)
            with _transaction(self._connection):
                self._connection.execute(
                    "DELETE FROM event WHERE number < (SELECT min(number) FROM event) + ?", (count,)
                )
                self._note_removed("events_removed", count)
            removed += count
        for table, key in _COST_TABLES.items():
            while (over := self._row_count(table) - most_cost_rows) > 0:
                count = min(over, REMOVED_TOGETHER)
                with _transaction(self._connection):
                    self._connection.execute(
                        f"DELETE FROM {table} WHERE ({key}) IN "
                        f"(SELECT {key} FROM {table} ORDER BY batch, hour LIMIT ?)",
                        (count,),
                    )
                    self._note_removed("costs_removed", count)
                removed += count
        if removed:
            self._connection.executescript("PRAGMA incremental_vacuum")  # `execute` would free one page only
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _note_removed(self, name: str, count: int) -> None:
        self._connection.execute(
            "INSERT INTO meta (name, value) VALUES (?, ?) "
            "ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
            (name, float(count)),
        )


def batch_of(spool: str, records: list[SpooledRecord]) -> HistoryBatch:
    """Return the records of a spool that are not stored yet. Records of another version of modelpool are left out, and
    counted in `dropped`."""
    batch = HistoryBatch(spool=spool, sequence=records[-1].number if records else 0)
    for record in records:
        try:
            found = record_in_text(record.text)
        except ValueError:
            batch.dropped += 1
            continue
        if isinstance(found, HistoryEvent):
            batch.events.append(found)
        else:
            batch.charge(found)
    return batch


def storable_text(text: str) -> str:
    """Return a text with escapes in place of what UTF-8 has no bytes for: names of files that are in another encoding,
    in messages and in names of models."""
    return str(text) if text.isascii() else text.encode(errors="backslashreplace").decode()


def _locked(path: Path) -> IO[bytes]:
    """Lock the history (only this user may read its files): it has names of users."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in (path, lock):
            os.close(os.open(each, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        file = lock.open("r+b")
    except OSError as error:
        raise HistoryFailed(f"{path}: the history cannot be opened ({error.strerror or error})") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise HistoryBusy(f"{path}: another process writes this history") from error
    return file


def _opened(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        check_version(path, version)
        for pragma in ("auto_vacuum=INCREMENTAL", "journal_mode=WAL", "synchronous=FULL"):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        connection.execute(f"PRAGMA journal_size_limit={LOG_BYTES}").fetchall()
        for number in range(version, VERSION):
            with _transaction(connection):
                for statement in MIGRATIONS[number]:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version={number + 1}")
    except BaseException:
        connection.close()
        raise
    return connection


def check_version(path: Path, version: int) -> None:
    """Raise HistoryFailed for a history that a later version of modelpool has written."""
    if version > VERSION:
        raise HistoryFailed(
            f"{path}: version {version} of the history, written by a later modelpool; expected at most {VERSION}"
        )


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # a full disk has ended it already
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def failures_named(path: Path) -> Iterator[None]:
    """Raise HistoryFailed for errors of the file."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise HistoryFailed(f"{path}: the history cannot be used ({error})") from error
