"""A recorded log becomes a workload: its jobs at their times, with the seconds that runs really took."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import RunCost, RunErrorKind, Stage, TaskId, WorkerId
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.messages import StateKept, Submitted
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.record.log_trace import live_trace
from modelpool.scheduler.simulator.workloads.trace_lines import from_lines, to_lines
from tests.scheduler.recorded import RecordedShell, busy_afternoon
from tests.scheduler.world import COMPONENTS, alone, encode, image, sample


def test_jobs_come_as_they_came_the_first_at_once() -> None:
    shell = busy_afternoon()
    submitted = [entry.event for entry in shell.entries if isinstance(entry.event, Submitted)]
    live = live_trace(shell.entries, "afternoon")
    assert live.workload.name == "afternoon"
    assert live.workload.components == COMPONENTS
    assert [s.job.job_id for s in live.workload.jobs] == [s.job.job_id for s in submitted]
    assert [s.at for s in live.workload.jobs] == [s.at - submitted[0].at for s in submitted]
    assert [s.job.priority for s in live.workload.jobs] == [s.job.priority for s in submitted]
    assert (live.cancelled, live.refused) == (1, 0)


def test_run_seconds_are_what_runs_took() -> None:
    """Encodes took half of what was thought, samples three times as long in the middle of three; decodes ran never."""
    shell = RecordedShell()
    shell.workers(a=64)
    for seed in range(3):
        shell.submit(image(f"j{seed}", prompt=str(seed), seed=seed))
    for run_seconds in (0.5, 0.5, 0.5):
        shell.finish("a", cost=RunCost(run_seconds=run_seconds))
    shell.finish("a", RunErrorKind.INPUT_LOST)  # what ended badly says nothing
    taken = []
    for run_seconds in (20.0, 30.0, 200.0):
        stage = shell.state.demand.tasks[shell.running[next(iter(shell.running))].command.task_id].spec.stage
        while stage is not Stage.SAMPLE:
            shell.finish("a", cost=RunCost(run_seconds=0.5 if stage is Stage.ENCODE else 0.0))
            stage = shell.state.demand.tasks[shell.running[next(iter(shell.running))].command.task_id].spec.stage
        shell.finish("a", cost=RunCost(run_seconds=run_seconds))
        taken.append(run_seconds)
    live = live_trace(shell.entries, "measured")
    seconds = {task.stage: task.run_seconds for s in live.workload.jobs for task in s.job.tasks}
    assert seconds[Stage.ENCODE] == pytest.approx(0.5)
    assert seconds[Stage.SAMPLE] == pytest.approx(30.0)
    assert seconds[Stage.DECODE] == pytest.approx(2.0)
    assert live.measured >= 6


def test_streaming_is_no_part_of_a_run_s_own_seconds() -> None:
    shell = RecordedShell()
    shell.workers(a=64)
    task = sample(run_seconds=10.0)
    shell.submit(alone("j", task))
    shell.finish("a", cost=RunCost(run_seconds=15.0, streamed_bytes=20))  # at 4 bytes a second
    (job,) = live_trace(shell.entries, "streamed").workload.jobs
    assert job.job.tasks[0].run_seconds == pytest.approx(10.0)


def test_a_run_that_resumed_is_measured_by_the_steps_that_it_did() -> None:
    shell = RecordedShell()
    shell.workers(a=64)
    shell.submit(alone("j", sample(run_seconds=10.0)))
    shell.finish("a", cost=RunCost(run_seconds=5.0, steps_before=3, steps=4))
    (job,) = live_trace(shell.entries, "resumed").workload.jobs
    assert job.job.tasks[0].run_seconds == pytest.approx(20.0)


def test_shares_of_larger_runs_count_only_where_no_task_ran_alone() -> None:
    shell = RecordedShell()
    shell.workers(a=64)
    for seed, cost in enumerate((RunCost(run_seconds=2.0, batched=4), RunCost(run_seconds=8.0))):
        shell.submit(alone(f"j{seed}", sample(seed=seed, run_seconds=10.0)))
        shell.finish("a", cost=cost)
        (seconds,) = {s.job.tasks[0].run_seconds for s in live_trace(shell.entries, "shares").workload.jobs}
        assert seconds == pytest.approx(cost.run_seconds)


def test_deadlines_move_with_the_clock_and_bad_jobs_are_left_out() -> None:
    shell = RecordedShell()
    shell.workers(a=64)
    shell.submit(replace(image("late"), deadline=shell.at + 1.0 + 7.0))  # a second passes before it is there
    entries = shell.entries
    twin = replace(entries[-1], event=Submitted(shell.tick(), image("late")))
    broken = replace(image("broken"), wanted=TaskId("nobody makes this"))
    bad = replace(entries[-1], event=Submitted(shell.tick(), broken))
    live = live_trace([*entries, twin, bad], "odd")
    (job,) = live.workload.jobs
    assert (job.at, job.job.deadline) == (0.0, 7.0)
    assert live.refused == 1


def test_packs_of_a_log_stay_packs_up_to_their_last_job_that_is_left() -> None:
    """Found in a review: replayed jobs started one by one, where the pool had started the jobs of a pack together. The
    last job of a pack may be refused, or behind the end of the log."""
    shell = RecordedShell()
    shell.workers(a=64)
    shell.submit_together([image(f"a{seed}", seed=seed) for seed in range(3)])
    shell.submit(image("alone", seed=3))
    broken = replace(image("broken"), wanted=TaskId("nobody makes this"))
    shell.submit_together([image("b0", seed=4), image("b1", seed=5), broken])
    shell.submit_together([image("c0", seed=6), image("c1", seed=7)])
    assert isinstance(shell.entries[-1].event, Submitted)
    live = live_trace(shell.entries[:-1], "packs")
    followed = {submitted.job.job_id: submitted.others_follow for submitted in live.workload.jobs}
    assert followed == {"a0": True, "a1": True, "a2": False, "alone": False, "b0": True, "b1": False, "c0": False}
    assert from_lines(to_lines(live.workload)) == live.workload


def test_a_pack_ends_with_the_last_state_that_was_found_for_it() -> None:
    """The core is told of such states behind the last job, which they follow."""
    shell = RecordedShell()
    shell.workers(a=64)
    jobs = [image(f"a{seed}", seed=seed) for seed in range(2)]
    for job in jobs:
        shell.submit(job, others_follow=True)
    for job in jobs:
        (task_id,) = [task.task_id for task in job.tasks if task.stage is Stage.SAMPLE]
        shell.states[task_id] = 1
        shell.feed(StateKept(shell.at, WorkerId(""), 0, task_id, 0, 1, 3, others_follow=job is not jobs[-1]))
    shell.submit(image("alone", seed=3))
    live = live_trace(shell.entries, "resumed")
    assert [submitted.others_follow for submitted in live.workload.jobs] == [True, False, False]


def test_a_replayed_pack_fills_its_passes() -> None:
    """Four texts of a pack, on an idle worker: one pass of four; submitted one by one, they have more."""
    passes = []
    for together in (True, False):
        shell = RecordedShell()
        shell.workers(a=64)
        jobs = [alone(f"j{number}", encode(str(number), batch_size=4)) for number in range(4)]
        if together:
            shell.submit_together(jobs)
        else:
            for job in jobs:
                shell.submit(job)
        workload = live_trace(shell.entries, "texts").workload
        cluster = VirtualCluster(SchedulerState(), [SimulatedGpu(WorkerId("a"), GIB, float(GIB))])
        cluster.start(workload.components)
        for submitted in workload.jobs:
            cluster.post(submitted)
        cluster.run()
        assert len(cluster.outcomes) == 4
        passes.append(len({run.started_at for run in cluster.runs}))
    assert passes[0] == 1 < passes[1]


def test_a_log_without_jobs_is_an_empty_workload() -> None:
    shell = RecordedShell()
    shell.workers(a=64)
    live = live_trace(shell.entries, "idle")
    assert (live.workload.jobs, live.measured) == ((), 0)


def test_a_deadline_is_never_before_its_job() -> None:
    """Parts of a long submission may come after the deadline that it has from its first part."""
    shell = RecordedShell()
    shell.workers(a=64)
    shell.submit(image("first"))
    shell.submit(replace(image("late"), deadline=shell.at - 0.5))
    late = live_trace(shell.entries, "late").workload.jobs[-1]
    assert late.job.deadline == late.at > 0.0
    assert (
        from_lines(to_lines(live_trace(shell.entries, "late").workload)) == live_trace(shell.entries, "late").workload
    )
