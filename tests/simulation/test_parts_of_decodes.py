"""Decodes in parts in virtual time: idle GPUs shorten a large decode, nothing of the parts is held after the join, a
lost worker costs its part alone, and a busy pool has the throughput of whole decodes."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import JobSpec, Stage, TaskId, TaskSpec, WorkerId
from modelpool.scheduler.core.invariants import validate
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Submitted
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.workloads.generators import all_at_once
from modelpool.scheduler.simulator.workloads.mix import Mix
from modelpool.scheduler.simulator.workloads.models import InventedModel
from tests.scheduler.world import Shell, alone, encode
from tests.simulation.worlds import gpus

DECODE_SECONDS, PARTS = 40.0, 8


def video(job: JobSpec, parts: int) -> JobSpec:
    """The job with a long decode, whole or in parts with a join that needs no weights."""
    *before, decode = (task for task in job.tasks if task.stage is not Stage.DECODE or task.task_id == job.wanted)
    whole = replace(decode, run_seconds=DECODE_SECONDS, together="")
    if parts == 1:
        return replace(job, tasks=(*before, whole))
    pieces = tuple(
        replace(whole, task_id=TaskId(f"{whole.task_id}.{n}"), run_seconds=DECODE_SECONDS / parts) for n in range(parts)
    )
    return replace(job, tasks=(*before, *pieces, join_of(whole, pieces)))


def join_of(whole: TaskSpec, pieces: tuple[TaskSpec, ...]) -> TaskSpec:
    needs = tuple(piece.task_id for piece in pieces)
    return replace(whole, uses=(), activation_bytes=0, run_seconds=0.2, needs=needs, input_names=(), divisions=())


def served(jobs: int, workers: int, parts: int, lost: bool = False) -> VirtualCluster[SchedulerState]:
    state = SchedulerState(SchedulerConfig(story_length=None))
    cluster = VirtualCluster(state, gpus(workers))
    what = Mix([InventedModel("m", diffusion_bytes=2 * GIB)], steps=(10,))
    cluster.start(what.components)
    for submission in what.submissions(all_at_once(jobs), Random(1)):
        cluster.post(Submitted(submission.at, video(submission.job, parts)))
    if lost:
        cluster.lose(WorkerId("gpu-1"), 8.0)
    cluster.run()
    assert not cluster.errors
    assert len(cluster.outcomes) == jobs
    validate(state)
    assert {run.stage for run in cluster.runs} == set(Stage)
    assert not [task for task in cluster.held if task.startswith("d")], "results of parts are released"
    return cluster


def test_idle_gpus_shorten_a_decode_and_busy_ones_lose_nothing() -> None:
    whole, one, four = served(1, 4, 1), served(1, 1, PARTS), served(1, 4, PARTS)
    assert one.now < 1.02 * whole.now, "parts cost next to nothing on one GPU"
    assert four.now < whole.now - 0.7 * DECODE_SECONDS, f"four GPUs: {four.now:.1f} of {whole.now:.1f} s"
    with_loss = max(served(1, 4, PARTS, lost=True).latency_seconds.values())
    assert with_loss < max(four.latency_seconds.values()) + DECODE_SECONDS / PARTS + 1.0
    busy, parts = served(24, 4, 1), served(24, 4, PARTS)
    assert parts.now < 1.02 * busy.now, f"{parts.now:.1f} against {busy.now:.1f} s"


def test_a_join_goes_behind_a_decode_on_a_worker_that_overlaps_them() -> None:
    """Found here: the weights of a decode without weights were asked for."""
    shell = Shell(SchedulerConfig(story_length=None, send_ahead_seconds=60.0), overlaps_decode=True)
    shell.want("a")
    shell.come_up("a")
    given = (TaskId("given:1"), TaskId("given:2"))
    join = TaskSpec(TaskId("d:join"), Stage.DECODE, (), 0, 0.1, given)
    shell.submit(alone("first", encode("cat")))
    shell.submit(alone("join", join, given=given))
    while shell.running:
        shell.finish("a")
    validate(shell.state)
    assert not shell.state.demand.tasks
