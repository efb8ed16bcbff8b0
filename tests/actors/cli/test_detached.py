"""Commands about detached jobs, against a pool that knows some submissions."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from modelpool.actors.detached.job_service import JobsProgress
from modelpool.actors.detached.records import SubmissionRecord, SubmissionState
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
        return SimpleNamespace(progress=lambda: JobsProgress(record, (), 0, ""))


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
