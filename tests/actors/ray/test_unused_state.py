"""What ended programs left in the state folder goes after 30 days; what lives stays, on this machine and on others."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

import psutil
import pytest

from modelpool.actors.control.log_file import open_log_file
from modelpool.actors.ray.unused_state import (
    UNUSED_SECONDS,
    UPKEEP_SECONDS,
    StateEntry,
    StateUpkeep,
    remove_unused_state,
    unused_entries,
)
from modelpool.pool.values.core.user_folders import machine_folder

LONG_AGO = time.time() - UNUSED_SECONDS - 1000


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this machine, in a state folder of its own."""
    monkeypatch.setenv("MODELPOOL_STATE_DIR", str(tmp_path / "state"))
    return machine_folder()


def old(path: Path, text: str = "") -> Path:
    """Write a file that was changed long ago, in a folder that was, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    for each in (path, path.parent):
        os.utime(each, (LONG_AGO, LONG_AGO))
    return path


def note_of(process: psutil.Process, off_seconds: float = 0.0) -> str:
    return json.dumps({"pid": process.pid, "started_at": process.create_time() - off_seconds})


def test_only_what_has_not_changed_for_long_is_unused() -> None:
    entries = [StateEntry(Path(str(age)), 1e9 - age) for age in (-3600.0, 0.0, UNUSED_SECONDS, UNUSED_SECONDS + 1)]
    assert unused_entries(entries, 1e9) == entries[3:]


def test_folders_of_machines_that_are_gone_are_removed(own: Path) -> None:
    """Containers have a new name at each start: a home that they share had a folder for each of them."""
    machines = own.parent
    old(machines / "gone" / "traces" / "a.trace")
    os.utime(machines / "gone", (LONG_AGO, LONG_AGO))
    old(machines / "works" / "pool.lock")
    (machines / "works" / "traces").mkdir()
    (machines / "works" / "traces" / "worker.trace").touch()
    os.utime(machines / "works", (LONG_AGO, LONG_AGO))
    old(machines / "starts" / "pool.lock")
    old(machines / ".removed-1234" / "pool.log")  # by a program that was killed meanwhile
    old(own.parents[1] / "pool.journal.sqlite")
    (machines / "link").symlink_to(machines / "works")
    with old(machines / "locked" / "pool.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(machines / "starts")  # its machine comes back
        assert remove_unused_state() == [machines / "gone"]
        left = {path.name for path in machines.iterdir()}
        assert left == {own.name, "works", "starts", "locked", "link"}
    assert remove_unused_state() == [machines / "locked"]
    assert (own.parents[1] / "pool.journal.sqlite").exists(), "a journal holds what a pool has promised"


def test_old_logs_and_notes_of_this_machine_go_and_those_of_living_programs_stay(own: Path) -> None:
    me = psutil.Process()
    gone = [
        old(own / "gone.log"),
        old(own / "gone.log.1"),
        old(own / "gone.pool.json", note_of(me, off_seconds=60.0)),
        old(own / "gone.pool.json.4711"),
        old(own / "ray-at-1.json", note_of(me, off_seconds=60.0)),
        old(own / "ray_token.4711"),
    ]
    kept = [
        old(own / "lives.log"),
        old(own / "lives.log.1"),
        old(own / "lives.pool.json", note_of(me)),
        old(own / "starts.log"),
        old(own / "starts.lock"),
        old(own / "ray-at-2.json", note_of(me)),
        old(own / "ray_token", "secret"),
    ]
    (own / "new.log").touch()
    log = open_log_file(own / "controller.log", is_json=False)
    os.utime(own / "controller.log", (LONG_AGO, LONG_AGO))
    try:
        with (own / "starts.lock").open() as lock, (own / "lives.lock").open("w") as living:
            fcntl.flock(lock, fcntl.LOCK_EX)
            fcntl.flock(living, fcntl.LOCK_EX)
            os.utime(own / "lives.lock", (LONG_AGO, LONG_AGO))
            assert sorted(remove_unused_state()) == sorted(gone)
            assert set(own.iterdir()) == {
                *kept,
                own / "new.log",
                own / "lives.lock",
                own / "controller.log",
            }
    finally:
        log.close()
    os.utime(own / "controller.log", (LONG_AGO, LONG_AGO))
    assert own / "controller.log" in remove_unused_state(), "its program has closed it"


def test_a_pool_shows_that_it_lives_every_hour(own: Path) -> None:
    lock = old(own / "pool.lock")
    old(own.parent / "gone" / "pool.lock")
    upkeep = StateUpkeep(lock, now=100.0)
    upkeep.beat(100.0)
    assert lock.stat().st_mtime > LONG_AGO
    assert not (own.parent / "gone").exists()
    os.utime(lock, (LONG_AGO, LONG_AGO))
    upkeep.beat(100.0 + UPKEEP_SECONDS - 1)
    assert lock.stat().st_mtime == pytest.approx(LONG_AGO)
    upkeep.beat(100.0 + UPKEEP_SECONDS)
    assert lock.stat().st_mtime > LONG_AGO
    lock.unlink()
    upkeep.beat(100.0 + 3 * UPKEEP_SECONDS)  # the folder may be gone: a pool works without
