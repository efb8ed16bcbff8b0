"""`modelpool why` and `modelpool story`: what they show of a job, to people and to programs."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

from modelpool.actors.control.detached.job_service import JobsProgress
from modelpool.actors.control.detached.records import SubmissionRecord, SubmissionState
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.pool.values.core.errors import UnknownName
from modelpool.pool.values.specs.spec import RunCost, RunErrorKind, UserId, WorkerId
from modelpool.scheduler.core.history import JobHistory, find_job, history_of
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.core.waiting_jobs import SubmissionWaits, groups_of
from modelpool.scheduler.model.placement_record import PlacementOption, PlacementRule, TaskStart, Why
from tests.actors.cli.conftest import Command
from tests.actors.cli.fakes import FakePool
from tests.scheduler.world import Shell, alone, encode, image, sample


@dataclasses.dataclass
class RememberingPool(FakePool):
    """A pool with a scheduler that is a real one."""

    state: SchedulerState = dataclasses.field(default_factory=SchedulerState)
    now: float | None = None

    def history(self, job: str) -> JobHistory:
        """What the scheduler remembers."""
        return history_of(self.state, find_job(self.state, job), self.now)

    def attach(self, jobs_id: str) -> NoReturn:
        """It has no journal."""
        raise UnknownName(f"unknown submission {jobs_id!r}")

    def waits(self, submission: str) -> SubmissionWaits | None:
        """What the jobs of a submission wait for."""
        mine = [job_id for job_id in self.state.demand.jobs if job_id.startswith(submission)]
        return SubmissionWaits(submission, groups_of(self.state, mine, self.state.at)) if mine else None


def afternoon() -> RememberingPool:
    """One image that is done, after its worker was lost once; one that waits; one with an encode that is shared."""
    shell = Shell()
    shell.workers(a=64)
    shell.submit(dataclasses.replace(image("s-0", seed=1), user=UserId("ann"), priority=2))
    shell.lose("a")
    shell.come_up("a")
    shell.finish("a", cost=RunCost(load_seconds=1.25, run_seconds=0.75, uploaded_bytes=4))
    shell.finish("a", cost=RunCost(load_seconds=0.5, run_seconds=8.0, uploaded_bytes=6, streamed_bytes=3))
    shell.finish("a")
    shell.submit(image("s-1", seed=2))
    shell.submit(image("s-2", prompt="dog", seed=3))
    shell.finish("a", RunErrorKind.INPUT_LOST)
    return RememberingPool(state=shell.state)


def test_why_of_a_submission_groups_what_its_jobs_wait_for(command: Command) -> None:
    """It only said that the name could be any of its jobs."""
    ended = command("why", "s", "--pool", "mine", pool=afternoon())
    assert ended.code == 0
    assert re.search(r"^s: 2 jobs in the pool$", ended.out, re.M)
    assert re.search(r"^ +1 +encode runs +s-\d$", ended.out, re.M)
    [found] = command("why", "s", "--pool", "mine", "--json", pool=afternoon()).objects
    assert found["submission"] == "s"
    assert sum(group["count"] for group in found["groups"]) == 2
    assert command("why", "x", "--pool", "mine", pool=afternoon()).code != 0


def test_why_of_a_submission_tells_jobs_whose_outputs_are_written_from_those_in_the_journal(command: Command) -> None:
    """It said of both that they wait in the journal; and asked the pool for the part of the name that it was given."""
    asked: list[str] = []

    class DetachedPool(RememberingPool):
        def attach(self, jobs_id: str) -> Any:
            record = SubmissionRecord("s", SubmissionState.ACTIVE, "/o", "", 9, 0.0, succeeded=1)
            return SimpleNamespace(progress=lambda: JobsProgress(record, (), 5, ""))

        def waits(self, submission: str) -> SubmissionWaits | None:
            asked.append(submission)
            return super().waits(submission)

    pool = DetachedPool(state=afternoon().state)
    ended = command("why", "", "--pool", "mine", pool=pool)
    assert re.search(r"^ +3 +in the pool: about to begin, or their outputs are being written *$", ended.out, re.M)
    assert re.search(r"^ +3 +in the journal, until the pool takes more *$", ended.out, re.M)
    [found] = command("why", "", "--pool", "mine", "--json", pool=pool).objects
    counts = (sum(group["count"] for group in found["groups"]), found["not_queued"], found["in_journal"])
    assert (counts, sum(counts)) == ((2, 3, 3), found["pending"])
    assert asked == ["s", "s"]


def test_why_of_a_submission_without_the_job_service_says_what_the_pool_has_of_it(command: Command) -> None:
    """It failed, though the controller knew the jobs."""

    class ServiceLost(RememberingPool):
        def attach(self, jobs_id: str) -> NoReturn:
            raise PoolLost("the job service of the pool is gone")

    pool = ServiceLost(state=afternoon().state)
    ended = command("why", "s", "--pool", "mine", pool=pool)
    assert ended.code == 0
    assert re.search(r"^s: 2 jobs in the pool$", ended.out, re.M)
    assert "the job service of the pool is gone; what the pool does not have" in ended.out
    [found] = command("why", "s", "--pool", "mine", "--json", pool=pool).objects
    assert (found["trouble"], found["in_journal"]) == ("the job service of the pool is gone", None)
    ended = command("why", "x", "--pool", "mine", pool=pool)
    assert ended.code != 0
    assert "the job service of the pool is gone" in ended.err, "the submission may be in the journal"


def test_why_tells_each_start_with_expected_and_measured_figures(command: Command) -> None:
    ended = command("why", "s-0", "--pool", "mine", pool=afternoon())
    assert ended.code == 0
    assert re.match(r"job s-0: succeeded after \d+\.\d\d s \(user ann, priority 2\)\n", ended.out)
    assert re.search(r"^encode: a, 0\.00 s after submission, of 1 idle and 0 busy, .*: worker lost$", ended.out, re.M)
    assert re.search(r"^encode: a, attempt 2, \d\.\d\d s after .*: done$", ended.out, re.M)
    assert re.search(r"^expected +a +0\.00 s +1\.00 s +1\.00 s +2\.00 s +4 B +0 B +0$", ended.out, re.M)
    assert re.search(r"^measured +a +1\.25 s +0\.75 s +\d\.\d\d s +4 B +0 B +0$", ended.out, re.M)
    assert re.search(r"^measured +a +0\.50 s +8\.00 s +\d\.\d\d s +6 B +3 B +0$", ended.out, re.M)


def test_why_tells_the_step_that_a_run_resumed_after(command: Command) -> None:
    shell = Shell()
    shell.workers(a=64)
    shell.submit(image("s-0", seed=1))
    shell.finish("a")
    task_id = shell.on("a")
    assert task_id is not None
    shell.finish("a", cost=RunCost(steps_before=60, steps=100))
    out = command("why", "s-0", "--pool", "mine", pool=RememberingPool(state=shell.state)).out
    assert re.search(r"^sample: a, resumed after step 60 of 100, \d", out, re.M)


def test_why_tells_what_is_waited_for(command: Command) -> None:
    out = command("why", "s-2", "--pool", "mine", pool=afternoon()).out
    waits = r"^encode: waits for a worker: 1 of 1 are busy, for \d\.\d\d s so far; should start in \d\.\d\d s$"
    assert re.search(waits, out, re.M)
    assert re.search(r"^sample: waits for the result of encode \(ready\); should start in \d\.\d\d s$", out, re.M)
    assert re.search(r"^ +a +\d\.\d\d s +\d\.\d\d s +2\.00 s +\d\.\d\d s$", out, re.M)


def test_why_names_the_worker_that_a_task_waits_for_and_the_choice_that_it_did_not_take(command: Command) -> None:
    shell = Shell()
    shell.workers(a=64, b=64)
    shell.submit(alone("first", encode("first")))
    first = next(name for name in ("a", "b") if shell.on(name))
    other = "b" if first == "a" else "a"
    shell.finish(first, cost=RunCost(run_seconds=0.5))
    shell.submit(alone("long", encode("long")))
    shell.submit(alone("patient", encode("patient")))
    pool = RememberingPool(state=shell.state)
    out = command("why", "patient", "--pool", "mine", pool=pool).out
    assert re.search(rf"^encode: waits for {first}: .*on {other}, which was idle", out, re.M)
    assert re.search(rf"^waits for it +{first} ", out, re.M)
    assert re.search(rf"^ +{other} +0\.00 s +1\.00 s", out, re.M)
    pool.now = shell.at + 0.25
    out = command("why", "patient", "--pool", "mine", pool=pool).out
    assert re.search(rf"^waits for it +{first} ", out, re.M)
    assert re.search(rf"^at the last placement +{first} +0\.50 s", out, re.M)
    [found] = command("why", "patient", "--pool", "mine", "--json", pool=pool).objects
    assert found["tasks"][0]["wait"]["worker_id"] == first
    assert {option["worker_id"] for option in found["tasks"][0]["wait"]["options"]} == {"a", "b"}


def test_a_shared_task_says_that_it_ran_for_an_earlier_job(command: Command) -> None:
    out = command("why", "s-1", "--pool", "mine", pool=afternoon()).out
    assert re.search(r"^encode: a, attempt 2, \d+\.\d\d s before submission, for an earlier job, .*: done$", out, re.M)


def test_the_others_are_told_that_could_have_run_it(command: Command) -> None:
    pool = afternoon()
    why = Why(
        PlacementRule.CHEAPEST,
        PlacementOption(WorkerId("gpu-1"), 0.0, 0.4, 2.0),
        (PlacementOption(WorkerId("gpu-0"), 2.1, 0.0, 2.0),),
        idle=1,
        busy=1,
        upload_bytes=5 << 20,
    )
    entries = pool.state.log._entries
    for number, (*move, note) in enumerate(entries):
        if isinstance(note, TaskStart):
            entries[number] = (*move, dataclasses.replace(note, why=why))
    out = command("why", "s-0", "--pool", "mine", pool=pool).out
    assert re.search(r"^expected +gpu-1 +0\.00 s +0\.40 s +2\.00 s +2\.40 s +5\.0 MiB +0 B +0$", out, re.M)
    assert re.search(r"^instead of +gpu-0 +2\.10 s +0\.00 s +2\.00 s +4\.10 s$", out, re.M)
    assert "because it costs least to load" in out


def test_why_for_programs_holds_all_of_it(command: Command) -> None:
    pool = afternoon()
    [found] = command("why", "s-0", "--pool", "mine", "--json", pool=pool).objects
    seen = pool.history("s-0")
    assert (found["job_id"], found["status"], found["user"], found["priority"]) == ("s-0", "succeeded", "ann", 2)
    assert [task["stage"] for task in found["tasks"]] == ["encode", "sample", "decode"]
    lost, done = found["tasks"][0]["attempts"]
    assert (lost["end"], lost["cost"], done["end"]) == ("worker_lost", None, "done")
    assert done["cost"]["uploaded_bytes"] == done["why"]["upload_bytes"] == 4
    assert done["why"]["words"] == seen.tasks[0].attempts[1].why.words
    assert done["why"]["chosen"]["extra_seconds"] == 1.0


def test_story_tells_every_move_oldest_first(command: Command) -> None:
    pool = afternoon()
    out = command("story", "s-0", "--pool", "mine", pool=pool).out
    rows = [line for line in out.splitlines() if re.match(r" *[+-]\d", line)]
    lines = pool.history("s-0").lines
    assert len(rows) == len(lines)
    assert re.match(r" *\+0\.000 s +job +active +submitted job", rows[0])
    assert any(re.search(r"encode +running -> blocked +a#1 down: power cut", row) for row in rows)
    assert re.search(r"active -> ended +decode attempt 1 on a#2: done +succeeded$", rows[-1])
    objects = command("story", "s-0", "--pool", "mine", "--json", pool=pool).objects
    assert objects == [json.loads(json.dumps(dataclasses.asdict(line))) for line in lines]


def test_a_job_that_is_not_known_is_answered_with_what_is(command: Command) -> None:
    ended = command("why", "s-7", "--pool", "mine", pool=afternoon())
    assert ended.code == 2
    assert "unknown job 's-7'" in ended.err
    assert "Known: s-0, s-1, s-2." in ended.err


def test_a_job_whose_story_is_gone_says_so(command: Command) -> None:
    pool = afternoon()
    pool.state.log._entries.clear()
    ended = command("why", "s-0", "--pool", "mine", pool=pool)
    assert ended.out == "job s-0: succeeded; event log no longer available\n"


def test_a_live_job_whose_submission_is_forgotten_is_told_without_false_times(command: Command) -> None:
    """Found in a review: it was told as if it had come now, its results as not made, and its terms not at all."""
    shell = Shell()
    shell.workers(a=64)
    shell.submit(dataclasses.replace(image("s-0"), user=UserId("ann"), priority=2, deadline=shell.at + 30.0))
    shell.finish("a")
    pool = RememberingPool(state=shell.state)
    entries = pool.state.log._entries
    while not isinstance(entries[0][5], TaskStart) or entries[0][2] == pool.history("s-0").tasks[0].task_id:
        entries.popleft()
    out = command("why", "s-0", "--pool", "mine", pool=pool).out
    said = re.match(
        r"job s-0: active \(user ann, priority 2, deadline in (\d+\.\d) s\); submission time no longer available", out
    )
    assert said is not None
    assert float(said[1]) < 30.0
    assert "\nencode: its result exists, from a run that is no longer in the history\n" in out
    assert re.search(r"^sample: a, \d\.\d\d s ago, of ", out, re.MULTILINE)
    assert "after submission" not in out
    assert re.match(r" *relative to now +what", command("story", "s-0", "--pool", "mine", pool=pool).out.split("\n")[2])
    pool.now = shell.at + 60.0
    assert re.search(r"deadline \d\d\.\d s ago", command("why", "s-0", "--pool", "mine", pool=pool).out)


def test_why_tells_the_batch_size_and_how_it_was_chosen(command: Command) -> None:
    """Left open, as the request says, and of requests that run alone: nothing."""
    shell = Shell()
    shell.workers(a=64)
    for name, size, reason in (("open", 2, "2.5 times the images"), ("asked", 2, ""), ("alone", 1, "")):
        job = alone(name, sample(seed=size, batch_size=size))
        shell.submit(replace(job, batch_reason=reason))
    pool = RememberingPool(state=shell.state)
    lines = {name: command("why", name, "--pool", "mine", pool=pool).out for name in ("open", "asked", "alone")}
    assert "\nin passes of 2 images: 2.5 times the images\n" in lines["open"]
    assert "\nin passes of 2 images: as the request says\n" in lines["asked"]
    assert "passes" not in lines["alone"]
