"""`HistoryReader`: reads the history of a pool, while the pool runs and afterwards; and the sums that users ask for."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelpool.actors.control.history.history_file import BUSY_SECONDS, HistoryFailed, check_version, failures_named
from modelpool.actors.control.history.history_values import (
    HOUR_SECONDS,
    SUM_FIELDS,
    CostKey,
    CostSums,
    HistoryEvent,
)
from modelpool.pool.values.core.errors import unknown_name

#: what costs may be summed by
COST_FIELDS = ("user", "model", "lora", "group", "hour", "day", "month")
#: stands for the user of nodes without work, or their model, where users are not asked for
NO_WORK = "(nodes without work)"
#: fields that only runs have
_NAMES = ("user", "model", "lora")
#: formats of the fields that are times
_TIMES = {"hour": "%Y-%m-%d %H:00", "day": "%Y-%m-%d", "month": "%Y-%m"}


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event, and its number in the history."""

    number: int
    event: HistoryEvent


@dataclass(frozen=True, slots=True)
class CostRow:
    """The sums of the runs, or of the nodes without work, that have these values of the asked fields."""

    values: tuple[str, ...]
    sums: CostSums

    @property
    def cost(self) -> float:
        """All money, also of runs that failed."""
        return self.sums.cost + self.sums.failed_cost


@dataclass(frozen=True, slots=True)
class HistorySpan:
    """What a history has.

    events_since, costs_since  time of the oldest one, in Unix seconds; None if there is none
    events_removed, costs_removed  rows that were removed since they were too many
    """

    events_since: float | None
    costs_since: float | None
    events_removed: int
    costs_removed: int


class HistoryReader:
    """A history, for reading. Each method opens the file: no transaction stays open."""

    def __init__(self, path: Path) -> None:
        """Raises HistoryFailed if there is no history at `path`, or none that this version reads."""
        self.path = path
        if not path.is_file():
            raise HistoryFailed(f"{path}: there is no history of a pool here")
        self._read("SELECT value FROM meta LIMIT 1")

    def events(
        self,
        since: float | None = None,
        kinds: Sequence[str] = (),
        node: str = "",
        after: int = 0,
        most: int | None = None,
    ) -> tuple[StoredEvent, ...]:
        """Return events in the order in which they were written, the newest `most` of them.

        since  Unix seconds; events that happened last before are left out
        node   part of the name of a node or worker
        after  the number of an event: only later ones
        """
        conditions, values = ["number > ?"], list[Any]([after])
        if since is not None:
            conditions.append("until >= ?")
            values.append(since)
        if kinds:
            conditions.append(f"kind IN ({', '.join('?' * len(kinds))})")
            values += map(str, kinds)
        if node:
            conditions.append("(instr(node, ?) OR instr(worker, ?))")
            values += [node, node]
        rows = self._read(
            "SELECT number, at, kind, text, node, worker, node_group, count, until FROM event "
            f"WHERE {' AND '.join(conditions)} ORDER BY number DESC LIMIT ?",
            (*values, -1 if most is None else most),
        )
        return tuple(
            StoredEvent(number, HistoryEvent(at, kind, text, node_name, worker, group, "", count, until))
            for number, at, kind, text, node_name, worker, group, count, until in reversed(rows)
        )

    def costs(self, by: Sequence[str], since: float | None = None) -> tuple[CostRow, ...]:
        """Return the costs since the hour of `since`, summed by these fields of COST_FIELDS, sorted by their values.
        The money of nodes that no run has used is in rows of its own (NO_WORK), so that the sum of all rows is what the
        pool has spent. Raises UnknownName for another field."""
        for name in by:
            if name not in COST_FIELDS:
                raise unknown_name("field of costs", name, COST_FIELDS)
        hour = 0 if since is None else int(since // HOUR_SECONDS)
        columns = "hour, user, model, lora, node_group"
        rows = self._read(f"SELECT {columns}, {', '.join(SUM_FIELDS)} FROM cost WHERE hour >= ?", (hour,))
        runs = [(CostKey(*row[:5]), _sums(row[5:])) for row in rows]
        paid = self._read("SELECT hour, node_group, cost FROM node_cost WHERE hour >= ?", (hour,))
        return summed_costs(runs, {(at, group): cost for at, group, cost in paid}, by)

    def span(self) -> HistorySpan:
        """Return what the history has."""
        ((events_since, first_hour),) = self._read(
            "SELECT (SELECT at FROM event ORDER BY number LIMIT 1), (SELECT min(hour) FROM cost)"
        )
        values = dict(self._read("SELECT name, value FROM meta"))
        return HistorySpan(
            events_since,
            None if first_hour is None else float(first_hour * HOUR_SECONDS),
            int(values.get("events_removed", 0)),
            int(values.get("costs_removed", 0)),
        )

    def _read(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with failures_named(self.path), closing(_connected(self.path)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            check_version(self.path, version)
            if version == 0:
                raise HistoryFailed(f"{self.path}: the history is empty: its pool has written nothing yet")
            return connection.execute(statement, values).fetchall()


def summed_costs(
    runs: Sequence[tuple[CostKey, CostSums]], node_costs: dict[tuple[int, str], float], by: Sequence[str]
) -> tuple[CostRow, ...]:
    """Return the sums of runs, and of the money that nodes have cost beyond that, by these fields. Pure."""
    rest = dict(node_costs)
    sums: dict[tuple[str, ...], CostSums] = {}
    for key, each in runs:
        sums.setdefault(tuple(_value(key, name) for name in by), CostSums()).add(each)
        money = each.cost + each.failed_cost
        if money:
            rest[key.hour, key.group] = rest.get((key.hour, key.group), 0.0) - money
    named = next((name for name in by if name in _NAMES), "")
    for (hour, group), money in rest.items():
        if money:
            names = {name: NO_WORK if name == named else "" for name in _NAMES}
            key = CostKey(hour=hour, group=group, **names)
            sums.setdefault(tuple(_value(key, name) for name in by), CostSums()).add(CostSums(cost=money))
    return tuple(CostRow(values, sums[values]) for values in sorted(sums))


def _value(key: CostKey, name: str) -> str:
    if name in _TIMES:
        return time.strftime(_TIMES[name], time.localtime(key.hour * HOUR_SECONDS))
    return str(getattr(key, name))


def _sums(values: Sequence[float]) -> CostSums:
    found = dict(zip(SUM_FIELDS, values, strict=True))
    counts = {name: int(found.pop(name)) for name in ("runs", "failed_runs", "lost_runs")}
    return CostSums(**counts, **found)  # type: ignore[arg-type]


def _connected(path: Path) -> sqlite3.Connection:
    """Open the file for reading. Without a pool that writes, a folder that cannot be written, or has no room for
    SQLite's own files, must not hide the history."""
    address = path.absolute().as_uri()
    connection = sqlite3.connect(f"{address}?mode=ro", uri=True, timeout=BUSY_SECONDS)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        if path.with_name(f"{path.name}-wal").exists():
            raise
        connection = sqlite3.connect(f"{address}?mode=ro&immutable=1", uri=True)
    return connection
