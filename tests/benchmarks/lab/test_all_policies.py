"""What holds for every policy, whatever the jobs are and whatever goes wrong.

Proves: each job is resolved once; runs go to workers that are up and idle (the cluster asserts it); no GPU holds more
than it has room for; results are let go; equal arguments give equal commands; no policy beats the bounds.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelpool.benchmarks.lab.base import Peer
from modelpool.benchmarks.lab.bounds import least_load_seconds, least_makespan_seconds
from modelpool.benchmarks.lab.policies import POLICIES
from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import JobId, NodeId, RunErrorKind, WorkerId
from modelpool.scheduler.model.messages import CancelRequested, Outcome, WorkersWanted
from modelpool.scheduler.simulator.cluster import Core, VirtualCluster
from modelpool.scheduler.simulator.faults import Disturbances
from modelpool.scheduler.simulator.hosts import SimulatedNode
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.workloads.generators import all_at_once, bursts
from modelpool.scheduler.simulator.workloads.mix import Mix
from modelpool.scheduler.simulator.workloads.models import InventedModel
from modelpool.scheduler.simulator.workloads.workload import Workload

NAMES = sorted(POLICIES)
MIX = Mix(
    [InventedModel(f"m{n}", diffusion_bytes=[2, 5, 9][n % 3] * GIB) for n in range(4)],
    ["", "x", "y"],
    seeds_per_prompt=2,
    steps=(5, 20),
    users=("anna", "ben"),
)
NODES = [SimulatedNode(NodeId("box"), 20 * GIB, 3.0 * GIB)]


def gpus(*capacities_gib: int, node: str = "box") -> list[SimulatedGpu]:
    """Workers of these sizes, every other one at double speed."""
    return [
        SimulatedGpu(WorkerId(f"g{n}"), size * GIB, 10.0 * GIB, speed=1.0 + n % 2, node=NodeId(node))
        for n, size in enumerate(capacities_gib)
    ]


def batch(count: int, seed: int) -> Workload:
    return Workload("batch", MIX.components, tuple(MIX.submissions(all_at_once(count), Random(seed))))


def world(
    name: str, workload: Workload, workers: list[SimulatedGpu], disturbances: Disturbances | None = None
) -> VirtualCluster[Core]:
    core, memory = POLICIES[name].make(workers, workload.components)
    cluster = VirtualCluster(core, workers, NODES, memory, disturbances)
    cluster.start(workload.components)
    for submitted in workload.jobs:
        cluster.post(submitted)
    return cluster


def within_capacity(cluster: VirtualCluster[Core]) -> None:
    for worker_id, residency in cluster.residencies.items():
        assert residency.used_bytes <= residency.capacity_bytes, worker_id


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12)
@given(
    st.integers(0, 1 << 16),
    st.integers(0, 14),
    st.lists(st.sampled_from([4, 8, 24]), min_size=1, max_size=3),
    st.booleans(),
)
def test_every_job_is_resolved_once(name: str, seed: int, count: int, sizes: list[int], troubled: bool) -> None:
    rng = Random(seed)
    jobs = tuple(MIX.submissions(bursts(count, 5, 4.0), rng))
    workers = gpus(*sizes)
    kinds = [RunErrorKind.OUT_OF_VRAM, RunErrorKind.INTERNAL, RunErrorKind.WORKER_LOST]
    disturbances = Disturbances(
        start_fails=lambda command: troubled and rng.random() < 0.2,
        run_factor=lambda command: rng.uniform(0.5, 2.0),
        run_error=lambda command: rng.choice(kinds) if troubled and rng.random() < 0.1 else None,
    )
    cluster = world(name, Workload("bursts", MIX.components, jobs), workers, disturbances)
    if troubled:
        for submitted in jobs:
            if rng.random() < 0.2:
                cluster.post(CancelRequested(submitted.at + rng.uniform(0.0, 9.0), submitted.job.job_id))
        cluster.lose(workers[0].worker_id, rng.uniform(0.0, 20.0))
        cluster.post(WorkersWanted(10.0, tuple(worker.worker_id for worker in workers[1:])))
        cluster.post(WorkersWanted(15.0, tuple(worker.worker_id for worker in workers)))
        cluster.post(CancelRequested(1.0, JobId("unknown")))
    cluster.run(after_each=lambda core: within_capacity(cluster))
    assert len(cluster.outcomes) == count
    if not troubled:
        assert set(cluster.outcomes.values()) <= {Outcome.SUCCEEDED}
    if isinstance(cluster.core, Peer) and not cluster.core.kept_encodes:
        assert cluster.held == set(), "somebody still holds a result"


@pytest.mark.parametrize("name", NAMES)
def test_a_worker_that_is_no_longer_wanted_gets_nothing(name: str) -> None:
    """Found by chance: an idle worker that was ended stayed in the list of idle ones."""
    jobs = batch(6, 1).jobs
    workers = gpus(24, 24)
    late = tuple(replace(submitted, at=30.0) for submitted in jobs)
    cluster = world(name, Workload("late", MIX.components, late), workers)
    cluster.post(WorkersWanted(20.0, (workers[1].worker_id,)))
    cluster.run()
    assert set(cluster.outcomes.values()) == {Outcome.SUCCEEDED}
    assert {run.worker_id for run in cluster.runs} == {workers[1].worker_id}


@pytest.mark.parametrize("name", NAMES)
def test_equal_arguments_give_equal_commands(name: str) -> None:
    jobs = batch(40, 3)
    first, second = (world(name, jobs, gpus(24, 12, 24)) for _ in range(2))
    first.run()
    second.run()
    assert first.commands == second.commands
    assert first.runs == second.runs


@pytest.mark.parametrize("name", NAMES)
def test_nobody_beats_the_bounds(name: str) -> None:
    """A batch on GPUs that are up from the beginning; loading and streaming against the least there is."""
    jobs, workers = batch(60, 4), gpus(24, 24, 12, node="")
    specs = {spec.key: spec for spec in jobs.components}
    least_seconds = least_load_seconds([s.job for s in jobs.jobs], workers, specs)
    cluster = world(name, jobs, workers)
    cluster.run()
    totals = cluster.totals
    over_bytes = totals.streamed_bytes + totals.preloaded_bytes  # the link is as long at work when nobody waits for it
    moved_seconds = totals.load_seconds + over_bytes / workers[0].link_bytes_per_second
    if name != "infinite_cache":
        assert moved_seconds >= least_seconds > 0.0
    assert cluster.now - 1.0 >= least_makespan_seconds([s.job for s in jobs.jobs], workers)


@pytest.mark.parametrize("name", [name for name in NAMES if not POLICIES[name].is_ideal and name != "modelpool"])
def test_peers_know_no_result_that_they_did_not_make(name: str) -> None:
    """Prompts come twice in a row: only those that share encodes run fewer of them than there are jobs."""
    cluster = world(name, batch(20, 5), gpus(24, 24))
    cluster.run()
    encodes = sum("encode" in run.task_id for run in cluster.runs)
    core = cluster.core
    assert isinstance(core, Peer)
    assert (encodes < 20) == bool(core.kept_encodes)
