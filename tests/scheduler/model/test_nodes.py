"""Beliefs about a machine's memory are assumed at placement, and corrected by what workers had to read."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.specs.spec import ComponentKey, NodeId, WorkerId, WorkerSpec
from modelpool.scheduler.model.nodes import Node, Nodes, Reads

MIB = 1 << 20
A, B, C, D = (ComponentKey(name) for name in "abcd")


def node_with(limit_mib: float = inf, *held: tuple[ComponentKey, int]) -> Node:
    """A machine with room for so much, which holds these files, all confirmed."""
    node = Node(NodeId("n"), reported_bytes=limit_mib * MIB, limit_bytes=limit_mib * MIB)
    for key, mib in held:
        node.confirm(node.expect(((key, mib * MIB),)), mib * MIB)
    return node


def reads(*wanted: tuple[ComponentKey, int]) -> Reads:
    return tuple((key, mib * MIB) for key, mib in wanted)


def spec(node: str, host_bytes: int = 0, storage: float = 0.0) -> WorkerSpec:
    return WorkerSpec(
        WorkerId("w"), 1, 64, 1.0, node=NodeId(node), host_bytes=host_bytes, storage_bytes_per_second=storage
    )


def test_what_was_read_once_is_there() -> None:
    node = node_with(100, (A, 10))
    assert node.missing_bytes(reads((A, 10), (B, 5))) == 5 * MIB
    assert node.missing_bytes(reads((A, 12))) == 2 * MIB, "the rest of a file that was read in part"
    assert node.missing_bytes(reads((A, 4))) == 0


def test_the_file_that_was_not_read_for_the_longest_leaves_first() -> None:
    node = node_with(30, (A, 10), (B, 10), (C, 10))
    node.expect(reads((A, 10)))
    node.expect(reads((D, 10)))
    assert list(node.files) == [C, A, D]


def test_a_machine_that_nobody_told_of_keeps_everything() -> None:
    node = node_with(inf, (A, 1 << 20), (B, 1 << 20))
    assert node.missing_bytes(reads((A, 1 << 20))) == 0


def test_predictions_hold_while_no_file_comes_or_goes() -> None:
    node = node_with(100, (A, 10), (B, 10))
    version = node.version
    node.confirm(node.expect(reads((A, 10))), 0)
    assert node.version == version
    node.expect(reads((C, 10)))
    assert node.version > version


def test_files_that_had_to_be_read_again_show_that_the_memory_is_smaller() -> None:
    """Older ones are forgotten, and no more is expected to stay from then on."""
    node = node_with(100, (A, 10), (B, 10), (C, 10), (D, 10))
    node.confirm(node.expect(reads((D, 10))), 10 * MIB)
    assert D in node.files
    assert A not in node.files
    assert node.limit_bytes == 30 * MIB
    node.expect(reads((A, 10)))
    assert node.used_bytes <= 30 * MIB


def test_files_that_were_there_after_all_show_that_it_is_larger_but_not_than_there_is() -> None:
    node = node_with(100, (A, 10), (B, 10))
    node.limit_bytes = 20.0 * MIB
    node.confirm(node.expect(reads((C, 10))), 0)
    assert node.limit_bytes == 30 * MIB
    for _ in range(20):
        node.confirm(node.expect(reads((A, 10))), 0)
        node.confirm(node.expect(reads((D, 30))), 0)
    assert node.limit_bytes <= 100 * MIB


@pytest.mark.parametrize("storage_mib", [0, 10, 20])
def test_who_joins_while_another_brings_a_file_proves_nothing(storage_mib: int) -> None:
    """1. one worker starts to read, 2. another on the machine starts with the same file, 3. the first ends, 4. the
    second ends and has read any part of it: the memory is no smaller for that."""
    node = node_with(100, (A, 10))
    first = node.expect(reads((B, 20)))
    second = node.expect(reads((B, 20)))
    assert second.storage_bytes == 0
    node.confirm(first, 20 * MIB)
    node.confirm(second, storage_mib * MIB)
    assert list(node.files) == [A, B]
    assert node.limit_bytes == 100 * MIB


def test_small_reads_are_libraries_and_directories() -> None:
    node = node_with(100, (A, 10), (B, 10))
    node.confirm(node.expect(reads((B, 10))), MIB)
    assert list(node.files) == [A, B]
    small = node_with(100, (A, 10), (B, 2))
    small.confirm(small.expect(reads((B, 2))), MIB)
    assert list(small.files) == [A, B], "half of a small file is no more than that"


def test_the_speed_of_disks_is_the_median_of_what_was_seen() -> None:
    node = node_with()
    assert node.storage_bytes_per_second == inf
    for speed in (10.0 * MIB, 10.0 * MIB, 1000.0 * MIB, 9.9 * MIB):
        node.learn_storage(speed)
    assert node.storage_bytes_per_second == pytest.approx(10 * MIB, rel=0.02)


def test_workers_of_one_machine_share_it() -> None:
    nodes = Nodes()
    assert nodes.of(None) is None
    assert nodes.of(spec("")) is None
    one = nodes.of(spec("one"))
    assert nodes.of(spec("one", host_bytes=5, storage=7.0)) is one
    assert one is not None
    assert (one.limit_bytes, one.storage_bytes_per_second) == (5, 7.0)


def test_it_is_known_how_many_machines_have_a_file() -> None:
    nodes = Nodes()
    one, other = nodes.of(spec("one", host_bytes=10)), nodes.of(spec("other", host_bytes=10))
    assert one is not None
    assert other is not None
    one.expect(((A, 5),))
    one.expect(((A, 6),))
    other.expect(((A, 5),))
    assert {key: len(found) for key, found in nodes.holders.items()} == {A: 2}
    other.expect(((B, 10),))
    assert {key: len(found) for key, found in nodes.holders.items()} == {A: 1, B: 1}
    one.forget_all()
    assert {key: len(found) for key, found in nodes.holders.items()} == {B: 1}


def test_room_ends_where_a_file_is_that_is_to_stay() -> None:
    node = node_with(50, (A, 10), (B, 10), (C, 10))
    assert node.room_bytes(100 * MIB, ()) == 50 * MIB
    assert node.room_bytes(100 * MIB, {B}) == 30 * MIB
    assert node.room_bytes(100 * MIB, {A}) == 20 * MIB
    node.expect(reads((D, 10)))
    assert node.room_bytes(100 * MIB, {C}) == 30 * MIB
    assert node.room_bytes(100 * MIB, ()) == 40 * MIB, "the last one is just being brought"
    assert node_with(inf, (A, 10)).room_bytes(10, {A}) == inf


def test_a_disk_reads_for_one_after_the_other_and_for_runs_first() -> None:
    """At 10 MiB/s. Reads ahead wait for runs and for what was read ahead before; runs wait for runs only."""
    node = node_with()
    node.storage_bytes_per_second = 10.0 * MIB
    assert node.expect(reads((A, 100)), 1.0).done_at == 11.0
    second = node.expect(reads((B, 50)), 1.0)
    assert (second.wait_seconds, second.done_at) == (10.0, 16.0)
    assert node.expect(reads((C, 20)), 2.0, is_prefetch=True).done_at == 18.0
    assert node.expect(reads((D, 10)), 2.0, is_prefetch=True).done_at == 19.0
    run = node.expect(reads((ComponentKey("e"), 10)), 2.0)
    assert (run.wait_seconds, run.done_at) == (14.0, 17.0)
    assert node.idle_from(2.0) == 19.0


def test_a_machine_that_is_forgotten_has_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelpool.scheduler.model.nodes.MOST_NODES", 1)
    nodes = Nodes()
    one = nodes.of(spec("one"))
    assert one is not None
    one.expect(reads((A, 5)))
    nodes.of(spec("other"))
    assert list(nodes.nodes) == [NodeId("other")]
    assert not nodes.holders


@given(st.lists(st.tuples(st.sampled_from([A, B, C, D]), st.integers(1, 60), st.integers(0, 90)), max_size=30))
def test_bytes_add_up_and_stay_within_the_limit(runs: list[tuple[ComponentKey, int, int]]) -> None:
    """Whatever is read, and whatever workers say of it. A single file may be larger than the memory."""
    node = node_with(100)
    for key, mib, storage_mib in runs:
        expected = node.expect(reads((key, mib)))
        assert key in node.files
        node.confirm(expected, storage_mib * MIB)
        assert node.used_bytes == sum(node.files.values())
        assert 0 < node.limit_bytes <= node.reported_bytes
        assert not node.incoming
    node.expect(reads((A, 1)))
    assert node.used_bytes <= node.limit_bytes or len(node.files) == 1
