"""Commands about detached jobs, against a pool that knows some submissions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelpool.actors.cli.run.job_file import JobLine
from modelpool.actors.control.detached.job_service import JobsProgress
from modelpool.actors.control.detached.records import SubmissionRecord, SubmissionState
from modelpool.actors.outputs.layout import THUMBNAIL_PIXELS, LayoutKind, OutputLayout
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import OutputFailed
from tests.actors.cli.conftest import Command
from tests.actors.cli.fakes import FakePool


@dataclass
class JobsPool(FakePool):
    """A pool with submissions of four requests, oldest first: by id, how many succeeded."""

    succeeded: tuple[tuple[str, int], ...] = ()

    def detached(self) -> tuple[SubmissionRecord, ...]:
        return tuple(
            SubmissionRecord(
                name, SubmissionState.ENDED if done == 4 else SubmissionState.ACTIVE, "/o", "", 4, 0.0, done
            )
            for name, done in self.succeeded
        )

    def attach(self, jobs_id: str) -> SimpleNamespace:
        (record,) = [record for record in self.detached() if record.submission_id.startswith(jobs_id)]
        return SimpleNamespace(id=record.submission_id, progress=lambda: JobsProgress(record, (), 0, ""))


def test_submit_takes_the_options_of_batch_for_outputs_and_refuses_lines_that_its_template_does_not_fit(
    command: Command, tmp_path: Path
) -> None:
    handed: list[dict[str, Any]] = []

    class TakingPool(JobsPool):
        def submit_detached(self, requests: Iterable[GenerateRequest], **terms: Any) -> SimpleNamespace:
            handed.append({"requests": list(requests), **terms})
            return self.attach("new")

    (tmp_path / "jobs.jsonl").write_text('{"prompt": "a", "id": "first"}\n{"prompt": "b", "id": "second"}\n')
    (tmp_path / "some.jsonl").write_text('{"prompt": "a", "id": "first"}\n{"prompt": "b"}\n')
    pool = TakingPool(succeeded=(("new", 0),))
    options = ("--out", str(tmp_path / "out"), "--model", "shapes", "--pool", "mine", "--name", "{id}")
    shards = ("--shards", "5", "--shard-format", "parquet", "--format", "webp", "--quality", "80")
    assert command("submit", str(tmp_path / "jobs.jsonl"), *options, *shards, pool=pool).code == 0
    assert handed[0]["name"] == "{id}"
    assert handed[0]["layout"] == OutputLayout(LayoutKind.PARQUET, 5)
    assert [(one.format, one.quality) for one in handed[0]["requests"]] == [("webp", 80)] * 2
    ended = command("submit", str(tmp_path / "some.jsonl"), *options, pool=pool)
    assert ended.code == 2
    assert "some.jsonl:2: id: missing; --name {id} needs it" in ended.err
    assert "nothing was submitted" in ended.err
    assert command("submit", str(tmp_path / "jobs.jsonl"), *options, "--thumbnails", pool=pool).code == 0
    assert handed[1]["layout"] == OutputLayout(thumbnail_pixels=THUMBNAIL_PIXELS)
    assert len(handed) == 2


def test_submit_asks_the_pool_first_and_reads_the_file_as_it_is_handed_over(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It held the whole file in memory, and found out about a missing pool or a wrong --out after reading it."""
    read: list[int] = []
    shown: list[str] = []

    def lines(*_: Any) -> Iterator[JobLine]:
        for number in range(1, 4):
            read.append(number)
            yield JobLine(number, GenerateRequest(model="shapes", prompt="a", seed=number))

    class LazyPool(JobsPool):
        def submit_detached(self, requests: Iterable[GenerateRequest], **terms: Any) -> SimpleNamespace:
            assert read == [], "the pool has answered before the file is read"
            if "nowhere" in str(terms["output"]):
                raise OutputFailed("nowhere: cannot be written")
            for number, request in enumerate(requests, start=1):
                assert (request.line, read[-1]) == (number, number), "no line is read before it is wanted"
            return self.attach("new")

    monkeypatch.setattr("modelpool.actors.cli.run.job_file.job_lines", lines)
    monkeypatch.setattr("modelpool.actors.cli.run.detached._DRAW_SECONDS", -1.0)
    monkeypatch.setattr("rich.status.Status.update", lambda status, text: shown.append(str(text)))
    (tmp_path / "jobs.jsonl").write_text("x\n" * 3)
    for out, code in (("nowhere", 2), ("out", 0)):
        words = ("submit", "jobs.jsonl", "--out", out, "--pool", "mine")
        assert command(*words, pool=LazyPool(succeeded=(("new", 0),))).code == code
    assert shown[-1] == "jobs.jsonl: checked 2 of 3"


def test_a_pool_without_submissions_says_so_instead_of_an_empty_table(command: Command) -> None:
    ended = command("jobs", "--pool", "mine", pool=JobsPool())
    assert (ended.code, ended.out) == (0, "no submission; hand one over with `modelpool submit`\n")


def test_progress_without_an_id_shows_what_has_not_ended_else_the_latest_submission(command: Command) -> None:
    for succeeded, lines in (
        ((), ["no submission; hand one over with `modelpool submit`"]),
        ((("old", 4), ("new", 4)), ["new: 4 of 4 done"]),
        ((("one", 1), ("new", 4)), ["one: 1 of 4 done"]),
        ((("one", 1), ("old", 4), ("two", 0)), ["one: 1 of 4 done", "two: 0 of 4 done"]),
    ):
        ended = command("progress", "--pool", "mine", pool=JobsPool(succeeded=succeeded))
        assert (ended.code, ended.out.splitlines()) == (0, lines)
    pool = JobsPool(succeeded=(("one", 1), ("two", 0)))
    assert command("progress", "on", "--pool", "mine", pool=pool).out == "one: 1 of 4 done\n"
    ended = command("progress", "--json", "--pool", "mine", pool=pool)
    assert [(line["submission_id"], line["succeeded"]) for line in ended.objects] == [("one", 1), ("two", 0)]
    assert command("progress", "--json", "--pool", "mine", pool=JobsPool()).objects == []
