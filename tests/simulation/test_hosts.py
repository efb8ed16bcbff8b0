"""The memory and the disks that GPUs of one machine share.

Proves: a file that one GPU brought in costs another no reading; reads of two GPUs share the disks; memory is bounded
and the longest unused leaves; fetched weights are there when they are needed, are counted like everything that comes
from disks, and give way to reads of runs; who needs a file that is on its way waits for it; a stopped fetch has
brought what its seconds bought; a GPU with no machine named is as fast as its link allows; adapters are read when they
are patched in, and when not, not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentSpec,
    JobId,
    JobSpec,
    NodeId,
    Role,
    TaskId,
    TaskSpec,
    WorkerId,
)
from modelpool.scheduler.model.messages import Command, Event, StopTask, Submitted, Tick
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.hosts import FileRead, Host, SimulatedNode, StorageReads
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.metrics import figures
from tests.simulation.scripted import Scripted, Step, component, task

NODE = NodeId("box")
A, B, LORA = component("a/d", 10), component("b/d", 10), component("a/lora", 6, Role.LORA)


def simulate(
    steps: Mapping[str, Sequence[Step]],
    tasks: Sequence[TaskSpec],
    components: Sequence[ComponentSpec] = (A, B, LORA),
    host_bytes: int = 100,
    capacity_bytes: int = 100,
    node: NodeId = NODE,
) -> VirtualCluster[Scripted]:
    """GPUs up at 0 on a machine with disks of 1 byte a second; their links carry 10."""
    gpus = [SimulatedGpu(WorkerId(name), capacity_bytes, 10.0, start_seconds=0.0, node=node) for name in steps]
    cluster = VirtualCluster(Scripted(steps), gpus, [SimulatedNode(NODE, host_bytes, 1.0)], patch_switch_seconds=0.5)
    cluster.post(Submitted(0.0, JobSpec(JobId("job"), tuple(tasks), tasks[-1].task_id)))
    cluster.start(components)
    cluster.run()
    return cluster


def loads(cluster: VirtualCluster[Scripted]) -> list[tuple[str, float, int]]:
    """Task, seconds of its load, bytes from storage."""
    return [(run.task_id, run.load_seconds, run.storage_bytes) for run in cluster.runs]


def test_the_second_gpu_finds_the_file_in_memory() -> None:
    """The first reads 10 bytes at 1 a second; what arrives over the link meanwhile costs nothing more."""
    steps = {"g0": [Step("t0")], "g1": [Step("t1"), Step("t2")]}
    tasks = [task("t0", "a/d"), task("t1", "b/d", seconds=30.0), task("t2", "a/d")]
    assert loads(simulate(steps, tasks)) == [("t0", 10.0, 10), ("t1", 20.0, 10), ("t2", 1.0, 0)]


def test_a_gpu_of_its_own_reads_as_fast_as_its_link() -> None:
    steps = {"g0": [Step("t0")], "g1": [Step("t1")]}
    tasks = [task("t0", "a/d"), task("t1", "b/d")]
    assert loads(simulate(steps, tasks, node=NodeId(""))) == [("t0", 1.0, 10), ("t1", 1.0, 10)]


def test_memory_that_is_too_small_forgets_the_longest_unused() -> None:
    steps = {"g0": [Step("t0"), Step("t1"), Step("t2"), Step("t3")]}
    tasks = [task("t0", "a/d"), task("t1", "b/d"), task("t2", "a/d"), task("t3", "b/d")]
    cluster = simulate(steps, tasks, host_bytes=15, capacity_bytes=10)
    # t1 left 5 bytes of a; t2 reads the 5 that are missing, and leaves 5 of b
    assert loads(cluster) == [("t0", 10.0, 10), ("t1", 10.0, 10), ("t2", 5.0, 5), ("t3", 5.0, 5)]
    assert cluster.totals.storage_bytes == 30


def test_what_is_fetched_ahead_is_there() -> None:
    """While t0 computes for 10 s the disks bring in b; without that t1 would load for 10 s."""
    tasks = [task("t0", "a/d"), task("t1", "b/d")]
    ahead = simulate({"g0": [Step("t0", prefetch=("b/d",)), Step("t1")]}, tasks)
    assert loads(ahead) == [("t0", 10.0, 10), ("t1", 1.0, 0)]
    without = simulate({"g0": [Step("t0"), Step("t1")]}, tasks)
    assert loads(without) == [("t0", 10.0, 10), ("t1", 10.0, 10)]


def test_what_is_fetched_ahead_is_counted() -> None:
    """Found in a review: bytes and LoRAs that were fetched ahead were in no figure."""
    tasks = [task("t0", "a/d"), task("t1", "a/d", adapters=["a/lora"], patched_bytes=5)]
    cluster = simulate({"g0": [Step("t0", prefetch=("a/lora",)), Step("t1")]}, tasks)
    assert [run.storage_bytes for run in cluster.runs] == [10, 0]
    assert [run.adapters_loaded for run in cluster.runs] == [(), ()]
    assert (cluster.storage.bytes, cluster.storage.ahead_bytes) == (16, 6)
    found = figures(cluster)
    assert (found.storage_bytes, found.ahead_bytes, found.adapters_loaded) == (16, 6, 1)


def test_a_lora_that_is_half_fetched_is_one_load() -> None:
    tasks = [task("t0", "a/d", seconds=4.0), task("t1", "a/d", adapters=["a/lora"], patched_bytes=5)]
    cluster = simulate({"g0": [Step("t0", prefetch=("a/lora",)), Step("t1")]}, tasks)
    assert cluster.storage == StorageReads(16, 4, {"a/d": 1, "a/lora": 1})
    assert figures(cluster).adapters_loaded == 1


def test_a_file_on_its_way_is_waited_for() -> None:
    """Found in a review: it counted as cached from when somebody began to read it. g1 begins 4 s after g0, needs the
    same 10 bytes, has none of them read, and has them when g0 does; g2 needs 6, and has these sooner."""
    host = Host(100, 1.0)
    first = host.read(0.0, WorkerId("g0"), {A.key: FileRead(10, 10)}, {})
    second = host.read(4.0, WorkerId("g1"), {A.key: FileRead(10, 10)}, {})
    part = host.read(4.0, WorkerId("g2"), {A.key: FileRead(6, 10)}, {})
    assert (first.loaded_at, first.missing, first.waited_bytes) == (10.0, {A.key: 10}, 0)
    assert (second.loaded_at, second.missing, second.waited_bytes) == (10.0, {}, 6)
    assert (part.loaded_at, part.waited_bytes) == (6.0, 2)
    assert host.read(10.0, WorkerId("g3"), {A.key: FileRead(10, 10)}, {}).loaded_at == 10.0
    assert host.reads(10.0) == StorageReads(10, 0, {A.key: 1})


def test_two_gpus_that_load_one_file_at_once_both_wait_for_the_disk() -> None:
    steps = {"g0": [Step("t0")], "g1": [Step("t1")]}
    assert loads(simulate(steps, [task("t0", "a/d"), task("t1", "a/d")])) == [("t0", 10.0, 10), ("t1", 10.0, 0)]


def test_a_read_that_somebody_waits_for_goes_on_when_its_own_run_is_stopped() -> None:
    host = Host(100, 1.0)
    host.read(0.0, WorkerId("g0"), {A.key: FileRead(10, 10)}, {})
    host.read(4.0, WorkerId("g1"), {A.key: FileRead(10, 10)}, {})
    assert host.stop(5.0, WorkerId("g0")) == {}
    assert host.reads(5.0).bytes == 10


def test_a_stopped_read_leaves_what_it_has_read() -> None:
    """4 of 10 bytes, and nothing of the file behind it; to go on with the first is no second load."""
    host = Host(100, 1.0)
    host.read(0.0, WorkerId("g0"), {A.key: FileRead(10, 10), B.key: FileRead(10, 10)}, {})
    assert host.stop(4.0, WorkerId("g0")) == {A.key: 6, B.key: 10}
    assert host.cached == {A.key: 4}
    assert host.reads(4.0).bytes == 4
    again = host.read(4.0, WorkerId("g1"), {A.key: FileRead(10, 10), B.key: FileRead(10, 10)}, {})
    assert (again.missing, again.loaded_at) == ({A.key: 6, B.key: 10}, 20.0)
    assert host.reads(20.0) == StorageReads(20, 0, {A.key: 1, B.key: 1})


def test_a_file_larger_than_the_memory_is_read_whole_each_time() -> None:
    """Found in a review: only what did not fit was read again. It takes the room of all others, too."""
    host = Host(8, 1.0)
    host.read(0.0, WorkerId("g"), {LORA.key: FileRead(6, 6)}, {})
    for now in (10.0, 30.0):
        assert host.read(now, WorkerId("g"), {A.key: FileRead(10, 10)}, {}).missing == {A.key: 10}
    assert host.read(50.0, WorkerId("g"), {A.key: FileRead(2, 10)}, {}).missing == {A.key: 2}
    assert host.read(60.0, WorkerId("g"), {LORA.key: FileRead(6, 6)}, {}).missing == {LORA.key: 6}
    host.fetch(70.0, [(A.key, 10)])
    assert host.reads(99.0).ahead_bytes == 0, "it would be gone before it is needed"


class Stopping(Scripted):
    """Stops what runs on g0 at every tick."""

    def handle(self, event: Event) -> list[Command]:
        if isinstance(event, Tick):
            step = self.steps["g0"][self.done[WorkerId("g0")] - 1]
            return [StopTask(WorkerId("g0"), 1, TaskId(name), 0) for name in (step.task, *step.batch_mates)]
        return super().handle(event)


@pytest.mark.parametrize("batch_mates", [(), ("t2",)])
def test_a_run_that_is_stopped_has_moved_what_its_seconds_bought(batch_mates: tuple[str, ...]) -> None:
    """Found in a review: everything counted as moved from the beginning, for no seconds. Stopped at 4 of 10 s of
    loading, alone or with its mate at once; the next run uploads the other 6 bytes."""
    steps = {"g0": [Step("t0", batch_mates), Step("t1")]}
    tasks = [task(name, "a/d") for name in ("t0", "t1", "t2")]
    gpus = [SimulatedGpu(WorkerId("g0"), 100, 10.0, start_seconds=0.0, node=NODE)]
    cluster = VirtualCluster(Stopping(steps), gpus, [SimulatedNode(NODE, 100, 1.0)])
    cluster.post(Submitted(0.0, JobSpec(JobId("job"), tuple(tasks), tasks[-1].task_id)))
    cluster.start([A])
    cluster.post(Tick(4.0))
    cluster.run()
    *stopped, last = cluster.runs
    assert sum(run.load_seconds for run in stopped) == 4.0
    assert sum(run.uploaded_bytes for run in stopped) == sum(run.storage_bytes for run in stopped) == 4
    assert (last.started_at, last.uploaded_bytes) == (4.0, 6)
    assert last.load_seconds == last.storage_bytes > 0
    assert cluster.storage.bytes == 4 + last.storage_bytes
    assert cluster.totals.uploaded_bytes == 10
    assert cluster.core.ended[len(stopped) - 1].report.residency.used_bytes == 4


def test_what_is_half_fetched_counts_half() -> None:
    tasks = [task("t0", "a/d", seconds=4.0), task("t1", "b/d")]
    assert loads(simulate({"g0": [Step("t0", prefetch=("b/d",)), Step("t1")]}, tasks))[1] == ("t1", 6.0, 6)


def test_fetching_ahead_gives_way_to_runs() -> None:
    """g1 reads b from 0 to 20 (behind a); only then is c fetched, and g0 finds 2 bytes of it at 22."""
    c = component("c/d", 10)
    steps = {"g0": [Step("t0", prefetch=("c/d",)), Step("t2")], "g1": [Step("t1")]}
    tasks = [task("t0", "a/d", seconds=12.0), task("t1", "b/d", seconds=1.0), task("t2", "c/d")]
    assert loads(simulate(steps, tasks, [A, B, c]))[-1] == ("t2", 8.0, 8)


def test_adapters_are_read_where_weights_get_their_patches() -> None:
    """With the weights (16 bytes), not again while they stay patched, from memory after other patches."""
    names = [("t0", ["a/lora"]), ("t1", ["a/lora"]), ("t2", []), ("t3", ["a/lora"])]
    tasks = [task(name, "a/d", adapters=loras, patched_bytes=5 if loras else 0) for name, loras in names]
    cluster = simulate({"g0": [Step(name) for name, _ in names]}, tasks)
    # a switch costs half a second and the 5 bytes that were or get patched
    assert loads(cluster) == [("t0", 16.0, 16), ("t1", 0.0, 0), ("t2", 1.0, 0), ("t3", 1.0, 0)]
    assert [run.adapters_loaded for run in cluster.runs] == [("a/lora",), (), (), ()]
    assert [run.adapters for run in cluster.runs] == [("a/lora",), ("a/lora",), (), ("a/lora",)]
    assert cluster.totals.adapters_loaded == 1


def test_streamed_weights_are_read_once_and_while_the_run_goes_on() -> None:
    """4 of 10 bytes stream in 3 passes: 1.2 s of link, 4 s of disk."""
    cluster = simulate({"g0": [Step("t0"), Step("t1")]}, [task("t0", "a/d", passes=3), task("t1", "a/d", passes=3)],
                       capacity_bytes=6)  # fmt: skip
    assert [(run.load_seconds, run.run_seconds) for run in cluster.runs] == [(6.0, 14.0), (0.0, pytest.approx(11.2))]
    assert [run.storage_bytes for run in cluster.runs] == [10, 0]


def test_a_lost_worker_leaves_the_files_in_memory() -> None:
    steps = {"g0": [Step("t0")], "g1": [Step("t1"), Step("t2")]}
    tasks = [task("t0", "a/d"), task("t1", "b/d"), task("t2", "a/d")]
    gpus = [SimulatedGpu(WorkerId(name), 100, 10.0, start_seconds=0.0, node=NODE) for name in steps]
    cluster = VirtualCluster(Scripted(steps), gpus, [SimulatedNode(NODE, 100, 1.0)])
    cluster.post(Submitted(0.0, JobSpec(JobId("job"), tuple(tasks), tasks[-1].task_id)))
    cluster.start([A, B])
    cluster.lose(WorkerId("g0"), 12.0)
    cluster.run()
    lost, _, last = cluster.runs
    assert (lost.ended_well, lost.ended_at, lost.load_seconds, lost.run_seconds) == (False, 12.0, 10.0, 2.0)
    assert (last.task_id, last.storage_bytes) == ("t2", 0)


def test_names_of_machines_are_checked() -> None:
    gpu = SimulatedGpu(WorkerId("g0"), 10, 1.0, node=NodeId("nowhere"))
    with pytest.raises(UnusableField, match="nowhere"):
        VirtualCluster(Scripted({}), [gpu], [SimulatedNode(NODE, 1, 1.0)])
    with pytest.raises(UnusableField, match="g0"):
        VirtualCluster(Scripted({}), [SimulatedGpu(WorkerId("g0"), 10, 1.0)] * 2)
    with pytest.raises(UnusableField, match="storage_bytes_per_second"):
        SimulatedNode(NODE, 1, 0.0)


FILES = {ComponentKey(name): size for name, size in zip("abcd", (3, 7, 12, 20), strict=True)}


@given(
    st.integers(1, 40),
    st.lists(
        st.tuples(
            st.booleans(),
            st.lists(st.sampled_from(sorted(FILES)), min_size=1, max_size=3, unique=True),
            st.floats(0.0, 9.0),
        ),
        max_size=25,
    ),
)
def test_memory_is_never_overfull_and_no_file_larger_than_itself(
    host_bytes: int, steps: list[tuple[bool, list[ComponentKey], float]]
) -> None:
    """Whatever is read and fetched ahead, whenever; and what was just read whole and fits misses nothing."""
    host, now, asked_bytes = Host(host_bytes, 1.0), 0.0, 0
    for is_read, keys, seconds in steps:
        now += seconds
        if is_read:
            reads = {key: FileRead(FILES[key], FILES[key]) for key in keys}
            missing = host.read(now, WorkerId("w"), reads, {}).missing
            assert all(0 < size <= FILES[key] for key, size in missing.items())
            asked_bytes += sum(missing.values())
            if sum(FILES[key] for key in keys) <= host_bytes:
                assert not host.read(now, WorkerId("w"), reads, {}).missing
            else:
                # nothing of a file that is larger than the memory is ever found
                assert all(missing.get(key) == FILES[key] for key in keys if FILES[key] > host_bytes)
        else:
            host.fetch(now, [(key, FILES[key]) for key in keys])
        assert sum(host.cached.values()) <= host_bytes
        assert all(0 < size <= FILES[key] for key, size in host.cached.items())
        found = host.reads(now)
        assert found.bytes - found.ahead_bytes == asked_bytes
        assert found.bytes <= sum(FILES[key] * count for key, count in found.loads.items())
