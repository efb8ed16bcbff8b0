"""The decision as a function of values: when a node is worth its start, which group, which limit, which node ends."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.core.errors import GIB
from modelpool.scheduler.autoscaling.drain_time import finish_at, merged, shortfalls
from modelpool.scheduler.autoscaling.outlook import (
    DueWork,
    Fleet,
    FleetNode,
    GiveUpNode,
    GroupOutlook,
    PendingWork,
    RequestNodes,
    WaitingWork,
)
from modelpool.scheduler.autoscaling.recent_work import RecentWork, WorkSlot
from modelpool.scheduler.autoscaling.steady_arrivals import SteadyArrivals
from modelpool.scheduler.autoscaling.wanted import wanted
from modelpool.scheduler.model.node_groups import AutoscalingConfig, NodeGroup
from modelpool.scheduler.model.scaling_record import ScalingRule

GROUP = NodeGroup("a", gpu_bytes=24 * GIB, max_nodes=10, price_per_hour=2.0)
OUTLOOK = GroupOutlook(GROUP, 24.0 * GIB, start_seconds=100.0, load_bytes_per_second=1e9)
AT = 1000.0
#: long enough for every rule that looks back
CALM = (RecentWork(24.0 * GIB, tuple(WorkSlot(10.0 * n, 10.0, 0.0, 0.0) for n in range(100)), 10.0),)


def work(seconds: float, due: float = inf, arriving: float = 0.0) -> PendingWork:
    level = WaitingWork(24.0 * GIB, 10, seconds, 1e9, 10.0, arriving)
    return PendingWork((level,), () if due == inf else (DueWork(due, seconds),), seconds if due == inf else 0.0)


def node(name: str = "n", **changes: object) -> FleetNode:
    made = FleetNode(name, "a", 1, 24.0 * GIB, 1.0, AT, reload_seconds=2.0)
    return replace(made, **changes)  # type: ignore[arg-type]


def requested(decisions: tuple[RequestNodes | GiveUpNode, ...]) -> int:
    return sum(one.nodes for one in decisions if isinstance(one, RequestNodes))


def test_a_node_is_requested_if_its_part_of_the_work_lasts_longer_than_its_start_and_load() -> None:
    """One node works; the new one comes after 101 s. Shared, the work must last 202 s: 202 + 101 GPU-seconds."""
    for seconds, count in ((302.0, 0), (304.0, 1)):
        assert requested(wanted(work(seconds), [OUTLOOK], Fleet((node(),)), AT)) == count
    assert requested(wanted(work(1.0), [OUTLOOK], Fleet(), AT)) == 1
    assert requested(wanted(PendingWork(), [OUTLOOK], Fleet(), AT)) == 0


def test_work_that_keeps_coming_counts_for_the_time_of_a_start() -> None:
    fleet = Fleet((node(),))
    assert requested(wanted(work(200.0), [OUTLOOK], fleet, AT)) == 0
    assert requested(wanted(work(200.0, arriving=2.0), [OUTLOOK], fleet, AT)) > 0


def test_a_deadline_requests_the_fewest_nodes_and_only_if_it_would_be_missed() -> None:
    """Until the deadline in 1,101 s a new node works for 1,000 s; the work counts 1.25 times."""
    for seconds, count in ((1600.0, 2), (1601.0, 3)):
        assert requested(wanted(work(seconds, AT + 1101.0), [OUTLOOK], Fleet(), AT)) == count
    assert requested(wanted(work(800.0, AT + 1101.0), [OUTLOOK], Fleet((node(),)), AT)) == 0


def test_a_node_counts_with_all_its_gpus_until_its_last_worker_has_ended() -> None:
    pair = replace(OUTLOOK, group=replace(GROUP, gpus_per_node=2))
    for last_worker in (node(gpus=1, is_leaving=True), node(gpus=1)):
        for most, count in ((3, 0), (4, 1)):
            fleet, limits = Fleet((last_worker,)), AutoscalingConfig(max_gpus=most)
            assert requested(wanted(work(2000.0), [pair], fleet, AT, limits)) == count, (last_worker, most)


def test_a_draining_or_leaving_or_overdue_node_counts_for_nothing() -> None:
    for gone in (node(ends_at=AT + 60.0), node(is_leaving=True)):
        assert requested(wanted(work(50.0), [OUTLOOK], Fleet((gone,)), AT)) == 1
    other = replace(OUTLOOK, group=replace(GROUP, name="b", price_per_hour=9.0))
    overdue = node(is_starting=True, is_overdue=True)
    (decision,) = wanted(work(50.0), [OUTLOOK, other], Fleet((overdue,)), AT)
    assert isinstance(decision, RequestNodes)
    assert (decision.group, dict(decision.why.others)["a"]) == ("b", "a start is overdue")


def test_every_limit_holds_and_is_named() -> None:
    other = replace(OUTLOOK, group=replace(GROUP, name="dear", price_per_hour=50.0, max_nodes=0))
    for limits, count, words in (
        (AutoscalingConfig(), 10, "max_nodes"),
        (AutoscalingConfig(max_gpus=3), 3, "max_nodes"),
        (AutoscalingConfig(max_cost_per_hour=9.0), 4, "max_nodes"),
        (AutoscalingConfig(max_cost=1.0), 5, "max_nodes"),
    ):
        decisions = wanted(work(1e6), [OUTLOOK, other], Fleet(), AT, limits)
        assert requested(decisions) == count
        assert words in dict(decisions[0].why.others)["dear"]


def test_an_idle_node_ends_when_idling_cost_as_much_as_restoring_it() -> None:
    for idle_seconds, ends in ((101.0, False), (103.0, True)):
        idle = node(idle_since=AT - idle_seconds, idle_gpus=1)
        found = wanted(PendingWork(), [OUTLOOK], Fleet((idle,)), AT)
        assert [one.why.rule for one in found] == [ScalingRule.IDLE] * ends
        for kept in (replace(idle, is_kept=True), replace(idle, is_leaving=True)):
            assert wanted(PendingWork(), [OUTLOOK], Fleet((kept,)), AT) == ()
        least = replace(OUTLOOK, group=replace(GROUP, min_nodes=1))
        assert wanted(PendingWork(), [least], Fleet((idle,)), AT) == ()


def test_the_least_valuable_node_of_the_dearest_group_ends_first() -> None:
    dear = replace(OUTLOOK, group=replace(GROUP, name="dear", price_per_hour=9.0))
    idle = {"idle_since": AT - 50.0, "idle_gpus": 1}
    nodes = (
        node("valuable", value_seconds=5.0, **idle),
        node("plain", value_seconds=1.0, **idle),
        node("dear", group="dear", value_seconds=9.0, **idle),
    )
    busy = (RecentWork(24.0 * GIB, tuple(WorkSlot(10.0 * n, 10.0, 0.0, 4.0) for n in range(100)), 10.0),)
    found = wanted(PendingWork(), [OUTLOOK, dear], Fleet(nodes, recent=busy), AT)
    assert [one.node for one in found if isinstance(one, GiveUpNode)] == ["dear", "plain"]
    found = wanted(PendingWork(), [OUTLOOK, dear], Fleet(nodes, recent=CALM), AT)
    assert [one.node for one in found if isinstance(one, GiveUpNode)] == ["dear", "plain", "valuable"]


def test_the_end_of_the_budget_ends_every_node() -> None:
    fleet = Fleet((node("a"), node("b", idle_gpus=1)), spent=99.0)
    for max_cost, is_hard in ((99.1, False), (99.001, True)):
        found = wanted(work(1e5), [OUTLOOK], fleet, AT, AutoscalingConfig(max_cost=max_cost))
        assert [(one.node, one.is_hard) for one in found if isinstance(one, GiveUpNode)] == [
            ("a", is_hard),
            ("b", is_hard),
        ]


def test_the_end_of_the_budget_leaves_nodes_that_cost_nothing() -> None:
    """They were given up, and requested again for `min_nodes`."""
    free = replace(OUTLOOK, group=replace(GROUP, name="free", price_per_hour=0.0, min_nodes=1))
    fleet = Fleet((node("a"), node("b", group="free")), spent=99.0)
    found = wanted(PendingWork(), [OUTLOOK, free], fleet, AT, AutoscalingConfig(max_cost=99.01))
    assert [one.node for one in found if isinstance(one, GiveUpNode)] == ["a"]


def worked_off(ascending: list[tuple[float, float]], until: float) -> float:
    """GPU-seconds that the servers work off until then."""
    return sum(capacity * (until - free_at) for free_at, capacity in ascending if free_at < until)


SERVERS = st.lists(st.tuples(st.floats(0.0, 500.0), st.floats(0.1, 8.0)), min_size=1, max_size=6).map(sorted)


@given(SERVERS, st.floats(0.0, 1e5), st.tuples(st.floats(0.0, 500.0), st.floats(0.1, 8.0)))
def test_the_end_of_the_work_is_when_as_much_is_worked_off_and_one_more_never_ends_later(
    servers: list[tuple[float, float]], seconds: float, more: tuple[float, float]
) -> None:
    end = finish_at(servers, seconds)
    assert abs(worked_off(servers, end) - seconds) <= 1e-6 * max(1.0, seconds)
    assert finish_at(merged(servers, more), seconds) <= end + 1e-6 * max(1.0, end)
    assert finish_at([], seconds) == inf


@given(SERVERS, st.lists(st.tuples(st.floats(1.0, 2000.0), st.floats(0.1, 3000.0)), max_size=5).map(sorted))
def test_a_deadline_is_missed_exactly_if_the_work_due_by_then_ends_later(
    servers: list[tuple[float, float]], due: list[tuple[float, float]]
) -> None:
    missed = dict(shortfalls(servers, due))
    total = 0.0
    for place, (deadline, seconds) in enumerate(due):
        total += seconds
        if place + 1 < len(due) and due[place + 1][0] == deadline:
            continue
        slack = worked_off(servers, deadline) - total
        if abs(slack) > 1e-6 * max(1.0, total):
            assert (deadline in missed) == (slack < 0.0)


@given(st.lists(st.floats(0.0, 100.0), min_size=3, max_size=30), st.floats(0.0, 50.0), st.floats(0.0, 20.0))
def test_the_least_capacity_kept_up_and_a_little_less_did_not(
    arrived: list[float], waiting: float, tolerated: float
) -> None:
    recent = RecentWork(
        0.0,
        tuple(WorkSlot(10.0 * n, 10.0, waiting if n == 0 else 0.0, one) for n, one in enumerate(arrived)),
        tolerated,
    )
    least = recent.least(50.0, 1.0, 0.0)
    assert least < inf
    assert recent.kept_up(least, 0.0)
    assert least == 0.0 or not recent.kept_up(least - 0.1, 0.0)
    assert not recent.kept_up(50.0, -1.0)


def test_a_burst_is_no_rate_and_steady_work_is() -> None:
    steady, burst = SteadyArrivals(10.0), SteadyArrivals(10.0)
    for n in range(1, 13):
        rate = steady.note(10.0 * n, [20.0])
        assert burst.note(10.0 * n, [1000.0 if n == 6 else 0.0]) == [0.0]
    assert rate == [2.0]


def test_work_that_cheaper_nodes_end_a_little_later_is_theirs_as_far_as_the_tolerance_says() -> None:
    """Nodes at twice the price were requested because the cheaper ones would come seconds later: 73% more money for
    work that ended 5% sooner. One node works for 400 s; a dear one more ends that in 250 s, a cheap one in 290 s."""
    cheap = replace(OUTLOOK, start_seconds=179.0)
    dear = replace(OUTLOOK, group=replace(GROUP, name="b", price_per_hour=4.0))

    def groups(tolerance: float, work_seconds: float = 400.0, cheap: GroupOutlook = cheap) -> list[tuple[str, int]]:
        limits = AutoscalingConfig(delay_tolerance=tolerance)
        decisions = wanted(work(work_seconds), [cheap, dear], Fleet((node(),)), AT, limits)
        return [(one.group, one.nodes) for one in decisions if isinstance(one, RequestNodes)]

    assert groups(0.0) == groups(0.15) == [("b", 1)]
    assert groups(0.17) == groups(0.25) == [("a", 1)]
    assert groups(1.0) == [("a", 1)]
    # 3 cheap nodes are worth it for more work, and then 7 dear ones that come sooner: 6 cheap ones end it in time, too
    assert groups(0.3, 1000.0) == [("a", 3), ("a", 6)]
    assert groups(0.0, 1000.0) == [("a", 3), ("b", 7)]
    late = replace(cheap, start_seconds=1000.0)
    assert groups(0.25, cheap=late) == [("b", 1)], "the work would be over before they come"
    assert groups(0.25, cheap=replace(cheap, blocked_until=AT + 1.0)) == [("b", 1)]
    short = replace(cheap, group=replace(GROUP, max_nodes=0))
    assert groups(0.25, cheap=short) == [("b", 1)]


def test_cordoned_nodes_are_neither_capacity_nor_given_up() -> None:
    """Nor are they bought again for the minimum: they exist."""
    busy = work(350.0)
    one, two = node("one"), node("two")
    assert requested(wanted(busy, [OUTLOOK], Fleet((one, two)), AT)) == 0
    cordoned = replace(two, is_cordoned=True, gpus=0)
    assert requested(wanted(busy, [OUTLOOK], Fleet((one, cordoned)), AT)) == 1
    idle = replace(cordoned, idle_since=0.0)
    assert wanted(PendingWork(), [OUTLOOK], Fleet((idle,), recent=CALM), AT) == ()
    kept = replace(OUTLOOK, group=replace(GROUP, min_nodes=1))
    assert wanted(PendingWork(), [kept], Fleet((idle,), recent=CALM), AT) == ()
    drained = replace(cordoned, ends_at=AT + 60.0)
    assert requested(wanted(PendingWork(), [kept], Fleet((drained,), recent=CALM), AT)) == 1


def test_no_more_nodes_are_given_up_than_disruption_limits_allow() -> None:
    idle = tuple(node(f"n{number}", idle_since=0.0, idle_gpus=1) for number in range(4))
    for may_end, count in ((None, 4), (0, 0), (1, 1), (3, 3)):
        given_up = wanted(PendingWork(), [OUTLOOK], Fleet(idle, recent=CALM, may_end=may_end), AT)
        assert len(given_up) == count, f"{may_end}: {given_up}"
    starting = tuple(replace(one, is_starting=True) for one in idle)
    assert len(wanted(PendingWork(), [OUTLOOK], Fleet(starting, recent=CALM, may_end=0), AT)) == 4, "nobody's loss"


def test_groups_of_a_set_have_one_minimum_and_maximum_and_back_off_alone() -> None:
    cheap = replace(GROUP, name="cheap", part_of="set", min_nodes=2, max_nodes=3, price_per_hour=1.0)
    dear = replace(cheap, name="dear", price_per_hour=3.0)
    outlooks = [replace(OUTLOOK, group=dear), replace(OUTLOOK, group=cheap)]

    def counts(fleet: Fleet, backlog: PendingWork | None = None, cheap_until: float = 0.0) -> dict[str, int]:
        tried = [outlooks[0], replace(outlooks[1], blocked_until=cheap_until, reason="out of stock")]
        found: dict[str, int] = {}
        for one in wanted(backlog or PendingWork(), tried, fleet, AT):
            if isinstance(one, RequestNodes):
                found[one.group] = found.get(one.group, 0) + one.nodes
        return found

    assert counts(Fleet()) == {"cheap": 2}
    assert counts(Fleet(), cheap_until=AT + 60.0) == {"dear": 2}, "the other zone has no capacity"
    assert counts(Fleet((node("one", group="dear"),))) == {"cheap": 1}
    much = work(100_000.0)
    assert counts(Fleet(), much) == {"cheap": 3}
    full = Fleet((node("one", group="dear"), node("two", group="dear"), node("three", group="cheap")))
    assert counts(full, much) == {}, "max_nodes of all together"
    idle = [node(name, group="dear", idle_since=0.0, idle_gpus=1) for name in ("one", "two", "three")]
    given_up = wanted(PendingWork(), outlooks, Fleet(tuple(idle), recent=CALM), AT)
    assert len(given_up) == 1, "two stay"
