"""The file that says which pool runs: read while its process lives, and ignored after that."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from modelpool.actors.ray.run_file import RunningPool, process_of, remove_run_file, running_pool, write_run_file
from modelpool.actors.worker.worker_process import ProcessState, WorkerProcess, kill_process, process_state
from modelpool.pool.values.core.process_identity import process_start
from modelpool.pool.values.core.user_folders import machine_folder


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def pool_of(process: psutil.Process, name: str = "modelpool") -> RunningPool:
    return RunningPool(name, "modelpool", "127.0.0.1:1", process.pid, process.create_time(), "a log")


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until its standard input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        yield process
        process.kill()


def test_what_was_written_is_read_by_name_and_as_the_latest(other) -> None:
    assert running_pool() is None
    mine = pool_of(psutil.Process(), "mine")
    write_run_file(mine)
    theirs = pool_of(psutil.Process(other.pid), "theirs")
    write_run_file(theirs)
    assert running_pool("mine") == mine
    assert running_pool("theirs") == theirs
    assert running_pool() == theirs
    assert running_pool("none") is None


def test_a_pool_whose_process_is_gone_does_not_run(other) -> None:
    pool = pool_of(psutil.Process(other.pid))
    write_run_file(pool)
    other.kill()
    other.wait()
    assert running_pool("modelpool") is None
    assert running_pool() is None


def test_a_dead_process_that_nobody_buried_does_not_run(other) -> None:
    pool = pool_of(psutil.Process(other.pid))
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert process_of(pool) is None


def test_another_process_with_the_same_number_is_not_the_pool() -> None:
    pool = replace(pool_of(psutil.Process()), started_at=psutil.Process().create_time() - 100)
    write_run_file(pool)
    assert running_pool() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "modelpool"}', '{"colour": 3}'])
def test_a_file_that_is_not_ours_is_no_pool(text) -> None:
    (machine_folder() / "modelpool.pool.json").write_text(text)
    assert running_pool("modelpool") is None
    assert running_pool() is None


def test_removing_leaves_the_file_of_a_successor(other) -> None:
    mine, successor = pool_of(psutil.Process()), pool_of(psutil.Process(other.pid))
    write_run_file(mine)
    write_run_file(successor)
    remove_run_file(mine)
    assert running_pool() == successor
    remove_run_file(successor)
    remove_run_file(successor)
    assert running_pool() is None


def test_writing_leaves_no_draft(other) -> None:
    write_run_file(pool_of(psutil.Process()))
    assert [path.name for path in machine_folder().iterdir()] == ["modelpool.pool.json"]


def test_a_pool_that_an_earlier_version_started_is_found_with_a_line_that_says_so(
    other, tmp_path, monkeypatch, caplog
) -> None:
    """Earlier versions wrote run files to the runtime folder, or directly into the state folder."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    old = pool_of(psutil.Process(other.pid), "old")
    for folder in (tmp_path / "runtime" / "modelpool", tmp_path / "modelpool"):
        folder.mkdir(parents=True, exist_ok=True)
        written = folder / "old.pool.json"
        written.write_text(json.dumps(dataclasses.asdict(old)))
        caplog.clear()
        assert running_pool("old") == running_pool() == old
        assert f"its run file is in {folder}" in caplog.text
        written.unlink()
    write_run_file(old)
    caplog.clear()
    assert running_pool("old") == old
    assert not caplog.text


def test_a_step_of_the_wall_clock_hides_no_process(other, monkeypatch, tmp_path) -> None:
    """`status` and `down` denied that the pool existed, while `up` refused to start one: the time of a process's start
    moves with the clock, since the kernel has it from the start of the machine."""
    process = psutil.Process(other.pid)
    pool = replace(pool_of(process), start=process_start(other.pid))
    write_run_file(pool)
    worker = WorkerProcess(other.pid, process.create_time(), start=process_start(other.pid))
    create_time = psutil.Process.create_time
    for step_seconds in (-3600.0, 0.0, 7200.0):
        monkeypatch.setattr(psutil.Process, "create_time", lambda self, step=step_seconds: create_time(self) + step)
        assert running_pool("modelpool") == pool
        assert process_of(pool) is not None
        assert process_state(worker) is ProcessState.RUNS
    boot, ticks = pool.start.split("/")
    for reused in (f"{boot}/{int(ticks) + 1}", f"another boot/{ticks}"):
        assert process_of(replace(pool, start=reused)) is None
        assert process_state(replace(worker, start=reused)) is ProcessState.GONE
    assert kill_process(worker)
    other.wait()
    assert process_of(pool) is None
