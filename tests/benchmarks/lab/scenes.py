"""Small scenes for the peers: jobs of one task or three, and which worker got them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from modelpool.benchmarks.lab.policies import POLICIES
from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentSpec,
    ComponentUse,
    JobId,
    JobSpec,
    NodeId,
    Role,
    Stage,
    TaskId,
    TaskSpec,
    UserId,
    WorkerId,
)
from modelpool.scheduler.model.messages import Submitted
from modelpool.scheduler.simulator.cluster import Core, VirtualCluster
from modelpool.scheduler.simulator.hosts import SimulatedNode
from modelpool.scheduler.simulator.machines import SimulatedGpu


def model(name: str, size_gib: float = 4) -> ComponentSpec:
    """The diffusion model of a model that has nothing else."""
    size_bytes = int(size_gib * GIB)
    return ComponentSpec(ComponentKey(f"{name}/d"), Role.DIFFUSION_MODEL, size_bytes, size_bytes)


def job(
    name: str,
    model: str,
    seconds: float = 10.0,
    *,
    at: float = 0.0,
    user: str = "",
    priority: int = 0,
    lora: str = "",
    activation_gib: int = 0,
) -> Submitted:
    """One sample task with the diffusion model of `model`."""
    adapters = (ComponentKey(lora),) if lora else ()
    use = ComponentUse(ComponentKey(f"{model}/d"), 0, lora, GIB if lora else 0, adapters=adapters)
    task = TaskSpec(TaskId(f"task of {name}"), Stage.SAMPLE, (use,), activation_gib * GIB, seconds)
    return Submitted(at, JobSpec(JobId(name), (task,), task.task_id, priority=priority, user=UserId(user)))


def workers(*capacities_gib: float, node: str = "", speed: float = 1.0) -> list[SimulatedGpu]:
    """g0, g1, ..., up at once, with links of 4 GiB a second: a model is there after a second."""
    return [
        SimulatedGpu(WorkerId(f"g{n}"), int(size * GIB), 4.0 * GIB, speed, start_seconds=0.0, node=NodeId(node))
        for n, size in enumerate(capacities_gib)
    ]


def play(
    policy: str,
    jobs: Iterable[Submitted],
    gpus: Sequence[SimulatedGpu],
    components: Iterable[ComponentSpec],
    nodes: Iterable[SimulatedNode] = (),
) -> VirtualCluster[Core]:
    """The scene, played to its end; the workers are up before the first job comes."""
    core, memory = POLICIES[policy].make(gpus, components)
    cluster = VirtualCluster(core, gpus, nodes, memory)
    cluster.start(components)
    jobs = list(jobs)
    for submitted in jobs:
        cluster.post(submitted)
    cluster.run()
    assert len(cluster.outcomes) == len(jobs)
    return cluster


def order(cluster: VirtualCluster[Core]) -> list[str]:
    """Jobs with their workers, as they began."""
    began = sorted(enumerate(cluster.runs), key=lambda found: (found[1].started_at, found[1].worker_id, found[0]))
    return [f"{run.job_id} {run.worker_id}" for _, run in began]
