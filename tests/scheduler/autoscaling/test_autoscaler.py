"""The number of nodes in virtual time: from zero and back, limits, stock-outs, losses, deadlines, no flapping, replay.

Proves for any demands, joins, losses, notices and stock-outs that no limit is ever exceeded, that every job ends, that
no node is requested for work that a node given up could have done, and that a replay of the events repeats every
decision.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelpool.pool.values.core.errors import GIB, UnusableField
from modelpool.pool.values.specs.spec import NodeId, RunErrorKind, WorkerId, WorkerSpec
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.core.invariants import validate
from modelpool.scheduler.core.scaling_preview import preview
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import (
    ComponentsKnown,
    Cordoned,
    DisruptionsAllowed,
    EndWorker,
    LossCause,
    NodeDraining,
    Outcome,
    PinComponents,
    ScheduleTick,
    StartFailed,
    StartWorker,
    Submitted,
    Tick,
    WorkerDown,
    WorkersWanted,
    WorkerUp,
)
from modelpool.scheduler.model.node_groups import AutoscalingConfig, NodeGroup
from modelpool.scheduler.model.scaling_record import ScalingRule
from modelpool.scheduler.simulator.node_supply import Reclaim, SupplyConditions
from modelpool.scheduler.simulator.record.event_log import LogHeader, entry_line, header_line, read_entries, read_header
from tests.scheduler.autoscaling.scaled import LARGE, SMALL, Scaled, jobs_of

SMALL_NODES = NodeGroup("small", gpu_bytes=24 * GIB, max_nodes=4, price_per_hour=1.0, start_seconds=100.0)
LARGE_NODES = NodeGroup("large", gpu_bytes=80 * GIB, max_nodes=2, price_per_hour=4.0, start_seconds=150.0)


def outcomes(scaled: Scaled) -> set[Outcome]:
    return set(scaled.cluster.outcomes.values())


def test_a_burst_takes_the_pool_from_zero_to_several_nodes_and_back() -> None:
    scaled = Scaled([SMALL_NODES], validated=True)
    scaled.run(jobs_of([5.0] * 60))
    assert outcomes(scaled) == {Outcome.SUCCEEDED}
    assert 1 < scaled.most_nodes <= 4
    assert scaled.nodes_left == {}
    assert scaled.decisions[0].rule is ScalingRule.NO_WORKER
    assert sum(why.nodes for why in scaled.decisions) == 0


def test_one_image_takes_one_node_and_the_wait_is_its_start() -> None:
    scaled = Scaled([SMALL_NODES], validated=True)
    scaled.run(jobs_of([5.0]))
    (latency,) = scaled.cluster.latency_seconds.values()
    assert scaled.most_nodes == 1
    assert latency < SMALL_NODES.start_seconds + 20.0


def test_nodes_of_one_group_are_requested_and_ended_with_all_their_workers() -> None:
    group = NodeGroup("node", gpu_bytes=24 * GIB, gpus_per_node=4, max_nodes=3, price_per_hour=4.0, start_seconds=60.0)
    scaled = Scaled([group], validated=True)
    scaled.run(jobs_of([0.0] * 200))
    started = [c for _, commands in scaled.core.log for c in commands if isinstance(c, StartWorker)]
    assert [c.worker_id for c in started] == [f"node-{n}" for n in range(len(started))]
    assert len(started) == 4 * len(scaled.supply.nodes)
    assert {c.group for c in started} == {"node"}
    assert sum(c.why is not None for c in started) == len(scaled.supply.nodes)
    ended = [c for _, commands in scaled.core.log for c in commands if isinstance(c, EndWorker)]
    assert sorted(c.worker_id for c in ended) == sorted(c.worker_id for c in started)
    assert all(c.why is not None for c in ended)


def test_min_nodes_start_without_work_and_stay() -> None:
    group = NodeGroup("kept", gpu_bytes=24 * GIB, min_nodes=2, max_nodes=4, price_per_hour=1.0, start_seconds=30.0)
    scaled = Scaled([group], validated=True)
    scaled.run(jobs_of([1000.0] * 100))
    assert scaled.nodes_left == {"kept": 2}
    assert scaled.decisions[0].rule is ScalingRule.MINIMUM


def test_the_cheapest_group_with_the_memory_is_requested() -> None:
    small_work = Scaled([LARGE_NODES, SMALL_NODES], validated=True)
    small_work.run(jobs_of([0.0] * 3))
    assert {node.group.name for node in small_work.supply.nodes} == {"small"}
    large_work = Scaled([LARGE_NODES, SMALL_NODES], validated=True)
    large_work.run(jobs_of([0.0] * 3, LARGE))
    assert {node.group.name for node in large_work.supply.nodes} == {"large"}
    assert outcomes(large_work) == {Outcome.SUCCEEDED}
    (request, *_) = large_work.decisions
    assert ("small", "too little memory") in request.others


def test_work_for_a_larger_gpu_is_not_rejected_while_only_small_ones_are_up() -> None:
    """Was rejected as too large for the largest worker."""
    scaled = Scaled([SMALL_NODES, LARGE_NODES], validated=True)
    scaled.run([*jobs_of([0.0] * 2), *jobs_of([300.0], LARGE, "late")])
    assert outcomes(scaled) == {Outcome.SUCCEEDED}


def test_work_that_no_group_could_run_is_rejected_at_once() -> None:
    scaled = Scaled([SMALL_NODES], validated=True)
    scaled.run(jobs_of([0.0], LARGE))
    (error,) = scaled.cluster.errors.values()
    assert error.kind is RunErrorKind.BAD_INPUT
    assert "a node of small has most" in error.message
    assert scaled.supply.nodes == []


def test_a_group_of_unknown_memory_is_tried_and_then_known() -> None:
    group = NodeGroup("unknown", max_nodes=2, start_seconds=60.0)
    scaled = Scaled([group], validated=True)
    scaled.run(jobs_of([0.0], LARGE))
    (error,) = scaled.cluster.errors.values()
    assert error.kind is RunErrorKind.BAD_INPUT
    assert len(scaled.supply.nodes) == 1
    assert scaled.nodes_left == {}


def test_a_stock_out_leads_to_another_group_and_backs_off() -> None:
    cheap = NodeGroup("cheap", gpu_bytes=24 * GIB, max_nodes=4, price_per_hour=0.5, spot=True, start_seconds=60.0)
    for timeout_seconds, reason in ((100.0, "backing off for 30 s: no node of cheap"), (900.0, "a start is overdue")):
        conditions = SupplyConditions(
            is_in_stock=lambda group, at: group.name != "cheap", timeout_seconds=timeout_seconds
        )
        scaled = Scaled([cheap, SMALL_NODES], conditions=conditions, validated=True)
        scaled.run(jobs_of([0.0] * 10))
        assert outcomes(scaled) == {Outcome.SUCCEEDED}
        assert {node.group.name for node in scaled.supply.nodes} == {"small"}
        chosen = next(why for why in scaled.decisions if why.group == "small" and why.nodes > 0)
        assert dict(chosen.others)["cheap"].startswith(reason)
        assert chosen.at < 200.0


def test_back_off_doubles_until_a_start_succeeds() -> None:
    conditions = SupplyConditions(is_in_stock=lambda group, at: at > 3000.0, timeout_seconds=100.0)
    scaled = Scaled([SMALL_NODES], conditions=conditions)
    scaled.run(jobs_of([0.0]))
    assert outcomes(scaled) == {Outcome.SUCCEEDED}
    tries = [why.at for why in scaled.decisions if why.nodes > 0]
    delays = [later - earlier - 100.0 for earlier, later in pairwise(tries)]
    assert len(delays) >= 4
    assert all(later > 1.4 * earlier for earlier, later in pairwise(delays[:4]))


def test_a_group_whose_process_never_starts_is_given_up_and_jobs_fail_with_the_reason() -> None:
    scaled = Scaled([SMALL_NODES])
    scaled.cluster.start(())
    scaled.cluster._disturbances = type(scaled.cluster._disturbances)(start_fails=lambda command: True)
    scaled.run(jobs_of([0.0]))
    (error,) = scaled.cluster.errors.values()
    assert "no group can start one (small: 5 starts failed in a row" in error.message
    assert scaled.nodes_left == {}


def test_a_deadline_gets_the_fewest_nodes_that_meet_it() -> None:
    group = NodeGroup("many", gpu_bytes=24 * GIB, max_nodes=50, price_per_hour=1.0, start_seconds=100.0)
    relaxed, hurried = Scaled([group]), Scaled([group])
    relaxed.run(jobs_of([0.0] * 300, within=4000.0))
    hurried.run(jobs_of([0.0] * 300, within=1000.0))
    for scaled, within in ((relaxed, 4000.0), (hurried, 1000.0)):
        assert max(scaled.cluster.latency_seconds.values()) <= within
        assert scaled.decisions[0].rule is ScalingRule.DEADLINE
    # 300 images take 3,000 GPU-seconds
    assert relaxed.most_nodes <= 2
    assert 4 <= hurried.most_nodes <= 7
    assert relaxed.supply.cost(relaxed.cluster.now) < hurried.supply.cost(hurried.cluster.now)


def test_a_deadline_that_no_node_can_meet_is_treated_as_work_without_one() -> None:
    scaled = Scaled([SMALL_NODES], validated=True)
    scaled.run(jobs_of([0.0] * 3, within=20.0))
    assert outcomes(scaled) == {Outcome.SUCCEEDED}


def test_the_total_cost_is_never_exceeded_and_what_cannot_be_paid_fails_with_the_reason() -> None:
    limits = AutoscalingConfig(max_cost=0.5)
    scaled = Scaled([SMALL_NODES], limits)
    scaled.run(jobs_of([0.0] * 400))  # 4,000 GPU-seconds cost 1.11
    assert outcomes(scaled) == {Outcome.SUCCEEDED, Outcome.FAILED}
    (message,) = {error.message for error in scaled.cluster.errors.values()}
    assert message.endswith("of max_cost 0.5 is spent)")
    assert scaled.supply.cost(scaled.cluster.now) > 0.3
    assert scaled.nodes_left == {}


def test_work_that_only_another_group_can_run_gets_a_place_within_the_limits() -> None:
    """Small work that never ends does not keep large work waiting for ever."""
    scaled = Scaled([SMALL_NODES, LARGE_NODES], AutoscalingConfig(max_gpus=2))
    scaled.run([*jobs_of([0.0] * 300), *jobs_of([500.0], LARGE, "rare")])
    assert outcomes(scaled) == {Outcome.SUCCEEDED}
    place = next(why for why in scaled.decisions if why.rule is ScalingRule.ROOM)
    request = next(why for why in scaled.decisions if why.group == "large" and why.nodes > 0)
    assert 500.0 <= place.at < request.at < 550.0


def test_bursts_do_not_make_the_pool_flap() -> None:
    scaled = Scaled([SMALL_NODES])
    scaled.run(jobs_of(sorted(60.0 * n + i for n in range(60) for i in range(8))))
    requested = [why for why in scaled.decisions if why.nodes > 0]
    assert sum(why.nodes for why in requested) <= 4
    assert outcomes(scaled) == {Outcome.SUCCEEDED}


def test_a_lost_node_is_replaced_only_if_work_is_worth_it() -> None:
    conditions = SupplyConditions(reclaim=lambda group, number: Reclaim(200.0) if number == 0 else None)
    busy, idle = (Scaled([SMALL_NODES], conditions=conditions, validated=True) for _ in range(2))
    busy.run(jobs_of([0.0] * 30))
    idle.run(jobs_of([0.0] * 2))
    assert len(busy.supply.nodes) == 2
    assert len(idle.supply.nodes) == 1
    assert outcomes(busy) == outcomes(idle) == {Outcome.SUCCEEDED}


def test_a_worker_that_was_taken_over_measures_no_start() -> None:
    """A new controller requests its nodes again; what earlier ones left answers at once."""
    group = replace(SMALL_NODES, min_nodes=2, max_nodes=2)
    state = SchedulerState(SchedulerConfig(groups=(group,)))
    first, second = [c for c in state.handle(Tick(0.0)) if isinstance(c, StartWorker)]
    autoscaler = state.autoscaler
    assert autoscaler is not None
    for command, residency in ((first, Residency(24 * GIB)), (second, None)):
        spec = WorkerSpec(command.worker_id, 1, 24 * GIB, 1e9, node=NodeId(command.worker_id))
        assert autoscaler.groups["small"].start_seconds == group.start_seconds
        state.handle(WorkerUp(0.5, spec, residency))
    assert autoscaler.groups["small"].start_seconds == 0.5


def test_the_minimum_is_kept_when_the_only_node_is_drained() -> None:
    """The node may not be requested while the drained one exists; nothing looked again when that had ended."""
    group = replace(SMALL_NODES, min_nodes=1, max_nodes=1, start_seconds=5.0)
    for seconds in (10.0, 60.0, 400.0):
        conditions = SupplyConditions(
            reclaim=lambda group, number, seconds=seconds: Reclaim(seconds, 60.0) if number == 0 else None
        )
        scaled = Scaled([group], conditions=conditions)
        scaled.run(jobs_of([0.0, 1.0]))
        assert outcomes(scaled) == {Outcome.SUCCEEDED}, seconds
        assert scaled.nodes_left == {group.name: 1}, seconds


def test_a_node_whose_workers_come_up_one_after_the_other_is_one_node() -> None:
    """The evaluation between the two found an idle node more than `min_nodes`, and gave up the worker that started."""
    group = NodeGroup("pair", gpu_bytes=24 * GIB, gpus_per_node=2, min_nodes=1, price_per_hour=1.0, start_seconds=5.0)
    scaled = Scaled([group])
    scaled.run(jobs_of([791.0]))
    assert [(why.nodes, why.rule) for why in scaled.decisions] == [(1, ScalingRule.MINIMUM)]
    assert outcomes(scaled) == {Outcome.SUCCEEDED}


def test_the_start_time_of_a_group_is_learned() -> None:
    conditions = SupplyConditions(start_seconds=lambda group, number: 400.0)
    scaled = Scaled([SMALL_NODES], conditions=conditions)
    scaled.run(jobs_of([0.0] * 3))
    assert scaled.core.state.autoscaler is not None
    assert scaled.core.state.autoscaler.groups["small"].start_seconds == pytest.approx(400.0)


def test_nodes_with_pinned_components_are_requested_and_stay_until_they_are_unpinned() -> None:
    keys = tuple(spec.key for spec in SMALL.components)
    for unpin_at, left in ((None, {"small": 2}), (4000.0, {})):
        scaled = Scaled([SMALL_NODES])
        scaled.cluster.post(PinComponents(2.0, keys, 2))
        if unpin_at is not None:
            scaled.cluster.post(PinComponents(unpin_at, keys, 0))
        scaled.run(jobs_of([400.0, 400.0, 400.0, 400.0]))
        assert scaled.decisions[0].rule is ScalingRule.PINNED
        assert len(scaled.supply.nodes) == 2
        assert scaled.nodes_left == left
        assert outcomes(scaled) == {Outcome.SUCCEEDED}


def test_no_evaluation_happens_without_groups() -> None:
    assert SchedulerState().autoscaler is None


# ---- any demands and any provider ------------------------------------------------------------------------------------

GROUP = st.builds(
    NodeGroup,
    name=st.sampled_from(["a", "b", "c"]),
    gpu_bytes=st.sampled_from([24 * GIB, 80 * GIB]),
    gpus_per_node=st.integers(1, 3),
    min_nodes=st.integers(0, 1),
    max_nodes=st.integers(1, 3),
    price_per_hour=st.sampled_from([0.0, 1.0, 3.0]),
    start_seconds=st.sampled_from([5.0, 60.0, 200.0]),
)
DEMANDS = st.lists(
    st.tuples(
        st.integers(0, 2000), st.integers(1, 12), st.booleans(), st.sampled_from([math.inf, 100.0, 600.0, 3000.0])
    ),
    min_size=1,
    max_size=4,
)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Scaled, list[Submitted]]:
    groups = draw(st.lists(GROUP, min_size=1, max_size=3, unique_by=lambda group: group.name))
    least_gpus = sum(group.min_nodes * group.gpus_per_node for group in groups)
    least_cost = sum(group.min_nodes * group.price_per_hour for group in groups)
    limits = AutoscalingConfig(
        max_gpus=draw(st.none() | st.integers(least_gpus + 3, least_gpus + 6)),
        max_cost_per_hour=draw(st.none() | st.floats(least_cost + 3.0, least_cost + 9.0)),
        max_cost=draw(st.none() | st.floats(0.2, 5.0)),
        wait_seconds=draw(st.sampled_from([0.0, 10.0])),
    )
    starts = draw(st.lists(st.floats(0.5, 3.0), min_size=1, max_size=4))
    losses = draw(
        st.lists(st.none() | st.builds(Reclaim, st.floats(10.0, 2000.0), st.sampled_from([0.0, 60.0])), max_size=3)
    )
    outage = draw(st.tuples(st.floats(0.0, 1000.0), st.floats(0.0, 1500.0)))
    conditions = SupplyConditions(
        start_seconds=lambda group, number: group.start_seconds * starts[number % len(starts)],
        is_in_stock=lambda group, at: not outage[0] <= at < outage[0] + outage[1],
        reclaim=lambda group, number: losses[number] if number < len(losses) else None,
        timeout_seconds=draw(st.sampled_from([100.0, 400.0])),
    )
    can_large = any(group.gpu_bytes > 60 * GIB for group in groups)
    jobs: list[Submitted] = []
    for place, (at, count, is_large, within) in enumerate(draw(DEMANDS)):
        model = {"model": LARGE} if is_large and can_large else {}
        jobs += jobs_of([float(at)] * count, name=f"demand-{place}", within=within, **model)
    jobs.sort(key=lambda job: job.at)
    return Scaled(groups, limits, conditions), jobs


@settings(max_examples=12, deadline=None)
@given(worlds())
def test_limits_hold_and_every_job_ends_whatever_happens(world: tuple[Scaled, list[Submitted]]) -> None:
    scaled, jobs = world
    scaled.run(jobs)
    assert len(scaled.cluster.outcomes) == len(jobs)
    if scaled.limits.max_cost is None:
        # nodes are lost at most three times: no task is lost often enough to be given up
        assert outcomes(scaled) == {Outcome.SUCCEEDED}, next(iter(scaled.cluster.errors.values()))
        left = {group.name: group.min_nodes for group in scaled.groups if group.min_nodes}
        assert scaled.nodes_left == left
    _no_flapping(scaled)


def test_no_node_is_requested_for_the_last_minutes_of_max_cost() -> None:
    """Before: both were given up when the rest paid for two minutes of both, and one was requested again for it."""
    kinds = (("b", 60.0), ("c", 5.0))
    groups = [
        NodeGroup(name, gpu_bytes=24 * GIB, min_nodes=1, max_nodes=2, price_per_hour=1.0, start_seconds=seconds)
        for name, seconds in kinds
    ]
    scaled = Scaled(groups, AutoscalingConfig(max_cost=1.0))
    scaled.run(jobs_of([0.0, 0.0]))
    rules = [(why.rule, why.nodes) for why in scaled.decisions]
    (end, *_) = [place for place, (rule, _) in enumerate(rules) if rule is ScalingRule.BUDGET]
    assert all(nodes < 0 for _, nodes in rules[end:])


def _no_flapping(scaled: Scaled) -> None:
    """Between giving up a node that nothing was wrong with and requesting one of the same group there is a reason: new
    work, or a node lost, not started, or overdue; or the money of other nodes that were given up at its end."""
    kinds = (Submitted, WorkerDown, StartFailed, NodeDraining)
    causes = [event.at for event, _ in scaled.core.log if isinstance(event, kinds)]
    given_up: dict[str, float] = {}
    for why in scaled.decisions:
        if why.nodes < 0 and why.rule in (ScalingRule.IDLE, ScalingRule.SURPLUS):
            given_up[why.group] = why.at
        elif why.rule is ScalingRule.BUDGET:
            given_up.clear()
        elif why.nodes > 0 and why.group in given_up:
            since = given_up[why.group]
            is_overdue = any("overdue" in reason for _, reason in why.others)
            found = is_overdue or any(since <= at <= why.at for at in causes)
            assert found, f"{why.words} at {why.at}, given up at {since}"


@settings(max_examples=4, deadline=None)
@given(worlds())
def test_a_replay_from_the_event_log_repeats_every_decision(world: tuple[Scaled, list[Submitted]]) -> None:
    scaled, jobs = world
    scaled.run(jobs)
    header = read_header(header_line(LogHeader(scaled.core.state.config)))
    again = SchedulerState(header.config)
    lines = [entry_line(event, commands) for event, commands in scaled.core.log]
    for entry in read_entries(lines):
        assert tuple(again.handle(entry.event)) == entry.commands
    assert again.autoscaler is not None
    assert scaled.core.state.autoscaler is not None
    assert list(again.autoscaler.decisions) == list(scaled.core.state.autoscaler.decisions)
    assert again.autoscaler.spent == scaled.core.state.autoscaler.spent


def test_a_start_that_was_withdrawn_is_no_failure() -> None:
    """Its workers end before they are up, and their late introduction is answered by their end."""
    state = Scaled([SMALL_NODES]).core.state
    assert state.autoscaler is not None
    unknown = StartFailed(5.0, SMALL_NODES.worker_id(7), 1, "late", LossCause.NODE_LOST)
    assert state.handle(unknown) == []
    (tick,) = state.handle(NodeDraining(6.0, NodeId("gone"), 60.0))
    assert isinstance(tick, ScheduleTick)


def test_a_cordoned_node_is_replaced_for_work_and_kept_and_a_drained_one_leaves() -> None:
    """The pool does not give up a node that an operator looks at; and buys no other one without work."""
    scaled = Scaled([SMALL_NODES], validated=True)
    scaled.cluster.post(Cordoned(300.0, worker_id=WorkerId("small-0")))
    scaled.run(jobs_of([0.0] * 10 + [400.0] * 40))
    assert outcomes(scaled) == {Outcome.SUCCEEDED}
    assert scaled.nodes_left == {"small": 1}, "the cordoned one"
    worker = scaled.core.state.worker_table.workers[WorkerId("small-0")]
    assert worker.cordon is not None
    assert worker.spec is not None
    before = len(scaled.decisions)
    scaled.cluster.post(Cordoned(scaled.cluster.now + 1.0, worker.spec.node, deadline=scaled.cluster.now + 60.0))
    scaled.cluster.run(lambda core: validate(core.state))
    assert scaled.nodes_left == {}
    assert len(scaled.decisions) == before, "nothing is bought in its place"


def test_nothing_is_given_up_outside_of_maintenance_windows() -> None:
    scaled = Scaled([SMALL_NODES], validated=True)
    scaled.cluster.post(DisruptionsAllowed(0.0, "it is Monday"))
    scaled.cluster.post(DisruptionsAllowed(5000.0, ""))
    scaled.run(jobs_of([5.0] * 60))
    assert outcomes(scaled) == {Outcome.SUCCEEDED}
    assert scaled.most_nodes > 1
    ends = [why.at for why in scaled.decisions if why.nodes < 0]
    assert ends
    assert min(ends) >= 5000.0
    assert scaled.nodes_left == {}


def test_idle_nodes_end_once_a_reclaimed_one_no_longer_counts_as_unavailable() -> None:
    """A notice counts for a while after its deadline. Nothing looked again when it was forgotten: the other nodes cost
    money until the next job."""
    for seconds in (150.0, 250.0, 300.0):
        conditions = SupplyConditions(
            reclaim=lambda group, number, seconds=seconds: Reclaim(seconds, 60.0) if number == 0 else None
        )
        scaled = Scaled([SMALL_NODES], conditions=conditions, validated=True, most_unavailable=1)
        scaled.run(jobs_of([5.0] * 60))
        assert outcomes(scaled) == {Outcome.SUCCEEDED}, seconds
        assert scaled.most_nodes > 1, seconds
        assert scaled.nodes_left == {}, seconds


def test_the_preview_says_what_the_next_evaluation_does_and_changes_nothing() -> None:
    """Asked after every event, the decisions are the same as without; a preview at a decision is that decision."""
    plain, asked = Scaled([SMALL_NODES, LARGE_NODES]), Scaled([SMALL_NODES, LARGE_NODES])
    plain.run(jobs_of([5.0 * number for number in range(80)]))
    previews: list[tuple[float, tuple[int, ...]]] = []
    handle = asked.core.handle

    def ask_too(event):  # type: ignore[no-untyped-def]
        scaler = asked.core.state.autoscaler
        assert scaler is not None
        previews.append((event.at, tuple(group.change for group in scaler.preview(max(event.at, 0.0)).groups)))
        return handle(event)

    asked.core.handle = ask_too  # type: ignore[method-assign]
    asked.run(jobs_of([5.0 * number for number in range(80)]))
    assert asked.decisions == plain.decisions
    assert any(change for _, changes in previews for change in changes)


def test_other_groups_can_be_tried_on_a_pool_without_any() -> None:
    state = SchedulerState()
    state.handle(ComponentsKnown(0.0, SMALL.components))
    with pytest.raises(UnusableField, match="this pool has no groups of nodes"):
        preview(state, 0.0)
    found = preview(state, 0.0, (SMALL_NODES,))
    assert (found.waiting, found.groups[0].change, found.groups[0].why) == ((), 0, ("nothing waits",))
    state.handle(WorkersWanted(0.0, (WorkerId("gpu-0"),)))
    state.handle(WorkerUp(1.0, WorkerSpec(WorkerId("gpu-0"), 1, 24 * GIB, 10e9, "GPU", NodeId("n"))))
    for job in jobs_of([2.0] * 200):
        state.handle(job)
    found = preview(state, 3.0, (SMALL_NODES, replace(LARGE_NODES, max_nodes=0)))
    assert found.groups[0].change > 0
    assert "requested" in found.groups[0].why[0]
    assert found.groups[1].change == 0
    assert found.end_seconds is not None
    assert found.end_seconds > 1000.0
    assert sum(level.tasks for level in found.waiting) > 500
    assert not [worker for worker in state.worker_table.workers.values() if worker.group], "nothing was requested"
    validate(state)
