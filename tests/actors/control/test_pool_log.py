"""The log of a pool: its start, workers, jobs and failures with ids, as text or as JSON lines."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from modelpool.actors.control.log_file import ROOT_LOGGER, open_log_file
from modelpool.actors.control.pool_log import PoolLog
from modelpool.pool.values.core.errors import OutputFailed
from modelpool.pool.values.specs.spec import (
    ComponentKey,
    FileVerdict,
    JobId,
    JobSpec,
    JudgedFile,
    NodeId,
    RunError,
    RunErrorKind,
    TaskId,
    TaskReport,
    UserId,
    WorkerId,
    WorkerSpec,
)
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.model.messages import (
    FilesJudged,
    LossCause,
    Outcome,
    ResolveJob,
    RunEnded,
    StartWorker,
    Submitted,
    WorkerDown,
    WorkersWanted,
    WorkerUp,
)
from tests.full_disk import full_after

WORKER = WorkerId("gpu-0")
JOB = JobSpec(JobId("5f-0"), (), TaskId("decode-1"), user=UserId("ann"))
OOM = RunError(RunErrorKind.OUT_OF_VRAM, "no room\nfor 3 GiB")


def write_story(log: PoolLog) -> None:
    """A pool starts, a worker fails at a job and is lost."""
    report = TaskReport(TaskId("sample-1"), 2, WORKER, 1, Residency(1 << 30), error=OOM)
    log.started("mine", 3)
    log.note(WorkersWanted(0.0, (WORKER,)), [StartWorker(WORKER, 1)])
    log.note(WorkerUp(1.0, WorkerSpec(WORKER, 1, 1, 1.0, node=NodeId("n"))), [])
    log.note(Submitted(2.0, JOB), [])
    log.note(RunEnded(3.0, report), [])
    log.note(WorkerDown(4.0, WORKER, 1, "killed by signal 9", LossCause.KILLED), [])
    log.note(WorkersWanted(5.5, ()), [ResolveJob(JOB.job_id, Outcome.FAILED, error=OOM)])


def test_json_lines_have_the_ids(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "pool.log"
    file = open_log_file(path, is_json=True)
    write_story(PoolLog())
    file.close()
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(entry["event"], entry["level"]) for entry in entries] == [
        ("pool_started", "info"),
        ("worker_requested", "info"),
        ("worker_up", "info"),
        ("job_submitted", "info"),
        ("run_failed", "warning"),
        ("worker_lost", "warning"),
        ("job_ended", "error"),
    ]
    by_event = {entry["event"]: entry for entry in entries}
    assert (by_event["pool_started"]["pool"], by_event["pool_started"]["epoch"]) == ("mine", 3)
    assert (by_event["worker_up"]["worker"], by_event["worker_up"]["node"]) == ("gpu-0", "n")
    assert (by_event["job_submitted"]["job"], by_event["job_submitted"]["user"]) == ("5f-0", "ann")
    failed = by_event["run_failed"]
    assert (failed["task"], failed["attempt"], failed["worker"], failed["error"]) == (
        "sample-1",
        2,
        "gpu-0",
        "out_of_vram",
    )
    assert (by_event["worker_lost"]["cause"], by_event["worker_lost"]["reason"]) == ("killed", "killed by signal 9")
    ended = by_event["job_ended"]
    assert (ended["job"], ended["outcome"], ended["seconds"], ended["error"]) == ("5f-0", "failed", 3.5, "out_of_vram")


def test_text_is_one_line_for_each_entry(tmp_path: Path) -> None:
    file = open_log_file(tmp_path / "pool.log", is_json=False)
    write_story(PoolLog())
    logging.getLogger("modelpool.actors.control.dispatcher").warning("something else")
    file.close()
    logging.getLogger("modelpool.actors.control.dispatcher").warning("after the end")
    lines = (tmp_path / "pool.log").read_text().splitlines()
    assert len(lines) == 8
    assert lines[6].endswith("ERROR job 5f-0 failed after 3.5 s: out_of_vram: no room for 3 GiB")
    assert lines[7].endswith("WARNING something else")


def test_closing_restores_the_logger_and_nothing_is_installed_before(tmp_path: Path) -> None:
    logger = logging.getLogger(ROOT_LOGGER)
    before = (list(logger.handlers), logger.level)
    file = open_log_file(tmp_path / "pool.log", is_json=False)
    file.close()
    file.close()
    assert (list(logger.handlers), logger.level) == before
    program = (
        "import logging, modelpool.actors.control.pool_log, modelpool.actors.control.log_file\n"
        "assert not logging.getLogger('modelpool').handlers and not logging.getLogger().handlers"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_a_log_that_was_removed_or_renamed_is_made_again(tmp_path: Path) -> None:
    """As log rotation does, or somebody who cleans up; also with its folder. Later entries were lost."""
    path = tmp_path / "logs" / "pool.log"
    log, logger = open_log_file(path, is_json=False), logging.getLogger(ROOT_LOGGER)
    try:
        logger.info("one")
        path.rename(tmp_path / "rotated")
        logger.info("two")
        assert path.read_text().endswith("two\n")
        assert (tmp_path / "rotated").read_text().endswith("one\n")
        path.unlink()
        path.parent.rmdir()
        logger.info("three")
        assert path.read_text().endswith("three\n")
        path.unlink()
        path.parent.rmdir()
        path.parent.write_text("a file")
        logger.info("four")  # it cannot be made again, which ends nothing
    finally:
        log.close()


def test_a_pool_that_has_run_before_starts_without_its_log_and_creates_it_once_it_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first start of a pool is refused."""
    folder = tmp_path / "logs"
    folder.write_text("no folder")
    path, logger = folder / "pool.log", logging.getLogger(ROOT_LOGGER)
    with pytest.raises(OutputFailed, match=r"pool\.log: the log cannot be written"):
        open_log_file(path, is_json=False)
    log = open_log_file(path, is_json=False, is_required=False)
    try:
        logger.info("one")
        logger.info("two")
        told = capsys.readouterr().err.splitlines()
        assert told == [f"{path}: the log is not written now (File exists)"]
        folder.unlink()
        logger.info("three")
    finally:
        log.close()
    lines = path.read_text().splitlines()
    assert lines[0].endswith("WARNING 2 entries of this log lost: File exists")
    assert lines[1].endswith("INFO three")


def test_entries_that_a_full_disk_does_not_take_are_counted_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found by filling a disk: of 300 entries the log had 30 and said nothing, and stderr had 270 tracebacks."""
    path = tmp_path / "pool.log"
    log, logger = open_log_file(path, is_json=False), logging.getLogger(ROOT_LOGGER)
    logger.info("before")
    with full_after(path.stat().st_size + 20):
        for number in range(5):
            logger.info("entry %d, which is longer than the rest of the disk", number)
    logger.info("after")
    with full_after(path.stat().st_size):
        logger.info("another one")
    log.close()
    lines = path.read_text().splitlines()
    assert [line.split(" ", 3)[-1] for line in (lines[0], lines[-2])] == ["before", "after"]
    assert "WARNING 5 entries of this log lost: " in lines[-3]
    assert "WARNING 1 entry of this log lost: " in lines[-1]
    assert len(lines) == 5, "a part of the first lost entry has a line of its own"
    assert [line.split(" (")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"{path}: the log is not written now"
    ] * 2


def test_a_log_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputFailed, match="the log cannot be written"):
        open_log_file(tmp_path / "file" / "pool.log", is_json=False)


def test_a_file_that_differs_has_one_line_for_each_node(caplog: pytest.LogCaptureFixture) -> None:
    """Each worker of the node finds it out, and a right file is no news."""
    caplog.set_level(logging.INFO)
    log = PoolLog()
    file = JudgedFile(1, FileVerdict.DIFFERS, (ComponentKey("vae"),), "/models/a.safetensors", "01", "02")
    for worker_id in (WORKER, WorkerId("gpu-1")):
        log.note(WorkerUp(1.0, WorkerSpec(worker_id, 1, 1, 1.0, node=NodeId("n"))), [])
        log.note(FilesJudged(2.0, worker_id, 1, (file, replace(file, verdict=FileVerdict.RIGHT, found="01"))), [])
    (line,) = [each.message for each in caplog.records if "SHA-256" in each.message]
    assert line == "node n: /models/a.safetensors: is another file than expected: found SHA-256 02, expected 01"
