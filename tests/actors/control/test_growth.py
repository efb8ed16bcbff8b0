"""A pool without groups follows the GPUs of its cluster."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from modelpool.actors.control.growth import workers_for_gpus
from modelpool.pool.values.specs.spec import WorkerId
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.model.workers import Worker, WorkerState


def worker(name: str, state: str) -> Worker:
    """A worker that is "up", "draining", "starting" or "given up"."""
    found = Worker(WorkerId(name), 1)
    if state in ("up", "draining"):
        found.status = WorkerState.IDLE
        found.update_residency(Residency(64))
    if state == "draining":
        found.drain_deadline = 100.0
    if state == "given up":
        found.status = WorkerState.GIVEN_UP
    return found


STATES = st.lists(st.sampled_from(["up", "draining", "starting", "given up"]), max_size=8)


@given(states=STATES, gpu_count=st.integers(0, 10))
def test_there_is_a_worker_for_each_gpu_and_none_that_is_up_is_named_out(states: list[str], gpu_count: int) -> None:
    workers = [worker(f"gpu-{number}", state) for number, state in enumerate(states)]
    wanted = workers_for_gpus(gpu_count, workers)
    by_id = {one.worker_id: one for one in workers}
    assert len(set(wanted)) == len(wanted)
    assert {one.worker_id for one in workers if one.live} <= set(wanted)
    staying = [name for name in wanted if name not in by_id or by_id[name].drain_deadline is None]
    up = states.count("up")
    assert len(staying) == max(gpu_count, up), "more GPUs than the cluster counts are those of workers that are up"
    assert workers_for_gpus(gpu_count, workers) == wanted
    # a second look after the change wants the same
    after = [by_id.get(name) or worker(name, "starting") for name in wanted]
    assert set(workers_for_gpus(gpu_count, after)) == set(wanted)


def test_a_worker_that_was_given_up_goes_first() -> None:
    workers = [worker("gpu-0", "given up"), worker("gpu-1", "starting"), worker("gpu-2", "up")]
    assert workers_for_gpus(2, workers) == ("gpu-2", "gpu-1")
