"""Decides how many nodes of each group to request and which to give up. A pure function of values.

Rules, in this order
1. A node is worth requesting when the work that it would take over lasts longer than its start and its cold load: when
   all work, shared with it, would still last twice as long. Work that keeps coming counts for the time of the start.
   Work that no GPU can run is always worth a node.
2. Work with a deadline gets the fewest nodes that meet the deadline, and those at once: fewer nodes for longer pay for
   fewer starts.
3. The group is the one that does the work for the least money, of the groups that have GPUs with the memory and may be
   requested now; for equal prices the one that is done first. Work without a deadline may end a little later on nodes
   that cost less (`delay_tolerance`), even if these start too late to be worth a request of their own.
4. A node is given up once its idle time has cost as much as restoring it would (start and reload: ski rental). Idle
   time moves from node to node, so it is given up too, while GPUs are idle, once the others would have kept up without
   it for as long (`scheduler.autoscaling.recent_work`). The dearest group goes first, of one group the
   node with the least valuable weights. Never in the evaluation that requests nodes, nor if the remaining nodes would
   be half way to requesting one again.
5. `min_nodes`, nodes with pinned components, cordoned nodes, and nodes beyond the disruption limits stay. No limit is
   ever exceeded; before `max_cost` is spent all nodes end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil, floor, inf
from typing import TypeAlias

from modelpool.pool.values.core.errors import counted
from modelpool.scheduler.autoscaling.drain_time import Server, finish_at, merged, servers, shortfalls
from modelpool.scheduler.autoscaling.outlook import (
    Fleet,
    FleetNode,
    GiveUpNode,
    GroupOutlook,
    PendingWork,
    RequestNodes,
    WaitingWork,
)
from modelpool.scheduler.model.node_groups import NO_LIMITS, AutoscalingConfig, NodeGroup, least_of_sets
from modelpool.scheduler.model.scaling_record import ScalingRule, ScalingWhy

#: factor on the GPU-seconds that are due by a deadline, as in `scheduler.decisions.queue.deadlines`. At 1.1, nodes that
# turn out
#: to be missing are requested late, several at once, and are idle afterwards (benchmarks/autoscaling.py)
SAFETY = 1.25
#: part of the time to restore a node that it idles before it is given up. At 1, idling never costs more than twice the
#: best decision in hindsight; work that comes back within that time finds the node
IDLE_PART = 1.0
#: the same, of the time for which the others have kept up without it. At 2, in benchmarks/autoscaling.py, p50 is
#: shorter and the cost a tenth higher, with the same p99
KEPT_UP_PARTS = 1.0
#: seconds of the cost of all nodes that are left when all are given up because of `max_cost`: for runs to end
LAST_RUN_SECONDS = 120.0
#: the same, when their runs are ended too
LAST_SECONDS = 2.0
#: nodes that one evaluation requests at most: the next one follows soon, and knows more
MOST_AT_ONCE = 1024
#: other groups that a record explains
MOST_OTHERS = 4
HOUR = 3600.0

#: a group, how many of its nodes, and why not the others: names and reasons
Choice: TypeAlias = tuple[GroupOutlook, int, tuple[tuple[str, str], ...]]


def wanted(
    backlog: PendingWork,
    groups: Sequence[GroupOutlook],
    fleet: Fleet,
    at: float,
    limits: AutoscalingConfig = NO_LIMITS,
    margin_seconds: float = 0.0,
) -> tuple[RequestNodes | GiveUpNode, ...]:
    """Return the decisions for now, in the order in which they were taken.

    margin_seconds  time before each deadline by which its work should be done
    """
    evaluation = _Evaluation(backlog, groups, fleet, at, limits, margin_seconds)
    if ending := evaluation.end_of_budget():
        return tuple(ending)
    evaluation.request_minimum()
    evaluation.request_pinned()
    for work in reversed(backlog.levels):
        if not evaluation.is_making_room:
            evaluation.meet_deadlines(work)
            evaluation.work_off(work)
    if not evaluation.requests and not evaluation.given_up:
        evaluation.give_up()
    return (*evaluation.requests, *evaluation.given_up)


def obstacles_of(
    groups: Sequence[GroupOutlook], fleet: Fleet, at: float, limits: AutoscalingConfig = NO_LIMITS
) -> dict[str, str]:
    """Return why no node may be requested now, of the groups of which none may."""
    evaluation = _Evaluation(PendingWork(), groups, fleet, at, limits, 0.0)
    rooms = {outlook.group.name: evaluation.room(outlook) for outlook in groups}
    return {name: reason for name, (room, reason) in rooms.items() if not room}


class _Evaluation:
    """One call of `wanted`: its input, and what it has requested so far."""

    def __init__(
        self,
        backlog: PendingWork,
        groups: Sequence[GroupOutlook],
        fleet: Fleet,
        at: float,
        limits: AutoscalingConfig,
        margin_seconds: float,
    ) -> None:
        self.backlog = backlog
        self.groups = {outlook.group.name: outlook for outlook in groups}
        self.fleet = fleet
        self.at = at
        self.limits = limits
        self.margin_seconds = margin_seconds
        self.requests: list[RequestNodes] = []
        self.given_up: list[GiveUpNode] = []
        self.is_making_room = False
        #: nodes that remain, with those requested now
        self.nodes = list(fleet.nodes)
        self.total_seconds = backlog.seconds
        #: the price of all nodes, those that are leaving included
        self.cost_per_hour = sum(self.groups[n.group].group.price_per_hour for n in self.nodes if n.group)
        #: results of `room` until the next request, and nodes by group
        self._rooms: dict[str, tuple[int, str]] = {}
        self._of_group: dict[str, list[FleetNode]] = {}
        for node in self.nodes:
            self._of_group.setdefault(node.group, []).append(node)

    # ---- limits ------------------------------------------------------------------------------------------------------

    def active(self, group: NodeGroup) -> list[FleetNode]:
        """The nodes of the set of a group that stay."""
        return [n for n in self._of_set(group) if not n.is_leaving and n.ends_at == inf]

    def _of_set(self, group: NodeGroup) -> list[FleetNode]:
        """The nodes of all groups of the set of a group."""
        if not group.part_of:
            return self._of_group.get(group.name, [])
        names = [name for name, outlook in self.groups.items() if outlook.group.set_name == group.set_name]
        return [node for name in names for node in self._of_group.get(name, ())]

    def room(self, outlook: GroupOutlook) -> tuple[int, str]:
        """How many nodes of the group may be requested now, and what limits them."""
        known = self._rooms.get(outlook.group.name)
        if known is None:
            known = self._rooms[outlook.group.name] = self._room(outlook)
        return known

    def _room(self, outlook: GroupOutlook) -> tuple[int, str]:
        group, limits = outlook.group, self.limits
        if outlook.blocked_until > self.at:
            return 0, outlook.reason or "it is backing off"
        mine = self._of_group.get(group.name, ())
        if any(node.is_overdue for node in mine):
            return 0, "a start is overdue"
        count = len(self._of_set(group))
        found, reason = group.max_nodes - count, f"max_nodes {group.max_nodes}"
        if limits.max_gpus is not None:
            # all GPUs of a node, which exists until its last worker has ended
            gpus = sum(self.groups[node.group].group.gpus_per_node for node in self.nodes if node.group)
            by_gpus = (limits.max_gpus - gpus) // group.gpus_per_node
            if by_gpus < found:
                found, reason = by_gpus, f"max_gpus {limits.max_gpus}"
        if limits.max_cost_per_hour is not None and group.price_per_hour > 0:
            by_rate = floor((limits.max_cost_per_hour - self.cost_per_hour) / group.price_per_hour + 1e-9)
            if by_rate < found:
                found, reason = by_rate, f"max_cost_per_hour {limits.max_cost_per_hour:g}"
        if limits.max_cost is not None and group.price_per_hour > 0:
            each = least_cost(group, outlook.start_seconds)
            left = limits.max_cost - self.fleet.spent - self.cost_per_hour * each / group.price_per_hour
            by_cost = floor(left / each + 1e-9)
            if by_cost < found:
                found, reason = by_cost, f"max_cost {limits.max_cost:g}"
        return max(0, found), reason

    def end_of_budget(self) -> list[GiveUpNode]:
        """Give up all nodes if the rest of `max_cost` pays for no more than the end of their runs."""
        if self.limits.max_cost is None:
            return []
        left, rate = self.limits.max_cost - self.fleet.spent, self.cost_per_hour / HOUR
        if rate == 0.0 or left > rate * LAST_RUN_SECONDS:
            return []
        is_hard = left <= rate * LAST_SECONDS
        figures = (
            ("spent", self.fleet.spent),
            ("cost per hour", self.cost_per_hour),
            ("max_cost", left + self.fleet.spent),
        )
        return [
            GiveUpNode(
                node.name, ScalingWhy(ScalingRule.BUDGET, node.group, -1, node.name, figures, at=self.at), is_hard
            )
            for node in self.nodes
            if node.group and self.groups[node.group].group.price_per_hour > 0.0
            if is_hard or not node.is_leaving
        ]

    # ---- requests ----------------------------------------------------------------------------------------------------

    def request(
        self,
        outlook: GroupOutlook,
        count: int,
        rule: ScalingRule,
        figures: tuple[tuple[str, float], ...],
        load_bytes: float,
        others: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """Request nodes, as many as `room` allows."""
        group = outlook.group
        figures += (
            ("start seconds", outlook.start_seconds),
            ("load seconds", outlook.cold_seconds(load_bytes) - outlook.start_seconds),
            ("price per hour", group.price_per_hour),
        )
        why = ScalingWhy(rule, group.name, count, "", figures, others, self.at)
        self.requests.append(RequestNodes(group.name, count, why))
        node = FleetNode(
            "",
            group.name,
            group.gpus_per_node,
            outlook.gpu_bytes,
            outlook.speed,
            self.at + outlook.cold_seconds(load_bytes),
            is_starting=True,
        )
        self.nodes += [node] * count
        self._of_group.setdefault(group.name, []).extend([node] * count)
        self.cost_per_hour += count * group.price_per_hour
        self._rooms.clear()

    def request_minimum(self) -> None:
        """Request the nodes that are missing from `min_nodes`, if the rest of `max_cost` pays for all `min_nodes`: else
        all would be given up at its end, and some requested again for its last minutes."""
        if not pays_minimum(
            ((each.group, each.start_seconds) for each in self.groups.values()), self.limits, self.fleet.spent
        ):
            return
        for outlook in sorted(self.groups.values(), key=self._set_order):
            missing = outlook.group.min_nodes - len(self.active(outlook.group))
            if missing > 0 and (count := min(missing, self.room(outlook)[0])):
                self.request(outlook, count, ScalingRule.MINIMUM, (("min_nodes", outlook.group.min_nodes),), 0.0)

    def _set_order(self, outlook: GroupOutlook) -> tuple[int, float]:
        """The groups of a set by price, where the first of the set is."""
        names = [one.group.set_name for one in self.groups.values()]
        return names.index(outlook.group.set_name), outlook.group.price_per_gpu_hour

    def request_pinned(self) -> None:
        """Request nodes for pinned components that have too few workers, of the groups with the lowest price."""
        for level_bytes, workers in self.fleet.pinned:
            able = [outlook for outlook in self.groups.values() if outlook.gpu_bytes >= level_bytes]
            for outlook in sorted(able, key=lambda o: (o.group.price_per_gpu_hour, o.start_seconds, o.group.name)):
                missing = workers - self._gpus(level_bytes)
                count = min(ceil(missing / outlook.group.gpus_per_node), self.room(outlook)[0])
                if count > 0:
                    self.request(outlook, count, ScalingRule.PINNED, (("workers", workers),), 0.0)

    def due(self, share: float) -> list[tuple[float, float]]:
        """Deadlines with the GPU-seconds due by each, for this share of the work."""
        return [(one.deadline - self.margin_seconds, SAFETY * one.seconds * share) for one in self.backlog.due]

    def above(self, work: WaitingWork) -> tuple[float, float]:
        """GPU-seconds of this level and those above it, and their share of all."""
        seconds = sum(one.seconds for one in self.backlog.levels if one.level_bytes >= work.level_bytes)
        return seconds, seconds / self.total_seconds if self.total_seconds else 0.0

    def able(self, work: WaitingWork) -> list[GroupOutlook]:
        """The groups that have GPUs with the memory."""
        return [outlook for outlook in self.groups.values() if outlook.gpu_bytes >= work.level_bytes]

    def meet_deadlines(self, work: WaitingWork) -> None:
        """Request the fewest nodes with which the work of this level and above meets its deadlines."""
        _, share = self.above(work)
        tried: set[str] = set()
        while share > 0.0:
            short = shortfalls(servers(self.nodes, work.level_bytes, self.at), self.due(share))
            if not short:
                return

            def enough(outlook: GroupOutlook, short: list[tuple[float, float]] = short) -> int:
                up_at = self.at + outlook.cold_seconds(work.load_bytes)
                return max((ceil(s / (outlook.node_speed * (d - up_at))) for d, s in short if d > up_at), default=0)

            last, first = short[-1][0], short[0]

            def use(outlook: GroupOutlook, count: int, last: float = last) -> tuple[float, float]:
                return count, last - self.at

            chosen = self._choose(work, tried, enough, use)
            if chosen is None:
                return
            outlook, count, others = chosen
            tried.add(outlook.group.name)
            figures = (("seconds to the deadline", first[0] - self.at), ("GPU-seconds missing by then", first[1]))
            self.request(outlook, count, ScalingRule.DEADLINE, figures, work.load_bytes, others)

    def late_seconds(self, work: WaitingWork, share: float) -> float:
        """GPU-seconds due by deadlines that no node requested now could help to meet: they are done as soon as is
        worth while, like work without a deadline."""
        reachable = min(
            (self.at + o.cold_seconds(work.load_bytes) for o in self.able(work) if o.blocked_until <= self.at),
            default=inf,
        )
        return sum(seconds for deadline, seconds in self.due(share) if deadline <= reachable) / SAFETY

    def work_off(self, work: WaitingWork) -> None:
        """Request the nodes that are worth their start for the work of this level and above."""
        seconds, share = self.above(work)
        if seconds <= 0.0:
            return
        tried: set[str] = set()
        while True:
            there = servers(self.nodes, work.level_bytes, self.at)
            urgent_seconds = min(seconds, share * self.backlog.free_seconds + self.late_seconds(work, share))
            if there and urgent_seconds <= 0.0:
                return
            if there and not any(self.room(outlook)[0] for outlook in self.able(work)):
                return
            before = finish_at(there, seconds)
            coming = sum(one.arriving for one in self.backlog.levels if one.level_bytes >= work.level_bytes)

            def expected(outlook: GroupOutlook, coming: float = coming) -> float:
                return seconds + coming * outlook.cold_seconds(work.load_bytes)

            def worth(
                outlook: GroupOutlook, there: list[Server] = there, urgent_seconds: float = urgent_seconds
            ) -> int:
                cold_seconds, total = outlook.cold_seconds(work.load_bytes), expected(outlook)
                if there and finish_at(there, total) <= self.at + 2.0 * cold_seconds:
                    return 0
                most = (urgent_seconds + total - seconds) / (outlook.node_speed * max(cold_seconds, 1e-3))
                count = _most(
                    lambda n: self._finish(there, outlook, work, total, n) > self.at + 2.0 * cold_seconds,
                    min(max(0, floor(most)), MOST_AT_ONCE),
                )
                return count if there else max(1, count)

            def cost(outlook: GroupOutlook, count: int, there: list[Server] = there) -> tuple[float, float]:
                end = self._finish(there, outlook, work, seconds, count)
                return count, end - self.at

            chosen = self._choose(work, tried, worth, cost)
            if chosen is None:
                if not there and not tried:
                    self.make_room(work)
                return
            outlook, count, others = self._cheapest_sufficient(work, there, seconds, chosen)
            tried |= {outlook.group.name, chosen[0].group.name}  # the work ends in time without the dearer nodes
            rule = ScalingRule.BACKLOG if there else ScalingRule.NO_WORKER
            figures: tuple[tuple[str, float], ...] = (("waiting tasks", self.backlog.tasks), ("GPU-seconds", seconds))
            if there:
                figures += (("seconds to the end without", before - self.at),)
            if coming:
                figures += (("GPU-seconds per second coming", coming),)
            figures += (("seconds to the end", self._finish(there, outlook, work, seconds, count) - self.at),)
            self.request(outlook, count, rule, figures, work.load_bytes, others)

    def _cheapest_sufficient(
        self, work: WaitingWork, there: Sequence[Server], seconds: float, chosen: Choice
    ) -> Choice:
        """Return the nodes that do this work for the least money, of cheaper groups with which it ends little later
        than with the `chosen` nodes (`delay_tolerance`), or those."""
        first, first_count, others = chosen
        first_end = self._finish(there, first, work, seconds, first_count)
        latest = self.at + (first_end - self.at) * (1.0 + self.limits.delay_tolerance)
        best, best_price, best_end = chosen, _price(first, first_count, first_end - self.at), first_end
        rate = first.group.price_per_hour / first.node_speed
        for outlook in self.able(work):
            room, _ = self.room(outlook)
            if not room or outlook.group.price_per_hour / outlook.node_speed >= rate:
                continue

            def is_late(nodes: int, outlook: GroupOutlook = outlook) -> bool:
                return self._finish(there, outlook, work, seconds, nodes) > latest

            count = 1 + _most(is_late, min(room, MOST_AT_ONCE))
            end = self._finish(there, outlook, work, seconds, count)
            price = _price(outlook, count, end - self.at)
            if count <= room and end <= latest and price < best_price:
                best, best_price, best_end = (outlook, count, others), price, end
        if best is chosen:
            return chosen
        outlook, count, _ = best
        first_price = _price(first, first_count, first_end - self.at)
        reason = f"{first_price:.4g} for {counted(first_count, 'node')}, {best_price:.4g} for {count}"
        if best_end > first_end:
            reason += f", {best_end - first_end:.0f} s sooner"
        rest = [other for other in others if other[0] != outlook.group.name]
        return outlook, count, ((first.group.name, reason), *rest)[:MOST_OTHERS]

    def make_room(self, work: WaitingWork) -> None:
        """No GPU can run this work, and limits over all groups prevent one that could: give up the least valuable node
        in its place. Nothing else is requested until there is room."""
        if not any(outlook.blocked_until <= self.at for outlook in self.able(work)):
            return
        others = [
            node
            for node in self.nodes
            if self._may_end(node)
            and self._may_disrupt(node)
            and node.gpu_bytes < work.level_bytes
            and len(self.active(self.groups[node.group].group)) > self.groups[node.group].group.min_nodes
        ]
        self.is_making_room = bool(others) or any(node.is_leaving for node in self.nodes)
        if others and not any(node.is_leaving for node in self.nodes):
            node = min(others, key=self._end_order)
            figures = (("GPU-seconds that wait", work.seconds), ("GPU memory in GiB", work.level_bytes / 2**30))
            why = ScalingWhy(ScalingRule.ROOM, node.group, -1, node.name, figures, at=self.at)
            self.given_up.append(GiveUpNode(node.name, why))

    def _finish(
        self, there: Sequence[Server], outlook: GroupOutlook, work: WaitingWork, seconds: float, count: int
    ) -> float:
        """When all is done with this many more nodes."""
        up_at = self.at + outlook.cold_seconds(work.load_bytes)
        return (
            finish_at(merged(there, (up_at, count * outlook.node_speed)), seconds)
            if count
            else finish_at(there, seconds)
        )

    def _choose(
        self,
        work: WaitingWork,
        tried: set[str],
        count_of: Callable[[GroupOutlook], int],
        use_of: Callable[[GroupOutlook, int], tuple[float, float]],
    ) -> Choice | None:
        """The group that does the work for the least money, how many of its nodes, and why not others. `count_of` is
        how many nodes are wanted of a group, `use_of` how many are paid for how many seconds."""
        options: list[tuple[tuple[bool, float, float, str], GroupOutlook, int, float]] = []
        others: list[tuple[str, str]] = []
        for name, outlook in self.groups.items():
            if name in tried:
                continue
            if outlook.gpu_bytes < work.level_bytes:
                others.append((name, "too little memory"))
                continue
            room, reason = self.room(outlook)
            if not room:
                others.append((name, reason))
                continue
            needed = count_of(outlook)
            if not needed:
                others.append((name, "its nodes would come too late"))
                continue
            count = min(needed, room)
            nodes, seconds = use_of(outlook, count)
            price = _price(outlook, nodes, seconds)
            # of groups that can do a part only, the price of the part says little
            done = outlook.node_speed * count * max(seconds - outlook.cold_seconds(work.load_bytes), 1e-3)
            per_work = price / done
            options.append(((count < needed, per_work, seconds, name), outlook, count, price))
        if not options:
            return None
        options.sort(key=lambda option: option[0])
        _, outlook, count, price = options[0]
        others += [
            (one.group.name, f"{cost:.4g} for {n} nodes, {price:.4g} for {count}" if not key[0] else "too few nodes")
            for key, one, n, cost in options[1:]
        ]
        return outlook, count, tuple(others[:MOST_OTHERS])

    # ---- nodes that are given up -------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Give up the nodes that are not worth their price any more."""
        for node in sorted(filter(self._may_end, self.nodes), key=self._end_order):
            outlook = self.groups[node.group]
            if len(self.active(outlook.group)) <= outlook.group.min_nodes or self._is_for_pins(node):
                continue
            load_bytes = max((work.load_bytes for work in self.backlog.levels), default=0.0)
            restore_seconds = outlook.start_seconds + max(
                node.reload_seconds, load_bytes / outlook.load_bytes_per_second if node.is_starting else 0.0
            )
            why = self._end_rule(node, restore_seconds)
            if why is None:
                continue
            if not self._may_disrupt(node):
                continue
            rest = [other for other in self.nodes if other is not node]
            if not self._keeps_up(rest, node, outlook):
                continue
            self.nodes = rest
            self._of_group[node.group].remove(node)
            rule, figures = why
            figures += (("seconds to restore it", restore_seconds), ("price per hour", outlook.group.price_per_hour))
            self.given_up.append(
                GiveUpNode(node.name, ScalingWhy(rule, node.group, -1, node.name, figures, at=self.at))
            )

    def _is_for_pins(self, node: FleetNode) -> bool:
        """Whether pinned components need as many workers as there are."""
        return any(
            node.gpu_bytes >= level_bytes and self._gpus(level_bytes) - node.gpus < workers
            for level_bytes, workers in self.fleet.pinned
        )

    def _gpus(self, level_bytes: float) -> int:
        """Workers that stay, with this memory."""
        return sum(n.gpus for n in self.nodes if n.gpu_bytes >= level_bytes and not n.is_leaving and n.ends_at == inf)

    def _may_end(self, node: FleetNode) -> bool:
        is_used = node.is_kept or node.is_cordoned
        return bool(node.group) and not node.is_leaving and not is_used and node.ends_at == inf

    def _may_disrupt(self, node: FleetNode) -> bool:
        """Whether disruption limits allow to give the node up. A node that was never up is nobody's loss."""
        if node.is_starting or self.fleet.may_end is None:
            return True
        starting = {one.name for one in self.fleet.nodes if one.is_starting}
        return sum(given_up.node not in starting for given_up in self.given_up) < self.fleet.may_end

    def _end_order(self, node: FleetNode) -> tuple[bool, float, float, float, str]:
        outlook = self.groups[node.group]
        price = outlook.group.price_per_gpu_hour / outlook.speed
        return not node.is_starting, -price, node.value_seconds, node.idle_since or self.at, node.name

    def _end_rule(
        self, node: FleetNode, restore_seconds: float
    ) -> tuple[ScalingRule, tuple[tuple[str, float], ...]] | None:
        """Why the node is worth less than its price; None if it is not."""
        if node.idle_since is not None and self.at - node.idle_since >= IDLE_PART * restore_seconds:
            return ScalingRule.IDLE, (("idle seconds", self.at - node.idle_since),)
        if node.is_starting or not self._has_spare(node):
            return None
        since = self.at - KEPT_UP_PARTS * restore_seconds
        for recent in self.fleet.recent:
            if recent.level_bytes <= node.gpu_bytes:
                capacity = _capacity(self.nodes, recent.level_bytes)
                if not recent.kept_up(capacity - node.capacity, since):
                    return None
        lowest = min(self.fleet.recent, key=lambda one: one.level_bytes, default=None)
        if lowest is None:
            return None
        capacity = _capacity(self.nodes, lowest.level_bytes)
        return ScalingRule.SURPLUS, (
            ("GPUs that would have kept up", lowest.least(capacity, node.speed, since)),
            ("GPUs", capacity),
        )

    def _has_spare(self, node: FleetNode) -> bool:
        """Whether GPUs are idle now, as many as the node has, and hardly anything waits for them: while work waits, a
        GPU less makes it later and saves nothing."""
        idle = sum(n.idle_gpus for n in self.nodes if n.gpu_bytes <= node.gpu_bytes and not n.is_leaving)
        if idle < node.gpus:
            return False
        waiting = sum(work.seconds for work in self.backlog.levels if work.level_bytes <= node.gpu_bytes)
        rest = _capacity(self.nodes, 0.0) - node.capacity
        return waiting <= rest * self.limits.wait_seconds

    def _keeps_up(self, rest: list[FleetNode], node: FleetNode, outlook: GroupOutlook) -> bool:
        """Whether the rest is far from requesting a node again."""
        for work in self.backlog.levels:
            if work.level_bytes > node.gpu_bytes:
                continue
            seconds, share = self.above(work)
            there = servers(rest, work.level_bytes, self.at)
            if seconds > 0.0 and finish_at(there, seconds) > self.at + outlook.cold_seconds(work.load_bytes):
                free = self.backlog.free_seconds + self.late_seconds(work, share)
                if not there or free > 0.0:
                    return False
            if shortfalls(there, self.due(share)):
                return False
        return True


def _price(outlook: GroupOutlook, nodes: float, seconds: float) -> float:
    """The price of so many nodes for this time."""
    return nodes * outlook.group.price_per_hour * seconds / HOUR


def least_cost(group: NodeGroup, start_seconds: float) -> float:
    """What must be left of `max_cost` for a node: its start, as much time for work, and the end of its runs."""
    return (2.0 * start_seconds + LAST_RUN_SECONDS) * group.price_per_hour / HOUR


def pays_minimum(groups: Iterable[tuple[NodeGroup, float]], limits: AutoscalingConfig, spent: float) -> bool:
    """Return whether the rest of `max_cost` pays for `min_nodes` of all `groups`, each with its expected seconds of a
    start."""
    if limits.max_cost is None:
        return True
    of_sets: dict[str, float] = {}
    for group, start_seconds in groups:
        cost = group.min_nodes * least_cost(group, start_seconds)
        of_sets[group.set_name] = min(cost, of_sets.get(group.set_name, cost))
    return limits.max_cost - spent >= sum(of_sets.values())


def fits_limits(group: NodeGroup, groups: Sequence[NodeGroup], limits: AutoscalingConfig) -> bool:
    """Whether a node of the group may exist next to the `min_nodes` of all groups."""
    if group.min_nodes:
        return True
    gpus, price = least_of_sets(groups)
    gpus, price = gpus + group.gpus_per_node, price + group.price_per_hour
    return (limits.max_gpus is None or gpus <= limits.max_gpus) and (
        limits.max_cost_per_hour is None or price <= limits.max_cost_per_hour + 1e-9
    )


def _capacity(nodes: Iterable[FleetNode], level_bytes: float) -> float:
    """GPU-seconds per second of all nodes that stay, with this memory."""
    return sum(n.capacity for n in nodes if n.gpu_bytes >= level_bytes and not n.is_leaving and n.ends_at == inf)


def _most(holds: Callable[[int], bool], limit: int) -> int:
    """The largest count up to `limit` for which `holds`, which does for all smaller ones too."""
    if limit < 1 or not holds(1):
        return 0
    low, high = 1, 2
    while high <= limit and holds(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
