"""Outputs that the node of their worker writes: the driver fetches none, and each is there once whatever fails."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from modelpool import GenerateRequest, ModelPool
from modelpool.actors.control.output_commit import WRITES_HERE
from modelpool.actors.outputs.folder import OutputFolder
from modelpool.actors.outputs.write_failures import FolderFailed
from tests.actors.fake_writers import NODE, FakeWriters, Outage, dies, place_workers
from tests.actors.fakes import FakeEngine
from tests.actors.loop_connection import LoopConnection


@contextmanager
def opened(writers: FakeWriters, output: Path) -> Iterator[tuple[ModelPool, list[Any]]]:
    """A pool with these writers, and what its driver has fetched."""
    line = LoopConnection(2, FakeEngine)
    place_workers(line)
    fetched: list[Any] = []
    fetch = line.fetch
    line.fetch = lambda ref: (fetched.append(ref), fetch(ref))[1]  # type: ignore[method-assign]
    with ModelPool(line, line.end, output, node_writers=writers, hold_seconds=60.0) as pool:
        yield pool, fetched


def requests(count: int, **fields: Any) -> list[GenerateRequest]:
    return [GenerateRequest(model="shapes", prompt="a red circle", seed=seed, **fields) for seed in range(count)]


def manifest(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def test_the_driver_fetches_no_pixels_until_its_program_wants_some(tmp_path: Path) -> None:
    """Equal requests with different ids have a file each, and pixels equal the file's."""
    writers = FakeWriters()
    wanted = [*requests(6), *(requests(1, id=name)[0] for name in ("cat", "dog"))]
    with opened(writers, tmp_path) as (pool, fetched):
        results = sorted(pool.submit(wanted, name="{seed}").images(), key=lambda result: result.index)
        assert fetched == []
        assert len(writers.written) == len(wanted)
        assert set(writers.asked) == {(NODE, tmp_path)}
        alone = pool.submit(requests(1), output=False).images()
        assert (results[0].pixels == next(iter(alone)).pixels).all()
        assert [entry.get("id") for entry in manifest(tmp_path)].count("cat") == 1
        assert len({result.path for result in results}) == len(results)
        assert all(result.path is not None and result.path.exists() for result in results)
        assert {entry["run"] for entry in manifest(tmp_path)} == {1}
        lossy = list(pool.submit(requests(2, format="jpg")).images())
        assert len(fetched) == 1 + len(lossy), "a JPEG does not have the pixels: the object store keeps them"
    assert writers.closed == 1


def test_every_row_is_there_once_whatever_happens_to_the_writers(tmp_path: Path) -> None:
    """They end before they write, after it (the report is lost), or cannot write although the driver can."""

    def fails(number: int) -> None:
        if number % 3 == 2:
            raise FolderFailed("only for this node")

    for name, writers in {
        "before": FakeWriters(before=dies(3)),
        "after": FakeWriters(after=dies(2)),
        "fails": FakeWriters(before=fails),
        "never": FakeWriters(can_write=False),
    }.items():
        folder = tmp_path / name
        with opened(writers, folder) as (pool, fetched):
            assert pool.submit(requests(20)).wait(60).succeeded == 20
            assert pool.submit(requests(20)).wait(60).succeeded == 20, "again, over what is there"
        assert Counter(entry["recipe"]["seed"] for entry in manifest(folder)) == Counter(range(20)), name
        assert len(list(folder.glob("*.png"))) == 20
        assert not list(OutputFolder(folder).damaged())
        assert 0 < len(fetched) <= 40


def test_a_place_that_nobody_can_write_holds_the_submission_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is fetched meanwhile, and nothing is lost."""
    monkeypatch.setattr("modelpool.actors.client.output_writer._RETRY_SECONDS", 0.01)
    outage = Outage(tmp_path)
    prepare = OutputFolder.prepare

    def prepare_or_fail(folder: OutputFolder) -> None:
        outage.check()
        prepare(folder)

    monkeypatch.setattr(OutputFolder, "prepare", prepare_or_fail)

    def begin_at_10(number: int) -> None:
        if number == 10:
            outage.is_on.set()
        outage.check()

    with opened(FakeWriters(before=begin_at_10), tmp_path) as (pool, fetched):
        jobs = pool.submit(requests(40))
        until(lambda: jobs.progress().held)
        assert "No space left" in jobs.progress().held
        assert jobs.progress().done < 40
        outage.is_on.clear()
        assert jobs.wait(60).succeeded == 40
        assert jobs.progress().held == ""
        assert len(fetched) <= 1, "of the attempt during which it ended"
    assert Counter(entry["recipe"]["seed"] for entry in manifest(tmp_path)) == Counter(range(40))


def test_a_driver_without_writers_writes_several_outputs_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that takes 100 ms for each would limit one thread to ten in a second."""
    together = threading.Barrier(WRITES_HERE)
    write = OutputFolder.write

    def write_together(*args: Any, **kwargs: Any) -> Any:
        together.wait(30)  # breaks unless so many threads write at a time
        return write(*args, **kwargs)

    monkeypatch.setattr(OutputFolder, "write", write_together)
    with opened(FakeWriters(can_write=False), tmp_path) as (pool, fetched):
        assert pool.submit(requests(2 * WRITES_HERE)).wait(60).succeeded == 2 * WRITES_HERE
        assert len(fetched) == 2 * WRITES_HERE


def test_a_store_that_is_down_is_not_asked_for_each_output_when_the_pool_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt may take a quarter of a minute."""
    monkeypatch.setattr("modelpool.actors.client.output_writer._RETRY_SECONDS", 30.0)
    attempts: list[int] = []
    down = threading.Event()

    def write(*args: Any, **kwargs: Any) -> Any:
        down.wait(60)
        attempts.append(1)
        raise FolderFailed("the store does not answer")

    monkeypatch.setattr(OutputFolder, "write", write)
    with opened(FakeWriters(can_write=False), tmp_path) as (pool, _):
        jobs = pool.submit(requests(12))
        until(lambda: not any(pool.status().waiting.values()) and not jobs.progress().running)
        down.set()
        until(lambda: len(attempts) == 13)  # each once, and one of them again
    assert len(attempts) <= 14
    assert jobs.summary().failed == 12
