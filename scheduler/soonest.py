"""Our placement: what finishes the queue soonest. A function of what it is shown; it changes nothing.

Rules, for tasks of the highest priority that fit an idle worker; if none of them is to start, for the next lower ones
0. What is hurried (a deadline comes near, its worker was lost) goes first.
1. The task that is oldest in order and was passed over as often as the limit allows goes next, and waits for nobody.
2. A line whose first task waited long for what its load costs goes next, as far as the account of such loads
   (`scheduler.switching`) allows: loads are paid by time, so who waits longer than 1 / share of a load gets it. Jobs
   that were asked for together do not hurry each other: all of them are wanted.
3. Then tasks whose weights are all there: the later stage first, then in order.
4. Then what wastes least, and of that what costs least (upload, patches, streaming); of the first lines in order, and
   of those that use what is on the idle workers. Wasted is what it costs here beyond what it would on the worker that
   has most of it: a model that is nowhere has to be loaded by somebody, a second copy need not be made.
5. Under 2 and 4 a task waits for a busy worker that should finish it sooner, counting the tasks that wait for that one
   already; none waits for a run of unknown length. So a line gets a second worker exactly when waiting takes longer
   than a load.
6. When no worker is busy, something starts.
7. Rules 2 to 5 hold among users whose turn it is: who is ahead of the first in order by more than the window of shares
   (`scheduler.shares`) is looked at when none of those starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from math import inf
from types import MappingProxyType

from pool.spec import WorkerId
from scheduler.backlog import Line
from scheduler.costs import Costs, Signature
from scheduler.jobs import Order, Task
from scheduler.placement import Choice, Question, choice_of, is_divided
from scheduler.shares import NO_TAG, turn_end
from scheduler.why import Rule
from scheduler.workers import Worker

#: idle workers of one sort, and idle holders of a component, that one line is held against
MOST_IDLE = 8
#: busy workers, soonest free first, that one line is held against; and holders of what it uses
MOST_BUSY = 32
#: lines that read what one idle worker has, and machines that have an adapter
MOST_NEAR = 8
#: lines, the oldest first, that are looked at for having waited long
MOST_RIPE = 4
_NOBODY: Mapping[Worker, None] = MappingProxyType({})
#: behind every order
_NO_ORDER: Order = (0, inf, (0, 0))


@dataclass(slots=True)
class _Look:
    """One placement: the question, and what busy workers were promised on the way."""

    question: Question
    #: seconds until a busy worker is free of what waits for it
    promised: dict[WorkerId, float] = field(default_factory=dict)
    seen: list[tuple[float, float, Worker]] = field(default_factory=list)


def soonest(question: Question) -> Choice | None:
    """The start that finishes the queue soonest; None when every ready task is better off waiting for a busy worker."""
    backlog, most_bytes = question.backlog, question.workers.largest_idle_bytes
    look = _Look(question)
    oldest = backlog.oldest(most_bytes)
    while oldest is not None:
        choice = _of_priority(look, oldest)
        if choice is not None:
            return choice
        following = next(backlog.lines(most_bytes, after=(1 - oldest.priority,)), None)
        oldest = None if following is None else following.head
    return None


def _hurried(question: Question, priority: int) -> Choice | None:
    """Rule 0."""
    for deadline, _, task in question.backlog.hurried:
        best = _best_idle(question, task) if task.priority == priority else None
        if best is None:
            continue
        if task.goes_first:
            return choice_of(question, task, best[0], Rule.LOST, "its worker was lost, so it goes first")
        seconds = deadline - question.at
        note = f"{abs(seconds):.0f} s {'before' if seconds >= 0 else 'after'} its deadline, so it goes first"
        return choice_of(question, task, best[0], Rule.DEADLINE, note)
    return None


def _of_priority(look: _Look, oldest: Task) -> Choice | None:
    """What to start among tasks of one priority, the first of which in order is `oldest`."""
    question = look.question
    if question.backlog.hurried and (choice := _hurried(question, oldest.priority)) is not None:
        return choice
    if oldest.passed >= question.config.overtaking_limit and (best := _best_idle(question, oldest)) is not None:
        note = f"passed over {oldest.passed:.0f} times by every worker, so it goes first"
        return choice_of(question, oldest, best[0], Rule.WAITED, note)
    latest_tag = turn_end(oldest.order, question.config.share_window_seconds * question.workers.count)
    choice = _in_turn(look, oldest, latest_tag)
    if choice is None and latest_tag < NO_TAG:  # those whose turn it is wait for busy workers: no reason to be idle
        choice = _in_turn(look, oldest, NO_TAG)
    return choice


def _in_turn(look: _Look, oldest: Task, latest_tag: float) -> Choice | None:
    """Rules 2 to 5, for tasks of users whose turn it is by then."""
    question = look.question
    choice = _resident(look, oldest.priority, latest_tag) or _cheapest(look, oldest, latest_tag)
    return None if choice is None else _ripe(question, oldest, choice) or choice


def _resident(look: _Look, priority: int, latest_tag: float) -> Choice | None:
    """Rule 3."""
    question = look.question
    workers, extra_seconds = question.workers, question.costs.extra_seconds
    best: Line | None = None
    on: list[Worker] = []
    best_rank, best_order = -1, _NO_ORDER
    for line, worker in _pairs(question):
        order, signature = line.order, line.signature
        rank = signature.rank
        if rank < best_rank or order[0] != -priority or order[1] > latest_tag:
            continue
        if line is not best and rank == best_rank and order > best_order:
            continue
        if extra_seconds(line.head.spec, signature, worker) != 0.0:
            continue
        if line is best:
            on.append(worker)
        else:
            best, best_rank, best_order, on = line, rank, order, [worker]
    if best is None:
        return None
    worker = on[0] if len(on) == 1 else _least_evicting(question.costs, best.signature, on)
    place = 0 if workers.are_alike else _first_for_idle(look, best, worker, 0.0)
    return None if place is None else choice_of(question, best.tasks[place], worker, Rule.RESIDENT)


def _pairs(question: Question) -> Iterable[tuple[Line, Worker]]:
    """Lines and idle workers that may have all that they use."""
    backlog, workers = question.backlog, question.workers
    if workers.idle_count <= backlog.line_count:
        return [(line, worker) for worker in workers.idle_workers() for line in backlog.using(worker.entries.values())]
    return [
        (line, worker)
        for line in backlog.lines(workers.largest_idle_bytes)
        for worker in _idle_with(question, line.signature)
    ]


def _ripe(question: Question, oldest: Task, cheaper: Choice) -> Choice | None:
    """Rule 2. `cheaper` is what would start without it."""
    if question.switch_seconds <= 0.0:
        return None
    look = _Look(question)
    for line in islice(question.backlog.lines(question.workers.largest_idle_bytes, oldest.order), MOST_RIPE):
        task = line.head
        if task.priority != oldest.priority or line.signature is cheaper.task.signature:
            return None  # what starts anyway is the oldest of those that are left
        if task.batch and task.batch == cheaper.task.batch:
            continue
        best = _best_idle(question, task)
        if best is None or best[1] == 0.0 or best[1] * question.patience > question.at - task.ready_at:
            continue
        if _first_for_idle(look, line, *best) == 0:
            note = f"it waited {question.at - task.ready_at:.0f} s"
            spent_seconds = max(0.0, best[1] - cheaper.why.chosen.extra_seconds)
            return choice_of(question, task, best[0], Rule.WAITED, note, look.seen, spent_seconds)
    return None


def _cheapest(look: _Look, oldest: Task, latest_tag: float) -> Choice | None:
    """Rule 4."""
    question = look.question
    ranked: list[tuple[float, float, int, object, Line, Worker]] = []
    for line in _candidates(question, oldest, latest_tag):
        best = _best_idle(question, line.head)
        if best is not None:
            wasted_seconds = best[1] - _least_extra(question, line.head, *best)
            ranked.append((wasted_seconds, best[1], -line.signature.rank, line.order, line, best[0]))
    ranked.sort(key=lambda entry: entry[:4])
    for wasted_seconds, extra_seconds, _, _, line, worker in ranked:
        look.seen = []
        place = _first_for_idle(look, line, worker, extra_seconds)
        if place is not None and (place == 0 or _is_worth(question, line, place, worker, wasted_seconds)):
            return choice_of(question, line.tasks[place], worker, Rule.CHEAPEST, "", look.seen)
    return None


def _least_extra(question: Question, task: Task, idle: Worker, extra_seconds: float) -> float:
    """The least extra seconds that the task would take on `idle`, or on some workers that have a part of what it uses."""
    uses = task.signature.uses
    if not uses or extra_seconds == 0.0:
        return extra_seconds
    least = extra_seconds
    holders = islice(question.workers.holders.get(uses[0].component, ()), MOST_NEAR)
    for worker in chain(_near(question, task.signature), holders):
        if worker is not idle:
            there = question.costs.extra_seconds(task.spec, task.signature, worker)
            if there is not None and there < least:
                least = there
    return least


def _is_worth(question: Question, line: Line, place: int, worker: Worker, wasted_seconds: float) -> bool:
    """What is left of the line for another worker takes longer than the copy that it needs for that."""
    task = line.head
    run_seconds = question.costs.resident_seconds(task.spec, task.signature, worker)
    return (len(line.tasks) - place) * run_seconds >= wasted_seconds


def _candidates(question: Question, oldest: Task, latest_tag: float) -> Iterable[Line]:
    """Lines of the priority of `oldest`, each once: the first in order, and what may be cheap on an idle worker."""
    backlog, workers = question.backlog, question.workers
    found = dict.fromkeys(islice(backlog.lines(workers.largest_idle_bytes, oldest.order), question.config.window))
    for worker in islice(workers.idle_workers(), MOST_IDLE):
        for component in worker.entries:
            found.update(dict.fromkeys(backlog.of_component(component, MOST_NEAR)))
        node = question.costs.nodes.of(worker.spec)
        for file in () if node is None else islice(reversed(node.files), MOST_BUSY):
            found.update(dict.fromkeys(islice(backlog.of_adapter(file), MOST_NEAR)))
    return [line for line in found if line.order[0] == -oldest.priority and line.order[1] <= latest_tag]


def _idle_with(question: Question, signature: Signature) -> list[Worker]:
    """Some idle workers that hold the first thing that it uses; of those that need no weights, any."""
    if not signature.uses:
        return list(islice(question.workers.idle_workers(), MOST_IDLE))
    return question.workers.idle_holders(signature.uses[0].component, MOST_IDLE)


def _best_idle(question: Question, task: Task) -> tuple[Worker, float] | None:
    """The idle worker that should finish it first, with its extra seconds; of equal ones the one that runs it whole,
    then the one that evicts least, then the one that is idle longest, then by name; None when it fits on none."""
    workers, costs, signature = question.workers, question.costs, task.signature
    if workers.idle_count == 1:
        worker = next(workers.idle_workers())
        extra = costs.extra_seconds(task.spec, signature, worker)
        return None if extra is None else (worker, extra)
    best: list[tuple[Worker, float]] = []
    least_seconds = 0.0
    for worker in workers.idle_workers() if workers.idle_count <= MOST_IDLE else _some_idle(question, signature):
        extra_seconds = costs.extra_seconds(task.spec, signature, worker)
        if extra_seconds is None:
            continue
        seconds = extra_seconds + costs.resident_seconds(task.spec, signature, worker)
        if not best or seconds < least_seconds:
            best, least_seconds = [(worker, extra_seconds)], seconds
        elif seconds == least_seconds:
            best.append((worker, extra_seconds))
    if len(best) < 2:
        return best[0] if best else None
    chosen = _least_evicting(costs, signature, [worker for worker, _ in best])
    return next(pair for pair in best if pair[0] is chosen)


def _some_idle(question: Question, signature: Signature) -> Iterable[Worker]:
    """Of many idle workers those that hold what it uses or are near its adapters, and some of every sort."""
    workers = question.workers
    found = dict.fromkeys(w for use in signature.uses for w in workers.idle_holders(use.component, MOST_IDLE))
    found.update((w, None) for w in _near(question, signature) if w.is_idle)
    for sort in workers.idle.values():
        found.update(dict.fromkeys(islice(sort, MOST_IDLE)))
    return found


def _near(question: Question, signature: Signature) -> list[Worker]:
    """Some workers on machines that have adapters of it in memory."""
    on_node, holders = question.workers.on_node, question.costs.nodes.holders
    if not holders:
        return []
    return [
        worker
        for use in signature.uses
        for adapter in use.adapters
        for node in islice(holders.get(adapter, ()), MOST_NEAR)
        for worker in on_node.get(node, ())
    ]


def _least_evicting(costs: Costs, signature: Signature, workers: Sequence[Worker]) -> Worker:
    if len(workers) == 1:
        return workers[0]
    return min(workers, key=lambda w: _harm(costs, signature, w))


def _harm(costs: Costs, signature: Signature, worker: Worker) -> tuple[bool, int, float, WorkerId]:
    """What of two workers that should finish it equally soon the better one has less of. The last but one sends new
    adapters where nothing was asked for lately."""
    setup = costs.setup(signature, worker)
    evicted_bytes = 0 if setup is None else setup.evicted_bytes(worker)
    return is_divided(signature, worker), evicted_bytes, worker.idle_since, worker.worker_id


def _first_for_idle(look: _Look, line: Line, idle: Worker, extra_seconds: float) -> int | None:
    """The place in the line of the first task (of its head's priority) that the worker `idle` should finish sooner than
    busy ones, which take those before it; None when they take all. What they take is promised."""
    question = look.question
    if question.workers.busy_count == 0 or (extra_seconds == 0.0 and question.workers.are_alike):
        return 0
    costs, task = question.costs, line.head
    finish_seconds = extra_seconds + costs.resident_seconds(task.spec, task.signature, idle)
    place = 0
    for seconds, run_seconds, worker in sorted(_sooner(look, task, idle, finish_seconds), key=lambda found: found[0]):
        fits = 1 if run_seconds <= 0 else 1 + int((finish_seconds - seconds) / run_seconds)
        taken = min(fits, len(line.tasks) - place)
        look.promised[worker.worker_id] = seconds + (taken - 1) * run_seconds
        place += taken
        if place >= len(line.tasks):
            return None
    return place if line.tasks[place].priority == task.priority else None


def _sooner(look: _Look, task: Task, idle: Worker, finish_seconds: float) -> list[tuple[float, float, Worker]]:
    """Busy workers that should have finished `task` before that: in how many seconds, of which how many it runs. Where
    the idle one would run it in parts, one that runs it whole need only be no later."""
    question, found = look.question, []
    costs, signature = question.costs, task.signature
    divided = is_divided(signature, idle)
    for worker in _busy(question, signature, finish_seconds):
        wait_seconds = look.promised.get(worker.worker_id)
        if wait_seconds is None:
            wait_seconds = worker.wait_seconds(question.at)
        if wait_seconds is None or wait_seconds >= finish_seconds:
            continue
        extra_seconds = costs.extra_seconds(task.spec, signature, worker)
        if extra_seconds is None:
            continue
        look.seen.append((wait_seconds, extra_seconds, worker))
        run_seconds = costs.resident_seconds(task.spec, signature, worker)
        seconds = wait_seconds + extra_seconds + run_seconds
        whole_instead = divided and not is_divided(signature, worker)
        if seconds < finish_seconds or (whole_instead and seconds == finish_seconds):
            found.append((seconds, run_seconds, worker))
    return found


def _busy(question: Question, signature: Signature, finish_seconds: float) -> Iterable[Worker]:
    """Busy workers that may be free before that, some of them: those that hold what it uses or are near its adapters,
    since on others of the same sort it would take no less than on an idle one; where there are other sorts, also the
    first of all."""
    workers, latest = question.workers, question.at + finish_seconds
    found: dict[Worker, None] = {}
    for use in signature.uses:
        holders = workers.holders.get(use.component, _NOBODY)
        if len(holders) <= MOST_BUSY:
            found.update((w, None) for w in holders if not w.is_idle)
        else:
            first = islice(workers.busy, MOST_BUSY)
            found.update((w, None) for end, _, w in first if end < latest and w in holders)
    found.update((w, None) for w in _near(question, signature) if not w.is_idle)
    if not workers.are_alike:
        found.update((w, None) for end, _, w in islice(workers.busy, MOST_BUSY) if end < latest)
    return found
