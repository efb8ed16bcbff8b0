"""Files of sources in the prices of placements: on the disk, at another machine, at the source."""

from __future__ import annotations

from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentSpec,
    ComponentUse,
    FileOnDisk,
    JobId,
    JobSpec,
    NodeId,
    Role,
    RunCost,
    RunError,
    RunErrorKind,
    Stage,
    TaskId,
    TaskReport,
    TaskSpec,
    WorkerId,
    WorkerSpec,
)
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import (
    Command,
    ComponentsKnown,
    RunEnded,
    RunTask,
    Submitted,
    WorkersWanted,
    WorkerUp,
)

GB = 10**9
KEYS = [ComponentKey(f"model-{i}") for i in range(2)]


def job(number: int, model: int) -> JobSpec:
    use = ComponentUse(KEYS[model], 0)
    task = TaskSpec(TaskId(f"task-{number}"), Stage.SAMPLE, (use,), GB, 1.0)
    return JobSpec(JobId(f"job-{number}"), (task,), task.task_id)


class Cluster:
    """A core with one worker on each of some machines."""

    def __init__(self, nodes: int, remote: bool, cached: dict[int, tuple[FileOnDisk, ...]] | None = None) -> None:
        self.state = SchedulerState(SchedulerConfig())
        self.at = 0.0
        ids = tuple(WorkerId(f"w{i}") for i in range(nodes))
        self.state.handle(WorkersWanted(0.0, ids))
        specs = tuple(
            ComponentSpec(key, Role.DIFFUSION_MODEL, 5 * GB, 5 * GB, f"file-{key}" if remote else "", 6 * GB * remote)
            for key in KEYS
        )
        self.state.handle(ComponentsKnown(0.0, specs))
        for i, worker_id in enumerate(ids):
            spec = WorkerSpec(
                worker_id, 1, 8 * GB, 1e10, node=NodeId(f"n{i}"), cached_files=(cached or {}).get(i, ()), host_bytes=GB
            )
            self.state.handle(WorkerUp(0.0, spec))

    def submit(self, number: int, model: int) -> RunTask | None:
        self.at += 1.0
        return self._run(self.state.handle(Submitted(self.at, job(number, model))))

    def end(self, command: RunTask, error: RunErrorKind | None = None, **cost: float) -> None:
        self.at += 1.0
        failed = None if error is None else RunError(error, "failed")
        report = TaskReport(
            command.task_id,
            command.attempt,
            command.worker_id,
            command.incarnation,
            Residency(8 * GB),
            RunCost(load_seconds=1.0, run_seconds=1.0, **cost),  # type: ignore[arg-type]
            failed,
        )
        self.state.handle(RunEnded(self.at, report))

    @staticmethod
    def _run(commands: list[Command]) -> RunTask | None:
        return next((command for command in commands if isinstance(command, RunTask)), None)


def test_a_task_goes_to_the_machine_that_has_its_file_on_its_disk() -> None:
    for holder in range(20):
        cluster = Cluster(20, True, {holder: (FileOnDisk(f"file-{KEYS[0]}", 6 * GB),)})
        command = cluster.submit(0, 0)
        assert command is not None
        assert command.worker_id == f"w{holder}", "among many idle workers too"


def test_after_a_fetch_the_same_model_goes_there_again_and_elsewhere_from_that_machine() -> None:
    cluster = Cluster(3, True)
    costs = cluster.state.costs
    first = cluster.submit(0, 0)
    assert first is not None
    cluster.end(first, fetched_bytes=6 * GB, fetch_seconds=20.0)
    assert costs.fetched.holders[f"file-{KEYS[0]}"] == {NodeId("n" + first.worker_id[1:]): None}
    again = cluster.submit(1, 0)
    assert again is not None
    assert again.worker_id == first.worker_id
    busy = cluster.submit(2, 0)
    waiting_or_elsewhere = {None} if busy is None else {busy.worker_id}
    assert first.worker_id not in waiting_or_elsewhere


def test_a_failed_fetch_is_not_on_the_disk_and_what_was_there_stays() -> None:
    cluster = Cluster(1, True)
    fetched = cluster.state.costs.fetched
    command = cluster.submit(0, 0)
    assert command is not None
    assert f"file-{KEYS[0]}" in fetched.holders
    cluster.end(command, RunErrorKind.BAD_INPUT)
    assert f"file-{KEYS[0]}" not in fetched.holders
    warm = Cluster(1, True, {0: (FileOnDisk(f"file-{KEYS[0]}", 6 * GB),)})
    command = warm.submit(0, 0)
    assert command is not None
    warm.end(command, RunErrorKind.BAD_INPUT)
    assert f"file-{KEYS[0]}" in warm.state.costs.fetched.holders


def test_a_pool_without_sources_knows_no_disks() -> None:
    cluster = Cluster(3, False)
    command = cluster.submit(0, 0)
    assert command is not None
    cluster.end(command)
    fetched = cluster.state.costs.fetched
    assert (len(fetched.sets), len(fetched.disks), len(fetched.holders)) == (0, 0, 0)
