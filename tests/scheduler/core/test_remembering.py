"""What limits, shares and estimates depend on survives the core, in its recorded form, and counts once."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import Stage, UserId
from modelpool.scheduler.core.invariants import validate
from modelpool.scheduler.core.remembering import memory_of
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import LossCause, Remembered
from modelpool.scheduler.model.node_groups import AutoscalingConfig, NodeGroup
from modelpool.scheduler.model.pool_memory import (
    PoolMemory,
    RememberedGangs,
    RememberedGroup,
    RememberedPatches,
    RememberedRuns,
    RememberedSize,
    RememberedUser,
    learned_only,
)
from modelpool.scheduler.simulator.record.event_log import entry_line, read_entries
from modelpool.scheduler.simulator.record.plain_values import plain, read
from tests.scheduler.autoscaling.scaled import Scaled, jobs_of

GROUP = NodeGroup("small", gpu_bytes=24 * GIB, max_nodes=4, price_per_hour=3600.0, start_seconds=100.0)

seconds = st.floats(0.01, 1e6)
ratios = st.lists(seconds, min_size=1, max_size=7).map(tuple)
memories = st.builds(
    PoolMemory,
    spent=seconds,
    cost_per_hour=st.just(0.0),
    deadlines_met=st.integers(0, 9),
    deadlines_missed=st.integers(0, 9),
    users=st.lists(
        st.builds(RememberedUser, st.sampled_from([UserId("ann"), UserId("bob")]), seconds, seconds, seconds),
        unique_by=lambda user: user.user,
    ).map(tuple),
    groups=st.tuples(
        st.builds(
            RememberedGroup,
            st.just("small"),
            ratios,
            st.integers(1, 3),
            st.integers(0, 1),
            st.one_of(st.none(), seconds),
            st.just("no machines"),
        )
    ),
    runs=st.tuples(
        st.builds(
            RememberedRuns,
            st.just(Stage.SAMPLE),
            st.just(("a", "b")),
            st.just("H100"),
            ratios,
            st.tuples(
                st.builds(RememberedSize, st.just(20), st.just(1), ratios),
                st.builds(RememberedSize, st.just(20), st.just(4), ratios),
            ),
        )
    ),
    gangs=st.tuples(
        st.builds(
            RememberedGangs,
            st.just(Stage.SAMPLE),
            st.just(("a", "b")),
            st.just("H100"),
            st.just(20),
            st.sampled_from([2, 4]),
            ratios,
        )
    ),
    patches=st.tuples(st.builds(RememberedPatches, st.just("H100"), ratios.filter(lambda found: min(found) > 0.1))),
)


def state_with_groups(limits: AutoscalingConfig | None = None) -> SchedulerState:
    return SchedulerState(SchedulerConfig(groups=(GROUP,), autoscaling=limits or AutoscalingConfig()))


def written_and_read(memory: PoolMemory) -> PoolMemory:
    found: PoolMemory = read(PoolMemory, json.loads(json.dumps(plain(memory))))
    return found


@given(memories)
def test_a_core_remembers_all_of_the_memory_of_the_one_before(memory: PoolMemory) -> None:
    state = state_with_groups()
    (entry,) = read_entries([entry_line(Remembered(5.0, written_and_read(memory)), ())])
    state.handle(entry.event)
    validate(state)
    again = memory_of(state, 5.0)
    assert sorted(again.users, key=lambda user: user.user) == sorted(memory.users, key=lambda user: user.user)
    assert (again.spent, again.deadlines_met, again.deadlines_missed) == (
        memory.spent,
        memory.deadlines_met,
        memory.deadlines_missed,
    )
    assert (again.runs, again.patches, again.gangs) == (memory.runs, memory.patches, memory.gangs)
    (group,), (before,) = again.groups, memory.groups
    assert (group.starts, group.failures, group.crashes, group.reason) == (
        before.starts,
        before.failures,
        before.crashes,
        before.reason,
    )
    if before.blocked_seconds is None:
        assert group.blocked_seconds is None
    else:
        assert group.blocked_seconds is not None
        assert math.isclose(group.blocked_seconds, before.blocked_seconds, abs_tol=1e-6)
    learned = learned_only(memory)
    assert (learned.spent, learned.users, learned.deadlines_met) == (0.0, (), 0)
    assert learned.gangs == memory.gangs
    assert learned.groups == (RememberedGroup("small", before.starts),)


def test_max_cost_counts_what_earlier_controllers_spent_and_what_nodes_cost_meanwhile() -> None:
    """Each controller could spend `max_cost` again."""
    limits = AutoscalingConfig(max_cost=1000.0)
    spent = []
    for memory, gap_seconds in ((None, 0.0), (PoolMemory(spent=990.0), 0.0), (PoolMemory(900.0, 3600.0), 95.0)):
        scaled = Scaled([GROUP], limits)
        if memory is not None:
            scaled.cluster.post(Remembered(0.0, memory, gap_seconds))
        scaled.run(jobs_of([1.0] * 5))
        assert scaled.core.state.autoscaler is not None
        spent.append(scaled.core.state.autoscaler.spent)
        assert (scaled.most_nodes > 0) == (memory is None)
    assert spent[0] < 1000.0
    assert spent[1:] == [990.0, 995.0]


def test_a_group_that_backs_off_is_not_tried_by_the_next_controller_before_its_time() -> None:
    first = state_with_groups()
    assert first.autoscaler is not None
    for at in (0.0, 100.0):
        first.autoscaler.groups["small"].start_failed(at, f"{LossCause.NO_NODE.value}", False, 3)
    second = state_with_groups()
    second.handle(Remembered(7.0, written_and_read(memory_of(first, 110.0)), 20.0))
    assert second.autoscaler is not None
    record = second.autoscaler.groups["small"]
    assert (record.failures, record.blocked_until) == (2, 7.0 + (100.0 + 60.0 - 110.0) - 20.0)


def test_what_a_core_has_measured_itself_counts_more() -> None:
    runs = RememberedRuns(Stage.SAMPLE, (), "H100", (2.0,), ())
    state = SchedulerState()
    kind = state.costs.run_kinds.kind(Stage.SAMPLE, ())
    state.costs.run_kinds.learn(kind, "H100", 20, 7.0)
    state.handle(Remembered(1.0, PoolMemory(runs=(runs,))))
    assert kind.ratio == 7.0
