"""Read ahead are components that are needed next and nowhere at hand; nothing that is needed sooner leaves for it."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.specs.spec import ComponentKey, NodeId
from modelpool.scheduler.decisions.placement.prefetch import PrefetchNeed, files_to_prefetch, within
from modelpool.scheduler.model.nodes import Node, Reads

MIB = 1 << 20
A, B, C, D, LORA = (ComponentKey(name) for name in ("a", "b", "c", "d", "lora"))


def node_with(limit_mib: float = inf, *held: tuple[ComponentKey, int]) -> Node:
    node = Node(NodeId("n"), reported_bytes=limit_mib * MIB, limit_bytes=limit_mib * MIB)
    for key, mib in held:
        node.confirm(node.expect(reads((key, mib))), mib * MIB)
    return node


def reads(*wanted: tuple[ComponentKey, int]) -> Reads:
    return tuple((key, mib * MIB) for key, mib in wanted)


def needs(*wanted: tuple[ComponentKey, int], own: Sequence[tuple[ComponentKey, int]] = ()) -> PrefetchNeed:
    return PrefetchNeed(reads(*wanted), reads(*own))


def test_the_first_task_that_misses_something_is_prepared_with_all_that_follows() -> None:
    node = node_with(inf, (A, 10))
    groups = [[needs((A, 10))], [needs((A, 10)), needs((B, 5)), needs((C, 2))], [needs((D, 1))]]
    assert files_to_prefetch(node, groups, ()) == reads((B, 5), (C, 2))


def test_where_everything_is_there_nothing_is_told() -> None:
    assert files_to_prefetch(node_with(inf, (A, 10)), [[needs((A, 10))], []], ()) == ()


def test_what_is_at_hand_elsewhere_is_left_there() -> None:
    groups = [[needs((A, 10))], [needs((B, 10))]]
    assert files_to_prefetch(node_with(), groups, (), available={A}) == reads((B, 10))


def test_weights_on_the_own_gpu_are_read_again_for_other_patches() -> None:
    """They are on a GPU, and yet what the patches touch has to come from the file once more."""
    groups = [[needs((A, 10), own=[(LORA, 1)])]]
    assert files_to_prefetch(node_with(), groups, (), here={A}, available={A}) == reads((A, 10), (LORA, 1))


def test_a_lora_is_read_where_its_model_is() -> None:
    groups = [[needs((A, 10), own=[(LORA, 1)])]]
    assert files_to_prefetch(node_with(inf, (A, 10)), groups, (), available={A}) == reads((LORA, 1))
    assert files_to_prefetch(node_with(), groups, ()) == reads((A, 10), (LORA, 1)), "the model comes with it"
    assert files_to_prefetch(node_with(), groups, (), available={A}) == (), "the task is expected where the model is"


def test_a_lora_that_another_machine_has_is_not_read_here() -> None:
    """Its task is expected there. A file that is cold everywhere is read where its model is."""
    groups = [[needs((A, 10), own=[(LORA, 1)])]]
    assert files_to_prefetch(node_with(inf, (A, 10)), groups, (), available={A, LORA}) == ()
    assert files_to_prefetch(node_with(inf, (A, 10)), groups, (), available={A}) == reads((LORA, 1))


def test_only_what_nobody_needs_sooner_leaves() -> None:
    """The oldest files leave first, so the first one that is needed ends what may leave."""
    node = node_with(40, (A, 10), (B, 10), (C, 20))
    assert files_to_prefetch(node, [[needs((D, 10))]], ()) == reads((D, 10))
    assert files_to_prefetch(node, [[needs((D, 10))]], reads((A, 10))) == (), "a run reads it now"
    assert files_to_prefetch(node, [[needs((A, 10))], [needs((D, 10))]], ()) == (), "a task needs it sooner"
    assert files_to_prefetch(node, [[needs((B, 10))], [needs((D, 20))]], ()) == ()
    assert files_to_prefetch(node, [[needs((B, 10))], [needs((D, 10))]], ()) == reads((D, 10))


def test_of_a_group_as_much_is_read_as_there_is_room() -> None:
    node = node_with(20, (A, 10))
    assert files_to_prefetch(node, [[needs((B, 8)), needs((C, 8))]], reads((A, 10))) == reads((B, 8))


def test_what_the_disk_will_have_read_is_taken_to_be_there_and_no_more() -> None:
    node = node_with(inf, (A, 4))
    wanted = reads((A, 10), (B, 10), (C, 10))
    assert within(node, wanted, 100 * MIB) == wanted
    assert within(node, wanted, 6 * MIB) == reads((A, 10))
    assert within(node, wanted, 9 * MIB) == reads((A, 10), (B, 3))


KEYS = st.sampled_from([A, B, C, D])
FILES = st.lists(st.tuples(KEYS, st.integers(1, 30)), max_size=3, unique_by=lambda one: one[0])


@given(st.integers(20, 100), FILES, FILES, st.lists(st.lists(FILES.map(lambda f: needs(*f)), max_size=2), max_size=4))
def test_whatever_is_read_ahead_what_is_needed_sooner_stays(limit, held, now, groups) -> None:
    """Of the files that the running task and the tasks before it in order need, none leaves."""
    node = node_with(limit, *held)
    node.expect(reads(*now))
    sooner = {key for key, _ in now}
    before = set(node.files)
    told = files_to_prefetch(node, groups, reads(*now))
    for group in groups:
        missing = [key for wanted in group for key, size in wanted.shared if key in dict(told)]
        if missing:
            break
        sooner.update(key for wanted in group for key, _ in wanted.shared)
    node.expect(told)
    assert (before & sooner) <= set(node.files)
    assert all(node.files[key] >= size for key, size in told)
