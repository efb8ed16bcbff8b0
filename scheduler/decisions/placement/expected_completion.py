"""The default placement policy: minimise expected completion time. Pure: reads the query, changes nothing.

Rules, for tasks of the highest priority that fit an idle worker; if none of them starts, for the next lower priority
0. Urgent tasks (near deadline, lost worker) go first; a deadline task may wait for a busy worker as in rule 5.
1. The oldest task in order goes first too, without waiting, if it was passed over as often as the limit allows.
2. A line with a first task that waited long relative to its load cost goes next, as far as the switch budget
   (`scheduler.decisions.placement.switch_budget`) allows: loads cost time, so a task that waits longer than its load /
   share gets it. Jobs submitted together do not compete this way: all of them are wanted. If that worker has a task
   that needs no load, this one goes first, and the load is overlapped with its run at no cost
   (`scheduler.decisions.placement.preload`).
3. Then tasks with all weights resident: tasks that finish a job first, then in order. For a task that finishes a
   job, weights count as resident if loading takes little time compared with its run: started jobs finish soon, and do
   not pile up.
4. Then the cheapest load (upload, patches, streaming). Wasted load time counts twice; the part that other waiting tasks
   share is deducted (`scheduler.decisions.placement.shared_loads`), as are three tenths of the waiting time, or less if
   that exceeds a run of the longest waiting candidate. Candidates are the first lines in order, and lines that use
   weights on the idle workers. While the switch budget lasts, it pays what the chosen candidate costs more than the
   cheapest, up to the value of its waiting: the cheapest may be one that waits for a busy worker. Wasted is the cost
   here beyond the cost on the worker that has most of it: a model that is resident nowhere has to be loaded anyway, a
   second copy does not. Tasks of the same batch that are further along go first if their load displaces nothing, or is
   small compared with their runs (`scheduler.decisions.placement.batch_progress`): the first images of a batch end
   soon.
5. In rules 2 and 4 a task waits for a busy worker that should finish it sooner, counting the tasks that wait for that
   worker already; none waits for a run of unknown length. So a line gets a second worker exactly if waiting takes
   longer than a load; where the load would evict weights in demand, longer than that with the loads of these
   (`scheduler.decisions.placement.eviction_harm`).
6. If no worker is busy, something starts.
7. Rules 2 to 5 apply to users within the share window (`scheduler.decisions.queue.shares`): users who are ahead of the
   first task in order by more than the window are considered if none of the others starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice

from modelpool.scheduler.decisions.costs.cost_model import least_extra_seconds
from modelpool.scheduler.decisions.placement.batch_progress import further_along
from modelpool.scheduler.decisions.placement.eviction_harm import eviction_seconds
from modelpool.scheduler.decisions.placement.gathering import feed_first
from modelpool.scheduler.decisions.placement.idle_workers import MOST_IDLE, best_idle, least_evicting, near
from modelpool.scheduler.decisions.placement.overlap import can_preload_all
from modelpool.scheduler.decisions.placement.placement_query import PlacementDecision, PlacementQuery, make_decision
from modelpool.scheduler.decisions.placement.shared_loads import shared_load_seconds
from modelpool.scheduler.decisions.placement.waiting import Reservations, first_to_start, is_sooner_elsewhere
from modelpool.scheduler.decisions.queue.backlog import BacklogLine
from modelpool.scheduler.decisions.queue.shares import share_window_end
from modelpool.scheduler.decisions.queue.urgent import AT_ONCE
from modelpool.scheduler.model.cost_classes import LAST_RANK, CostClass
from modelpool.scheduler.model.jobs import ALONE, Order, Task
from modelpool.scheduler.model.placement_record import PlacementRule
from modelpool.scheduler.model.user_account import NO_VIRTUAL_START
from modelpool.scheduler.model.workers import Worker

#: lines that use the content of one idle worker
MOST_NEAR = 8
#: lines, the cheapest first, that are checked for whether they would wait for a busy worker; if all of them would, the
#: rest is considered when one of those is free
MOST_CHECKED = 16
#: files of an idle worker's machine, the most recently read first, that are considered
MOST_FILES = 32
#: lines that finish jobs, and idle workers for each, that are considered
MOST_FINISHING = 4
#: lines that are searched for those, if the others are of one batch with what starts anyway
MOST_LINES = 256
#: seconds of load that a second of waiting is worth; but the longest wait is worth at most a run. From
#: benchmarks/scheduling.py: at 0.1 the last percent waited longer than in plain order on the calibrated workload; with
#: scarce GPUs every task waits long, and counting all of it would change weights with each task
AGEING_WEIGHT = 0.3
#: fraction of a run: loading a VAE for a decode takes little more than this on any GPU, and its image waits for nothing
#: else
SMALL_LOAD = 0.2
#: lines, the oldest first, that are considered as long-waiting
MOST_LONG_WAITING = 4


class _Candidate:
    """A line and the best idle worker for it.

    extra_seconds   load time there, in addition to the run
    wasted_seconds  the part of it due to a copy in addition to existing ones
    price_seconds   both, without the part that other waiting tasks share
    waited_seconds  waiting time of its first task; 0 for a batch of jobs
    """

    __slots__ = ("extra_seconds", "line", "price_seconds", "waited_seconds", "wasted_seconds", "worker")

    def __init__(
        self,
        line: BacklogLine,
        worker: Worker,
        extra_seconds: float,
        wasted_seconds: float,
        price_seconds: float,
        waited_seconds: float,
    ) -> None:
        self.line = line
        self.worker = worker
        self.extra_seconds = extra_seconds
        self.wasted_seconds = wasted_seconds
        self.price_seconds = price_seconds
        self.waited_seconds = waited_seconds


def soonest(query: PlacementQuery) -> PlacementDecision | None:
    """Return the start that minimises expected completion time; None if every ready task had better wait for a busy
    worker."""
    backlog, most_bytes = query.backlog, query.workers.largest_idle_bytes
    reservations = Reservations(query)
    oldest = backlog.oldest(most_bytes)
    while oldest is not None:
        decision = _of_priority(reservations, oldest)
        if decision is not None:
            return decision
        following = next(backlog.lines(most_bytes, after=(1 - oldest.priority,)), None)
        oldest = None if following is None else following.head
    return None


def _urgent(query: PlacementQuery, priority: int) -> PlacementDecision | None:
    """Rule 0."""
    reservations = Reservations(query)
    for deadline, _, task in query.backlog.urgent.now(query.at):
        best = best_idle(query, task) if task.priority == priority else None
        if best is None or (task.degrees != ALONE and _is_hopeless(query, task, best[0], deadline)):
            continue
        if task.passed >= query.config.overtaking_limit:
            note = f"passed over {task.passed:.0f} times by every worker, so it goes first"
            return make_decision(query, task, best[0], PlacementRule.WAITED, note)
        if task.goes_first and task.resume_degree and not task.crashed:
            return make_decision(query, task, best[0], PlacementRule.CONTINUED)
        if task.is_for_pass:
            if is_sooner_elsewhere(reservations, task, *best):  # as on the worker that stops a pass for it
                continue
            return make_decision(query, task, best[0], PlacementRule.PASS_STOPPED)
        if task.goes_first:
            return make_decision(query, task, best[0], PlacementRule.LOST, "its worker was lost, so it goes first")
        if is_sooner_elsewhere(reservations, task, *best):
            continue
        note = f"{deadline - query.at:.0f} s before its deadline, so it goes first"
        return make_decision(query, task, best[0], PlacementRule.DEADLINE, note, reservations.considered)
    return None


def _is_hopeless(query: PlacementQuery, task: Task, worker: Worker, deadline: float) -> bool:
    """Whether a task misses its deadline on as many GPUs as it may have: it goes before no other for it."""
    if deadline == AT_ONCE:
        return False
    degree = task.degrees[-1]
    seconds = query.costs.gang_seconds(task.spec, task.cost_class, worker, degree, task.remaining)
    return query.at + seconds > deadline


def _of_priority(reservations: Reservations, oldest: Task) -> PlacementDecision | None:
    """The start among tasks of one priority, the first of which in order is `oldest`."""
    query = reservations.query
    if query.backlog.urgent and (decision := _urgent(query, oldest.priority)) is not None:
        return decision
    if oldest.passed >= query.config.overtaking_limit and (best := best_idle(query, oldest)) is not None:
        note = f"passed over {oldest.passed:.0f} times by every worker, so it goes first"
        return make_decision(query, oldest, best[0], PlacementRule.WAITED, note)
    latest_start = share_window_end(oldest.order, query.config.share_window_seconds * query.workers.count)
    decision = _within_window(reservations, oldest, latest_start)
    if (
        decision is None and latest_start < NO_VIRTUAL_START
    ):  # the users within the window wait for busy workers: no reason to stay idle
        decision = _within_window(Reservations(query), oldest, NO_VIRTUAL_START)
    return decision


def _within_window(reservations: Reservations, oldest: Task, latest_start: float) -> PlacementDecision | None:
    """Rules 2 to 5, for tasks with a virtual start up to `latest_start`."""
    query = reservations.query
    decision = _resident(reservations, oldest, latest_start) or _cheapest(reservations, oldest, latest_start)
    if decision is None:
        return None
    decision = further_along(Reservations(query), decision) or feed_first(query, decision) or decision
    return _long_waiting(query, oldest, decision) or decision


def _resident(reservations: Reservations, oldest: Task, latest_start: float) -> PlacementDecision | None:
    """Rule 3."""
    query, priority = reservations.query, oldest.priority
    workers, extra_seconds = query.workers, query.costs.extra_seconds
    best: BacklogLine | None = None
    on: list[Worker] = []
    best_rank, best_order = False, oldest.order
    for line, worker in _pairs(query):
        order, cost_class = line.order, line.cost_class
        rank = cost_class.rank == LAST_RANK
        if rank < best_rank or order[0] != -priority or order[1] > latest_start:
            continue
        if best is not None and line is not best and rank == best_rank and order > best_order:
            continue
        extra = extra_seconds(line.head.spec, cost_class, worker)
        if extra is None or (extra > 0.0 and (not rank or not _is_small_load(query, line.head, worker, extra))):
            continue
        if line is best:
            on.append(worker)
        else:
            best, best_rank, best_order, on = line, rank, order, [worker]
    if best is None:
        return None
    if workers.are_similar:
        worker = on[0] if len(on) == 1 else least_evicting(query.costs, best.cost_class, on)
        return make_decision(query, best.head, worker, PlacementRule.RESIDENT)
    soonest_idle = best_idle(query, best.head)  # a faster one may have to load, and still be sooner
    assert soonest_idle is not None, f"{best.head.name} fits on {on[0].worker_id}"
    place = first_to_start(reservations, best, *soonest_idle)
    rule = PlacementRule.RESIDENT if soonest_idle[1] == 0.0 else PlacementRule.CHEAPEST
    return None if place is None else make_decision(query, best.tasks[place], soonest_idle[0], rule)


def _is_small_load(query: PlacementQuery, task: Task, worker: Worker, extra_seconds: float) -> bool:
    """Whether loading its weights takes little time compared with its run."""
    return extra_seconds <= SMALL_LOAD * query.costs.resident_seconds(task.spec, task.cost_class, worker)


def _pairs(query: PlacementQuery) -> Iterable[tuple[BacklogLine, Worker]]:
    """Lines and idle workers that may have all that they use, or need little for what finishes a job."""
    backlog, workers = query.backlog, query.workers
    if workers.idle_count <= backlog.line_count:
        pairs: list[tuple[BacklogLine, Worker]] = []
        if finishing := backlog.finishing(MOST_FINISHING):  # first: if one starts, the others need not be checked
            first = workers.some_idle(MOST_FINISHING)
            pairs = [(line, worker) for line in finishing for worker in first]
        for worker in workers.some_idle(workers.idle_count):
            pairs += [(line, worker) for line in backlog.using(worker.entries.values())]
        return pairs
    return [
        (line, worker)
        for line in backlog.lines(workers.largest_idle_bytes)
        for worker in _idle_with(query, line.cost_class)
    ]


def _long_waiting(query: PlacementQuery, oldest: Task, cheaper: PlacementDecision) -> PlacementDecision | None:
    """Rule 2. `cheaper` is the start without it."""
    if query.switch_seconds <= 0.0:
        return None
    if oldest.cost_class is cheaper.task.cost_class:
        return None  # its line is the first of those below
    reservations = Reservations(query)
    checked = 0
    for line in islice(query.backlog.lines(query.workers.largest_idle_bytes, oldest.order), MOST_LINES):
        task = line.head
        if task.priority != oldest.priority or line.cost_class is cheaper.task.cost_class:
            return None  # what starts anyway is the oldest of the rest
        if task.batch and task.batch == cheaper.task.batch:
            continue
        checked += 1
        if checked > MOST_LONG_WAITING:
            return None
        best = best_idle(query, task)
        if best is None or best[1] == 0.0 or best[1] * query.wait_factor > task.waited_seconds(query.at):
            continue
        if first_to_start(reservations, line, *best) == 0:
            is_worked_on = best[0] is cheaper.worker and cheaper.why.chosen.extra_seconds == 0.0
            if is_worked_on and query.config.upload_ahead and _can_preload_all(query, best[0], cheaper.task, task):
                cheaper.preload_first = task
                return cheaper
            note = f"it waited {task.waited_seconds(query.at):.0f} s"
            spent_seconds = max(0.0, best[1] - cheaper.why.chosen.extra_seconds)
            return make_decision(
                query, task, best[0], PlacementRule.WAITED, note, reservations.considered, spent_seconds
            )
    return None


def _can_preload_all(query: PlacementQuery, worker: Worker, running: Task, coming: Task) -> bool:
    costs, backlog, workers = query.costs, query.backlog, query.workers
    return can_preload_all(costs, backlog, workers, worker, running.cost_class, coming.cost_class)


def _cheapest(reservations: Reservations, oldest: Task, latest_start: float) -> PlacementDecision | None:
    """Rule 4."""
    query = reservations.query
    candidates: list[_Candidate] = []
    for line in _candidate_lines(query, oldest, latest_start):
        best = best_idle(query, line.head)
        if best is not None:
            candidates.append(_candidate_for(query, line, *best))
    if not candidates:
        return None
    weight = _ageing_weight(query, candidates)
    ranked: list[tuple[float, int, Order, _Candidate]] = []
    for candidate in candidates:
        line = candidate.line
        ranked.append(
            (candidate.price_seconds - weight * candidate.waited_seconds, -line.cost_class.rank, line.order, candidate)
        )
    ranked.sort()  # the order of each line is unique, so candidates are never compared
    for _, _, _, candidate in ranked[:MOST_CHECKED]:
        reservations.considered = []
        line, worker = candidate.line, candidate.worker
        harm_seconds = eviction_seconds(query, line.cost_class, worker) if candidate.wasted_seconds > 0.0 else 0.0
        place = first_to_start(reservations, line, worker, candidate.extra_seconds + harm_seconds)
        wasted_seconds = candidate.wasted_seconds + harm_seconds
        if place is not None and (place == 0 or _justifies_copy(query, line, place, worker, wasted_seconds)):
            spent_seconds = _spent_budget(query, candidate, candidates, weight)
            return make_decision(
                query, line.tasks[place], worker, PlacementRule.CHEAPEST, "", reservations.considered, spent_seconds
            )
    return None


def _spent_budget(query: PlacementQuery, chosen: _Candidate, candidates: Sequence[_Candidate], weight: float) -> float:
    """The seconds that the switch budget pays for a choice that is not the cheapest."""
    if query.budget_seconds <= 0.0:
        return 0.0
    least_seconds = min([candidate.price_seconds for candidate in candidates])
    return min(chosen.price_seconds - least_seconds, weight * chosen.waited_seconds)


def _candidate_for(query: PlacementQuery, line: BacklogLine, worker: Worker, extra_seconds: float) -> _Candidate:
    """The cost of a line on this worker, the best of the idle ones for it."""
    wasted_seconds = extra_seconds - _least_extra(query, line.head, extra_seconds)
    shared_seconds = shared_load_seconds(query, line.cost_class, worker) if extra_seconds > 0.0 else 0.0
    price_seconds = max(0.0, wasted_seconds - shared_seconds) + extra_seconds - shared_seconds
    waited_seconds = 0.0 if line.head.batch else line.head.waited_seconds(query.at)
    return _Candidate(line, worker, extra_seconds, wasted_seconds, price_seconds, waited_seconds)


def _ageing_weight(query: PlacementQuery, candidates: Sequence[_Candidate]) -> float:
    """Seconds of load that a second of waiting is worth now: AGEING_WEIGHT, or less if the longest wait would then be
    worth more than a run of that task.

    One short task that has waited long lowers the weight of all others. That is intended: with the longest run of the
    candidates instead, each one's own run, or no run that is short compared with its load, the last percent waited
    longer where GPUs hardly keep up (benchmarks/RESULTS.md).
    """
    longest = candidates[0]
    for candidate in candidates:
        if candidate.waited_seconds > longest.waited_seconds:
            longest = candidate
    line = longest.line
    most_seconds = query.costs.resident_seconds(line.head.spec, line.cost_class, longest.worker)
    return (
        AGEING_WEIGHT
        if longest.waited_seconds * AGEING_WEIGHT <= most_seconds
        else most_seconds / longest.waited_seconds
    )


def _least_extra(query: PlacementQuery, task: Task, extra_seconds: float) -> float:
    """The least of `extra_seconds` and its extra seconds on some workers that have a part of what the task uses."""
    uses = task.cost_class.uses
    if not uses or extra_seconds == 0.0:
        return extra_seconds
    holders: Iterable[Worker] = islice(query.workers.holders.get(uses[0].component, ()), MOST_NEAR)
    if query.costs.nodes.holders or query.costs.fetched.holders:
        holders = chain(near(query, task.cost_class), holders)
    return least_extra_seconds(query.costs, task.spec, task.cost_class, holders, extra_seconds)


def _justifies_copy(
    query: PlacementQuery, line: BacklogLine, place: int, worker: Worker, wasted_seconds: float
) -> bool:
    """Whether the rest of the line takes longer than the additional copy that another worker needs for it."""
    task = line.head
    run_seconds = query.costs.resident_seconds(task.spec, task.cost_class, worker)
    return (len(line.tasks) - place) * run_seconds >= wasted_seconds


def _candidate_lines(query: PlacementQuery, oldest: Task, latest_start: float) -> Iterable[BacklogLine]:
    """Lines of the priority of `oldest`, each once: the first in order, and those that may be cheap on an idle
    worker."""
    backlog, workers = query.backlog, query.workers
    lines = backlog.lines(workers.largest_idle_bytes, oldest.order)
    if workers.restricted:  # lines that no idle worker can run must not hide others
        lines = (line for line in islice(lines, MOST_LINES) if best_idle(query, line.head) is not None)
    found = dict.fromkeys(islice(lines, query.config.window))
    for worker in workers.some_idle(MOST_IDLE):
        for component in worker.entries:
            for line in backlog.of_component(component, MOST_NEAR):
                found[line] = None
        node = query.costs.nodes.of(worker.spec) if backlog.reads_adapters else None
        for file in () if node is None else islice(reversed(node.files), MOST_FILES):
            found.update(dict.fromkeys(islice(backlog.of_adapter(file), MOST_NEAR)))
    first = -oldest.priority
    chosen: list[BacklogLine] = []
    for line in found:
        priority, virtual_start, _ = line.order
        if priority == first and virtual_start <= latest_start:
            chosen.append(line)
    return chosen


def _idle_with(query: PlacementQuery, cost_class: CostClass) -> list[Worker]:
    """Some idle workers that hold the first component that it uses; any if it needs no weights."""
    if not cost_class.uses:
        return list(islice(query.workers.idle_workers(), MOST_IDLE))
    return query.workers.idle_holders(cost_class.uses[0].component, MOST_IDLE)
