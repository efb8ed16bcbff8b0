"""The belief about a GPU is the last report, however the belief is kept."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.specs.spec import ComponentKey, WorkerId
from modelpool.pool.weights.plan.eviction_plan import Residency, Resident
from modelpool.scheduler.model.workers import Worker

ENTRIES = st.builds(
    Resident,
    st.sampled_from([ComponentKey(name) for name in "abcd"]),
    st.integers(1, 2),
    st.sampled_from(["", "x"]),
    st.integers(0, 1),
)
RESIDENCIES = st.builds(
    Residency,
    st.sampled_from([32, 64]),
    st.lists(ENTRIES, max_size=4, unique_by=lambda entry: entry.component).map(tuple),
)


def test_the_same_in_another_order_changes_no_prediction() -> None:
    worker = Worker(WorkerId("a"), 1)
    first, second = Resident(ComponentKey("a"), 1), Resident(ComponentKey("b"), 2)
    worker.update_residency(Residency(32, (first, second)))
    version = worker.version
    worker.update_residency(Residency(32, (replace(second), replace(first))))
    assert list(worker.entries.values()) == [second, first]
    assert worker.version == version


@given(st.lists(st.one_of(st.none(), RESIDENCIES), max_size=8), st.data())
def test_a_worker_is_believed_to_hold_what_was_said_last(said, data) -> None:
    """Entries in order, bytes, and a version that grows exactly when entries or capacity are not what they were."""
    worker = Worker(WorkerId("a"), 1)
    for residency in said:
        if residency is not None and data.draw(st.booleans()):  # as a report has it: equal, and other objects
            residency = replace(residency, entries=tuple(replace(entry) for entry in residency.entries))
        before = (dict(worker.entries), worker.capacity_bytes, worker.version)
        worker.update_residency(residency)
        assert worker.residency == residency
        entries = () if residency is None else residency.entries
        assert tuple(worker.entries.values()) == entries
        assert tuple(worker.entries) == tuple(entry.component for entry in entries)
        assert worker.used_bytes == sum(entry.resident_bytes for entry in entries)
        if residency is not None:
            assert worker.capacity_bytes == residency.capacity_bytes
            changed = (worker.entries, worker.capacity_bytes) != before[:2]
            assert (worker.version > before[2]) == changed
