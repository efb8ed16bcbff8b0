"""Runs of one call, whose ends are reported together, have the times at which they took place, one after the other."""

from __future__ import annotations

from modelpool.actors.control.metrics.job_traces import JobTraces, TracedRun
from modelpool.pool.values.specs.spec import JobId, JobSpec, RunCost, TaskId, WorkerId
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Command, Event
from tests.scheduler.world import Shell, image, sample

GIVEN = TaskId("given:1")
COST = RunCost(load_seconds=2.0, run_seconds=8.0)


class TracedShell(Shell):
    """A shell with a core that is traced."""

    def __post_init__(self) -> None:
        self.runs: list[TracedRun] = []
        self.traces: JobTraces | None = None
        super().__post_init__()
        self.traces = JobTraces(self.state.demand)

    def feed(self, event: Event) -> list[Command]:
        commands = super().feed(event)
        if self.traces is not None:
            for trace in self.traces.note(event, commands):
                self.runs += [run for _, runs in trace.tasks for run in runs]
        return commands


def shell_with_call() -> TracedShell:
    """One worker, which knows how long the runs take, and runs the first of a call of several."""
    shell = TracedShell(SchedulerConfig(story_length=None, send_ahead_seconds=60.0))
    shell.want("a")
    shell.come_up("a")
    for seed in range(9):
        task = sample(GIVEN, seed=seed, run_seconds=10.0)
        shell.submit(JobSpec(JobId(f"job {seed}"), (task,), task.task_id, (GIVEN,)))
    while not shell.state.worker_table.workers[WorkerId("a")].joined:
        shell.finish("a", cost=COST)
    return shell


def test_the_runs_of_a_call_follow_each_other_though_their_ends_are_reported_together() -> None:
    shell = shell_with_call()
    before, began_at = len(shell.runs), shell.runs[-1].ended_at
    assert began_at is not None
    count = 1 + len(shell.state.worker_table.workers[WorkerId("a")].joined)
    assert count > 1
    shell.tick(10.0 * count)
    for _ in range(count):
        shell.finish("a", cost=COST)
    runs = shell.runs[before:]
    assert [(run.sent_at, run.ended_at) for run in runs[:-1]] == [
        (began_at + 10.0 * place, began_at + 10.0 * (place + 1)) for place in range(count - 1)
    ]
    assert runs[-1].sent_at == began_at + 10.0 * (count - 1)
    assert runs[-1].ended_at == shell.at, "the last one was reported when it ended"


def test_a_run_whose_call_has_lost_its_first_run_is_not_moved() -> None:
    """The first queued run of the next call is revoked: the next one does not follow the run that ends in its call."""
    shell = shell_with_call()
    worker = shell.state.worker_table.workers[WorkerId("a")]
    while worker.joined:
        shell.finish("a", cost=COST)
    first, second = worker.queue[0], worker.queue[1]
    assert (first.joins, second.joins) == (False, True)
    shell.cancel(next(name for name, job in shell.jobs.items() if job.wanted == first.task_id))
    shell.revoke("a")
    shell.tell_revoked()
    before = len(shell.runs)
    shell.tick(100.0)
    shell.finish("a", cost=COST)
    assert shell.runs[before].ended_at == shell.at


def test_a_run_that_follows_another_for_its_result_could_not_start_before() -> None:
    shell = TracedShell(SchedulerConfig(story_length=None, send_ahead_seconds=60.0))
    shell.want("a")
    shell.come_up("a")
    for name in ("known", "new"):
        shell.submit(image(name, name))
        while shell.running:
            shell.finish("a", cost=COST)
    followers = shell.runs[-2:]
    assert [run.sent_at for run in followers] == [run.ended_at for run in shell.runs[-3:-1]]
    assert [run.ready_at for run in followers] == [run.sent_at for run in followers]
