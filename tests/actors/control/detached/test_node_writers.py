"""Detached jobs with outputs that are written by the node of their worker: committed once, whoever ends in between."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from modelpool.actors.control.detached import job_service
from modelpool.actors.control.detached.job_service import JobService
from modelpool.actors.control.detached.submission_journal import Journal
from modelpool.actors.outputs.layout import LayoutKind, OutputLayout
from modelpool.actors.outputs.sharded import ShardedOutputs
from tests.actors.control.detached.test_job_service import Service, prompts
from tests.actors.fake_writers import FakeWriters, dies, place_workers


class ServiceWithWriters(Service):
    """A service with a pool that has such writers, and what it has fetched itself."""

    writers: FakeWriters

    def __init__(self, folder: Path, writers: FakeWriters) -> None:
        self.writers = writers
        super().__init__(folder)
        place_workers(self.line)
        self.fetched: list[Any] = []
        fetch = self.line.fetch
        self.line.fetch = lambda ref: (self.fetched.append(ref), fetch(ref))[1]  # type: ignore[method-assign]

    def _opened(self) -> JobService:
        return JobService(Journal(self.folder / "journal.sqlite"), self._connect, self.writers)

    def end(self) -> None:
        self.service.close()
        self.pool.close()
        for line in self.lines:
            line.end()


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_service, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(job_service, "FOLDER_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(job_service, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(job_service, "CHUNK", 4)


def test_the_service_fetches_no_pixels_and_commits_each_output(tmp_path: Path) -> None:
    """Also names from a template, and outputs in shards, which it packs itself."""
    for name, layout in (("files", None), ("shards", OutputLayout(LayoutKind.WEBDATASET, 4))):
        (tmp_path / name).mkdir()
        service = ServiceWithWriters(tmp_path / name, FakeWriters())
        try:
            record = service.submit(prompts(10), name="{index}-{seed}", layout=layout).wait(60)
            assert (record.succeeded, record.failed) == (10, 0)
            assert service.fetched == []
            assert len(service.writers.written) == 10
            files = {outcome.file for outcome in service.service.outcomes(record.submission_id)}
            assert len(files) == 10
            if layout is None:
                assert files == {f"{n}-{n}.png" for n in range(10)}
                assert Counter(entry["recipe"]["seed"] for entry in service.manifest()) == Counter(range(10))
            else:
                place = ShardedOutputs(service.out, layout)
                assert len(place.kept()) == 10
                assert not list(place.damaged())
                assert len(list(service.out.glob("shard-*.tar"))) == 3
        finally:
            service.end()
        assert service.writers.closed == 1


def test_each_output_is_committed_once_if_writers_and_the_service_end(tmp_path: Path) -> None:
    """A writer ends after it has written; the service ends before it has committed; the next one continues."""
    crashed = threading.Event()
    reached = threading.Event()

    def crash(number: int) -> None:
        if number == 5 and not crashed.is_set():
            reached.set()
            crashed.wait(60)
        dies(4)(number)

    service = ServiceWithWriters(tmp_path, FakeWriters(after=crash))
    try:
        submission = service.submit(prompts(20))
        assert reached.wait(60)
        threading.Timer(0.2, crashed.set).start()
        service.crash()
        service.reopen()
        record = service.pool.attach(submission.id).wait(60)
        assert (record.succeeded, record.failed) == (20, 0)
        assert Counter(entry["recipe"]["seed"] for entry in service.manifest()) == Counter(range(20))
        assert len(list(service.out.glob("*.png"))) == 20
    finally:
        service.end()
