"""Runs that stop and resume, in virtual time: no step is computed twice unless a worker was lost, and then only those
since the last checkpoint; preemptions are bounded, and help."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentSpec,
    ComponentUse,
    JobId,
    JobSpec,
    Role,
    Stage,
    TaskId,
    TaskSpec,
    WorkerId,
)
from modelpool.scheduler.core.invariants import validate
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Outcome, StopTask, Submitted
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.machines import SimulatedGpu
from tests.tiers import examples

MODELS = tuple(ComponentKey(name) for name in ("video/diffusion_model", "image/diffusion_model"))
STEPS = 20
#: seconds of a run, by model
SECONDS = (400.0, 4.0)
JOBS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 2), st.floats(0.0, 900.0)), min_size=1, max_size=14
)  # model, priority, time


def cluster(
    jobs: list[tuple[int, int, float]], workers: int, checkpoint_seconds: float | None = None, **config: float | bool
) -> VirtualCluster[SchedulerState]:
    """A pool that has run one job of each model, so that it knows how long they take, and then gets these."""
    settings = SchedulerConfig(story_length=None, **config)  # type: ignore[arg-type]
    gpus = [SimulatedGpu(WorkerId(f"gpu-{n}"), 24 * GIB, 10.0 * GIB) for n in range(workers)]
    found = VirtualCluster(SchedulerState(settings), gpus, checkpoint_seconds=checkpoint_seconds)
    found.start([ComponentSpec(key, Role.DIFFUSION_MODEL, 8 * GIB, 8 * GIB) for key in MODELS])
    for number, (model, priority, at) in enumerate(
        [(0, 0, 1.0), (1, 0, 1.0), *((m, p, 1000.0 + t) for m, p, t in jobs)]
    ):
        use = ComponentUse(MODELS[model], GIB, passes=STEPS)
        task = TaskSpec(TaskId(f"s{number}"), Stage.SAMPLE, (use,), GIB, SECONDS[model])
        found.post(Submitted(at, JobSpec(JobId(f"j{number}"), (task,), task.task_id, priority=priority)))
    return found


def check(state: SchedulerState) -> None:
    validate(state)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(jobs=JOBS, workers=st.integers(1, 3), wait=st.sampled_from([0.0, 5.0, 30.0]), limit=st.integers(0, 3))
def test_no_step_is_lost_to_a_preemption_and_everything_ends(
    jobs: list[tuple[int, int, float]], workers: int, wait: float, limit: int
) -> None:
    found = cluster(jobs, workers, preemption_wait_seconds=wait, preemption_limit=limit)
    found.run(check)
    assert set(found.outcomes.values()) == {Outcome.SUCCEEDED}
    assert len(found.outcomes) == len(jobs) + 2
    assert set(found.steps_computed.values()) == {STEPS}, "each step of each task was computed exactly once"
    assert not found.states, "a state is held that no task resumes from"
    stops: dict[TaskId, int] = {}
    for _, command in found.commands:
        if isinstance(command, StopTask):
            assert command.keep_state
            stops[command.task_id] = stops.get(command.task_id, 0) + 1
    assert all(count <= limit for count in stops.values())


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    jobs=JOBS,
    losses=st.lists(st.tuples(st.integers(0, 1), st.floats(1000.0, 3000.0)), max_size=4),
    checkpoint_seconds=st.sampled_from([30.0, 60.0, None]),
)
def test_a_lost_worker_loses_no_more_than_a_checkpoint_interval(
    jobs: list[tuple[int, int, float]], losses: list[tuple[int, float]], checkpoint_seconds: float | None
) -> None:
    found = cluster(jobs, 2, checkpoint_seconds, crash_limit=9, max_attempts=99, start_retry_limit=99)
    for worker, at in losses:
        found.lose(WorkerId(f"gpu-{worker}"), at)
    found.run(check)
    assert set(found.outcomes.values()) == {Outcome.SUCCEEDED}
    assert not found.states
    lost = sum(count - STEPS for count in found.steps_computed.values())
    most_seconds = max(SECONDS) if checkpoint_seconds is None else checkpoint_seconds + SECONDS[0] / STEPS
    assert 0 <= lost <= len(losses) * most_seconds / (SECONDS[1] / STEPS)
    videos = {task_id: count - STEPS for task_id, count in found.steps_computed.items() if count > STEPS}
    seconds = sum(count * SECONDS[0] / STEPS for task_id, count in videos.items() if _is_video(found, task_id))
    assert seconds <= len(losses) * most_seconds, f"{seconds} s of video were computed twice"


def _is_video(found: VirtualCluster[SchedulerState], task_id: TaskId) -> bool:
    job = next(event.job for event in found.submitted.values() if event.job.wanted == task_id)
    return job.tasks[0].uses[0].component == MODELS[0]


def test_urgent_images_do_not_wait_for_videos() -> None:
    """Two videos occupy two GPUs; an image of higher priority starts after a step and two loads, not after a video.
    The videos end later by no more than the images and the loads take."""
    jobs = [(0, 0, 0.0), (0, 0, 1.0), *((1, 1, 50.0 + 40.0 * n) for n in range(3))]
    latencies, ends = [], []
    for preemption in (True, False):
        found = cluster(jobs, 2, preemption=preemption)
        found.run(check)
        latencies.append(max(found.latency_seconds[JobId(f"j{number}")] for number in (4, 5, 6)))
        ends.append(found.now)
    assert latencies[0] < 30.0 < 200.0 < latencies[1], latencies
    assert ends[0] < ends[1] + 3 * (4.0 + 2 * 1.0) + 1.0, ends
