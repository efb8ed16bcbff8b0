"""One database for many processes: changes are whole or not at all, damage is set aside, and nobody waits for ever."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import warnings
from pathlib import Path

import pytest

from modelpool.pool.catalog.registry.database import Database, Schema
from modelpool.pool.values.core.errors import OutputFailed

SCHEMA = Schema(
    1, {"kept": "key INTEGER PRIMARY KEY, word TEXT", "cache": "key INTEGER PRIMARY KEY, word TEXT"}, precious=("kept",)
)
#: so many that they fill several pages
ROWS = 2000


def open_database(folder: Path) -> Database:
    return Database(folder / "own.sqlite3", SCHEMA)


def insert(database: Database, table: str, count: int, word: str = "word") -> None:
    rows = [(number, f"{word} {number} " * 4) for number in range(count)]
    database.write(lambda db: db.executemany(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", rows))


def count(database: Database, table: str) -> int:
    [found] = database.read(lambda db: db.execute(f"SELECT count(*) FROM {table}").fetchone())
    assert isinstance(found, int)
    return found


def _die_in_the_middle(folder: Path) -> None:
    def change(db: sqlite3.Connection) -> None:
        db.executemany("INSERT INTO kept VALUES (?, 'half')", [(number,) for number in range(5000, 9000)])
        os._exit(7)

    open_database(folder).write(change)


def _die_before_it_is_made(folder: Path) -> None:
    database = open_database(folder)
    folder.mkdir(exist_ok=True)
    sqlite3.connect(database.path, isolation_level=None).execute("PRAGMA journal_mode = WAL")
    os._exit(7)


def run(target: object, *arguments: object) -> int | None:
    """The exit code of a child that runs `target`."""
    child = multiprocessing.get_context("spawn").Process(target=target, args=arguments)  # type: ignore[arg-type]
    child.start()
    child.join()
    return child.exitcode


def test_who_dies_in_the_middle_of_a_change_leaves_what_was_before(tmp_path: Path) -> None:
    database = open_database(tmp_path)
    insert(database, "kept", 3)
    assert run(_die_in_the_middle, tmp_path) == 7
    assert count(database, "kept") == 3
    insert(database, "kept", 4)
    assert count(database, "kept") == 4


def test_who_dies_while_it_is_made_leaves_one_that_can_be_made(tmp_path: Path) -> None:
    assert run(_die_before_it_is_made, tmp_path) == 7
    insert(open_database(tmp_path), "kept", 2)
    assert count(open_database(tmp_path), "kept") == 2


def test_a_change_that_raises_changes_nothing(tmp_path: Path) -> None:
    database = open_database(tmp_path)

    def change(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO kept VALUES (1, 'half')")
        raise KeyError("no")

    with pytest.raises(KeyError):
        database.write(change)
    assert count(database, "kept") == 0


@pytest.mark.parametrize("damage", ["text", "middle", "short", "header"])
def test_a_damaged_database_is_set_aside_with_a_warning_and_begun_anew(tmp_path: Path, damage: str) -> None:
    database = open_database(tmp_path)
    insert(database, "kept", 3)
    insert(database, "cache", ROWS)
    content = bytearray(database.path.read_bytes())
    if damage == "text":
        content = bytearray(b"this is no database " * 300)
    elif damage == "middle":
        content[8192:] = b"\xaa" * (len(content) - 8192)
    elif damage == "short":
        del content[len(content) // 2 :]
    else:
        content[:100] = bytes(100)
    database.path.write_bytes(content)
    with pytest.warns(RuntimeWarning, match=r"own\.sqlite3 was damaged .* is kept as own\.sqlite3\.damaged-1"):
        insert(database, "cache", ROWS)
    assert count(database, "cache") == ROWS
    assert (tmp_path / "own.sqlite3.damaged-1").read_bytes() == content
    assert count(database, "kept") in (0, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        insert(database, "kept", 5)
        assert (count(database, "kept"), count(database, "cache")) == (5, ROWS)


def test_what_only_a_person_could_fill_again_is_taken_over_where_it_can_be_read(tmp_path: Path) -> None:
    database = open_database(tmp_path)
    insert(database, "kept", 3)
    insert(database, "cache", ROWS)
    content = bytearray(database.path.read_bytes())
    content[-len(content) // 2 :] = b"\xaa" * len(content[-len(content) // 2 :])
    database.path.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="the rows that could be read were copied: 3 kept"):
        count(database, "cache")
    assert (count(database, "kept"), count(database, "cache")) == (3, 0)


def _use_damaged(folder: Path, number: int, results: multiprocessing.Queue[int]) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        open_database(folder).write(lambda db: db.execute("INSERT INTO kept VALUES (?, 'mine')", (number,)))
    results.put(len(told))


def test_of_many_that_find_the_damage_one_mends_it_and_none_loses_a_change(tmp_path: Path) -> None:
    (tmp_path / "own.sqlite3").write_bytes(b"this is no database " * 300)
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[int] = context.Queue()
    children = [context.Process(target=_use_damaged, args=(tmp_path, number, results)) for number in range(3)]
    for child in children:
        child.start()
    told = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 3
    assert sum(told) == 1
    assert count(open_database(tmp_path), "kept") == 3
    assert sorted(path.name for path in tmp_path.glob("*.damaged-*")) == ["own.sqlite3.damaged-1"]


def test_a_layout_of_another_version_is_left_alone(tmp_path: Path) -> None:
    later = Database(tmp_path / "own.sqlite3", Schema(2, SCHEMA.tables))
    later.write(lambda db: db.execute("INSERT INTO kept VALUES (1, 'later')"))
    with pytest.raises(OutputFailed, match=r"written by another version of modelpool \(layout 2, expected 1\)"):
        count(open_database(tmp_path), "kept")
    assert count(later, "kept") == 1


def test_a_place_that_cannot_hold_one_is_told(tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("a file")
    with pytest.raises(OutputFailed, match=r"occupied/own\.sqlite3: cannot be used"):
        count(open_database(tmp_path / "occupied"), "kept")
    (tmp_path / "own.sqlite3").mkdir()
    with pytest.raises(OutputFailed, match=r"own\.sqlite3: cannot be used"):
        count(open_database(tmp_path), "kept")


def test_the_database_is_for_its_user_alone(tmp_path: Path) -> None:
    database = open_database(tmp_path / "new")
    insert(database, "kept", 1)
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0
