"""A worker with a machine that lacks a file, or has another one of that name, says so before it runs anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelpool.actors.worker.file_check import FILES_REMEMBERED, FileCheck, FilesUnavailable
from modelpool.actors.worker.wire.messages import ExpectedFile, RunRequest
from modelpool.pool.models.loading.file_fingerprint import fingerprint
from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.specs.spec import ComponentKey, RunErrorKind
from tests.actors.worker.one_run import run_one
from tests.actors.worker.test_gpu_worker import Bench, RaisingEngine


def expected(path: Path, key: str = "lora") -> ExpectedFile:
    part = FilePart(str(path))
    return ExpectedFile(ComponentKey(key), part, fingerprint(part))


def test_missing_and_differing_files_are_reported_together(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("same", "missing", "other")]
    for path in paths:
        path.write_bytes(b"weights")
    files = [expected(path, path.name) for path in paths]
    FileCheck().check(files)
    paths[1].unlink()
    paths[2].write_bytes(b"strange")
    with pytest.raises(FilesUnavailable) as raised:
        FileCheck().check(files)
    assert raised.value.components == ("missing", "other")
    assert f"{paths[1]}: cannot be read: No such file" in str(raised.value)
    assert f"{paths[2]}: is not the file that the controller has" in str(raised.value)


def test_a_worker_runs_nothing_if_a_file_differs(tmp_path: Path) -> None:
    """Before, another model of the same shapes gave a wrong image without a word."""
    path = tmp_path / "lora.safetensors"
    path.write_bytes(b"as on the machine of the controller")
    file = expected(path)
    path.write_bytes(b"as on the machine of the worker....")
    bench = Bench(RaisingEngine(AssertionError("the engine was used")))
    bench.worker.start()
    report, result = run_one(bench.worker, RunRequest(bench.task, bench.work, 1, 1, files=(file,)), *bench.inputs)
    assert result is None
    assert report.error is not None
    assert (report.error.kind, report.error.components) == (RunErrorKind.FILE_UNAVAILABLE, ("lora",))


def test_a_file_that_is_removed_later_is_no_bad_input(tmp_path: Path) -> None:
    """1. The file was checked. 2. It is removed. 3. A run cannot read it: a fact about the machine, not the request."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    bench = Bench()
    bench.worker.start()
    file = bench.reads(path)
    report, _ = run_one(bench.worker, RunRequest(bench.task, bench.work, 1, 1, files=(file,)), *bench.inputs)
    assert report.error is None
    bench.worker._engine = RaisingEngine(CorruptFile(f"{path}: cannot be read"))
    report, _ = run_one(bench.worker, RunRequest(bench.task, bench.work, 2, 2), *bench.inputs)
    assert report.error is not None
    assert report.error.kind is RunErrorKind.BAD_INPUT, "the file is there"
    path.unlink()
    report, _ = run_one(bench.worker, RunRequest(bench.task, bench.work, 3, 3), *bench.inputs)
    assert report.error is not None
    assert report.error.kind is RunErrorKind.FILE_UNAVAILABLE


def test_checked_files_are_forgotten_beyond_a_bound(tmp_path: Path) -> None:
    check = FileCheck(lambda part: "same")
    files = [ExpectedFile(ComponentKey(f"c{n}"), FilePart(f"f{n}"), "same") for n in range(FILES_REMEMBERED + 10)]
    check.check(files)
    assert len(check._checked) == FILES_REMEMBERED
