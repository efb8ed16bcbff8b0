"""A folder of checkpoints keeps the newest of each task, within its bound, and passes over what it cannot use."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from modelpool.actors.worker.step_checkpoints import checkpoint_disk, checkpoint_folder
from modelpool.actors.worker.step_checkpoints.checkpoint_disk import PAUSE_SECONDS, CheckpointDisk
from modelpool.actors.worker.step_checkpoints.checkpoint_folder import (
    LEAST_FREE_BYTES,
    MOST_AGE_SECONDS,
    MOST_WRITE_SECONDS,
    CheckpointFolder,
)
from modelpool.pool.values.core.errors import OutputFailed
from modelpool.pool.values.core.results import RunState, SamplerState
from modelpool.pool.values.specs.spec import TaskId

KIB = 1 << 10
VERSIONS = {"modelpool": "1"}
ONE, OTHER = TaskId("sample-1"), TaskId("sample-2")


def state(step: int, kib: int = 1) -> RunState:
    return RunState(step, 100, SamplerState(np.full((kib, 16, 16), step, np.float32)))


def folder(path: Path, bound_bytes: int = 1 << 30, **settings: object) -> CheckpointFolder:
    return CheckpointFolder(path / "checkpoints", bound_bytes, VERSIONS, **settings)  # type: ignore[arg-type]


def test_the_newest_state_of_a_task_replaces_earlier_ones(tmp_path: Path) -> None:
    found = folder(tmp_path)
    assert (found.steps(), found.newest(ONE, 100)) == ({}, None), "nothing is created to look"
    assert not found.path.exists()
    for step in (10, 9, 20):
        assert found.save(ONE, state(step))
    assert found.save(OTHER, state(5))
    assert found.path.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in found.path.iterdir()) == ["sample-1.20.checkpoint", "sample-2.5.checkpoint"]
    assert found.steps() == {ONE: 20, OTHER: 5}
    newest = found.newest(ONE, 100)
    assert newest is not None
    assert (newest.step, newest.sampler.samples_CHW[0, 0, 0]) == (20, 20.0)
    assert found.newest(ONE, 100, above=20) is None
    assert found.newest(ONE, 50) is None, "of a run of another length"
    found.remove(ONE)
    assert found.steps() == {OTHER: 5}


def test_an_older_state_is_used_if_the_newest_cannot_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = folder(tmp_path)
    found.save(ONE, state(40))
    late = CheckpointFolder(found.path, 1 << 30, {"modelpool": "2"})
    late.save(TaskId("sample-x"), state(50))
    (found.path / "sample-x.50.checkpoint").rename(found.path / "sample-1.60.checkpoint")
    (found.path / "sample-1.70.checkpoint").write_bytes(b"torn")
    (found.path / "sample-1.80.checkpoint").mkdir()
    (found.path / "notes.txt").write_text("mine")
    with caplog.at_level(logging.INFO):
        newest = found.newest(ONE, 100)
    assert newest is not None
    assert newest.step == 40
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    caplog.clear()
    late.save(ONE, state(90))
    with caplog.at_level(logging.INFO):
        assert found.newest(ONE, 100, above=80) is None
    assert "written by" in caplog.text


def test_the_oldest_are_removed_for_new_ones_and_the_folder_stays_within_its_bound(tmp_path: Path) -> None:
    bound_bytes = 50 * KIB
    found = folder(tmp_path, bound_bytes)
    for number in range(12):
        task = TaskId(f"sample-{number}")
        assert found.save(task, state(7, kib=8))
        os.utime(found.path / f"{task}.7.checkpoint", (1000 + number, 1000 + number))
        assert sum(path.stat().st_size for path in found.path.iterdir()) <= bound_bytes
    assert list(found.steps()) == [TaskId(f"sample-{number}") for number in range(7, 12)]
    assert found.save(TaskId("sample-7"), state(8, kib=8)), "the one that is replaced makes room for none"
    assert found.steps()[TaskId("sample-7")] == 8
    assert not found.save(ONE, state(9, kib=64)), "larger than the bound by itself"
    assert len(found.steps()) >= 4


def test_what_is_too_old_and_what_was_never_finished_is_removed_at_the_start(tmp_path: Path) -> None:
    now = 1e9
    found = folder(tmp_path, now=lambda: now)
    for task, age_seconds in ((ONE, MOST_AGE_SECONDS + 1), (OTHER, MOST_AGE_SECONDS - 1)):
        found.save(task, state(5))
        os.utime(found.path / f"{task}.5.checkpoint", (now - age_seconds,) * 2)
    for name, age_seconds in (("old", MOST_WRITE_SECONDS + 1), ("new", MOST_WRITE_SECONDS - 1)):
        part = found.path / f".sample-1.6.checkpoint.{name}.part"
        part.write_bytes(b"half")
        os.utime(part, (now - age_seconds,) * 2)
    (found.path / "notes.txt").write_text("mine")
    found.clean()
    kept = sorted(path.name for path in found.path.iterdir())
    assert kept == [".sample-1.6.checkpoint.new.part", "notes.txt", "sample-2.5.checkpoint"]
    CheckpointFolder(found.path, 1, VERSIONS, lambda: now).clean()
    assert found.steps() == {}, "a smaller bound"


def test_a_folder_that_cannot_be_read_has_no_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    found = folder(tmp_path)
    assert (found.steps(), found.newest(ONE, 100)) == ({}, None)
    assert "cannot be read" in caplog.text
    with pytest.raises(OutputFailed, match="cannot be created"):
        found.save(ONE, state(5))


def test_checkpoints_leave_room_for_others_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, free = folder(tmp_path), [LEAST_FREE_BYTES + 8 * KIB, LEAST_FREE_BYTES + 2 * KIB]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free.pop(0)))
    assert found.save(ONE, state(5))
    with pytest.raises(OutputFailed, match=r"found 512.1 MiB free, expected 5.0 KiB and 512.0 MiB for others"):
        found.save(OTHER, state(5))
    assert found.steps() == {ONE: 5}


def test_a_full_disk_is_left_alone_for_a_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first failure is a warning; then nothing is tried until the pause is over."""
    time = 0.0
    disk = CheckpointDisk(folder(tmp_path), clock=lambda: time)
    tried = []

    def full(*args: object) -> int:
        tried.append(args[1])
        raise OutputFailed("x: cannot be written: No space left on device") from OSError(errno.ENOSPC, "full")

    write = checkpoint_folder.write_checkpoint
    monkeypatch.setattr(checkpoint_folder, "write_checkpoint", full)
    for step in (1, 2, 3):
        disk.save(ONE, state(step))
        assert disk.flush(30.0)
        assert not disk.takes(ONE)
    assert len(tried) == 1
    assert [record.message for record in caplog.records] == [
        "no checkpoints are written for 10 min: x: cannot be written: No space left on device"
    ]
    monkeypatch.setattr(checkpoint_folder, "write_checkpoint", write)
    time = PAUSE_SECONDS
    assert disk.takes(ONE)
    disk.save(ONE, state(4))
    assert disk.flush(30.0)
    assert disk.folder.steps() == {ONE: 4}
    assert checkpoint_disk.PAUSE_SECONDS == 600.0
    disk.close()


def test_a_disk_that_does_not_answer_has_no_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk, gate = CheckpointDisk(folder(tmp_path)), threading.Event()
    disk.folder.save(ONE, state(3))
    newest = disk.folder.newest
    disk.folder.newest = lambda *run: newest(*run) if gate.wait(60.0) else None  # type: ignore[method-assign]
    assert disk.find(ONE, 100, seconds=0.01) is None
    assert "has not answered" in caplog.text
    assert disk.find(ONE, 100, seconds=60.0) is None, "at once: the earlier read has not ended"
    gate.set()
    assert disk._reads.flush(60.0)
    found = disk.find(ONE, 100, seconds=60.0)
    assert found is not None
    assert found.step == 3
    disk.folder.newest = lambda *run: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    assert disk.find(ONE, 100, seconds=60.0) is None
    disk.close()


def test_a_slow_disk_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as so many bytes wait, others are skipped."""
    monkeypatch.setattr(checkpoint_disk, "MOST_WAITING_BYTES", 3 * KIB)
    disk, gate, tasks = CheckpointDisk(folder(tmp_path)), threading.Event(), [TaskId(f"sample-{n}") for n in range(6)]
    save = disk.folder.save
    monkeypatch.setattr(disk.folder, "save", lambda *state: gate.wait(60.0) and save(*state))
    taken = []
    for task in tasks:
        taken.append(disk.takes(task))
        if taken[-1]:
            disk.save(task, state(1))
    assert taken == [True, True, True, False, False, False]
    gate.set()
    assert disk.flush(60.0)
    assert all(disk.takes(task) for task in tasks)
    assert len(disk.folder.steps()) == 3
