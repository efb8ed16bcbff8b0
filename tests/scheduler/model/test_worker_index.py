"""The index of workers against a look at all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.specs.spec import NodeId, WorkerId, WorkerSpec
from modelpool.pool.weights.plan.eviction_plan import Residency, Resident
from modelpool.scheduler.model.worker_index import WorkerIndex
from modelpool.scheduler.model.workers import Worker, WorkerState
from tests.scheduler.world import DRAW, PAINT, TEXT

STEPS = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.sampled_from(["gone", "idle", "busy", "busy for who knows how long"]),
        st.sets(st.sampled_from([TEXT, PAINT, DRAW])),
        st.integers(0, 3),
        st.integers(10, 11),
    ),
    max_size=40,
)


@given(STEPS)
def test_it_says_what_a_look_at_every_worker_says(steps) -> None:
    where = WorkerIndex()
    workers = [Worker(WorkerId(f"w{n}"), 1, spec=spec_of(n)) for n in range(5)]
    usable: set[Worker] = set()
    for number, becomes, holds, end, capacity_bytes in steps:
        worker = workers[number]
        entries = tuple(Resident(component, 1) for component in sorted(holds))
        worker.update_residency(None if becomes == "gone" else Residency(capacity_bytes, entries))
        worker.status = WorkerState.BUSY if becomes.startswith("busy") else WorkerState.IDLE
        worker.expected_end = float(end) if becomes == "busy" else None
        where.note(worker, becomes != "gone")
        usable = usable - {worker} if becomes == "gone" else usable | {worker}

        idle = {w for w in usable if w.is_idle}
        assert set(where.idle_workers()) == idle
        for most in range(3):
            assert where.some_idle(most + 1) == list(where.idle_workers())[: most + 1]
        assert (where.count, where.idle_count, where.busy_count) == (len(usable), len(idle), len(usable - idle))
        assert where.capacities == tuple(sorted({w.capacity_bytes for w in usable}))
        assert where.largest_idle_bytes == max((w.capacity_bytes for w in idle), default=0)
        assert where.are_similar == (len({w.capacity_bytes for w in usable}) < 2)
        known = [(w.expected_end, w.worker_id) for w in usable - idle if w.expected_end is not None]
        assert [entry[:2] for entry in where.busy] == sorted(known)
        for component in (TEXT, PAINT, DRAW):
            holders = {w for w in usable if component in w.entries}
            assert set(where.holders.get(component, ())) == holders
            found = where.idle_holders(component, 2)
            assert len(found) == min(2, len(holders & idle))
            assert set(found) <= holders & idle
        on_node = {w for w in usable if w.spec is not None and w.spec.node == "n"}
        assert set(where.on_node.get(NodeId("n"), ())) == on_node


def test_what_takes_the_place_of_another_component_is_noted() -> None:
    where, worker = WorkerIndex(), Worker(WorkerId("w"), 1, WorkerState.IDLE)
    for component in (TEXT, PAINT):
        worker.update_residency(Residency(10, (Resident(component, 1),)))
        where.note(worker, True)
    assert {component: list(found) for component, found in where.holders.items()} == {PAINT: [worker]}


@pytest.mark.parametrize(
    ("sizes", "devices", "are_similar"),
    [
        ((), (), True),
        ((100, 105, 103), ("card", "card", "card"), True),
        ((100, 106), ("card", "card"), False),
        ((100, 100), ("card", "other"), False),
    ],
)
def test_workers_are_alike_on_one_device_with_memories_that_differ_by_little(sizes, devices, are_similar) -> None:
    """Also once one that is not like them has come and gone."""
    where = WorkerIndex()
    odd = Worker(WorkerId("odd"), 1, WorkerState.IDLE, spec=WorkerSpec(WorkerId("odd"), 1, 999, 1.0, "odd"))
    odd.update_residency(Residency(999))
    for number, (capacity_bytes, device) in enumerate(zip(sizes, devices, strict=True)):
        name = WorkerId(f"w{number}")
        worker = Worker(name, 1, WorkerState.IDLE, spec=WorkerSpec(name, 1, capacity_bytes, 1.0, device))
        worker.update_residency(Residency(capacity_bytes))
        where.note(worker, True)
    assert where.are_similar == are_similar
    where.note(odd, True)
    assert where.are_similar == (not sizes)
    where.note(odd, False)
    assert where.are_similar == are_similar


def spec_of(number: int) -> WorkerSpec:
    """Two of five stand on a machine with a name."""
    node = NodeId("n" if number < 2 else "")
    return WorkerSpec(WorkerId(f"w{number}"), 1, 10 + number % 2, 1.0, "card", node=node)
