"""Our placement: what finishes the queue soonest. A function of what it is shown; it changes nothing.

Rules, for tasks of the highest priority that fit an idle worker; if none of them is to start, for the next lower ones
0. What is hurried (a deadline comes near, its worker was lost) goes first; for its deadline it may wait as under 5.
1. The task that is oldest in order and was passed over as often as the limit allows goes first too, and waits for
   nobody.
2. A line whose first task waited long for what its load costs goes next, as far as the account of such loads
   (`scheduler.placement.switch_budget`) allows: loads are paid by time, so who waits longer than 1 / share of a load
   gets it. Jobs
   that were asked for together do not hurry each other: all of them are wanted. Where that worker has something to run
   that needs no load, this goes first, and the load is done beside it for nothing (`scheduler.placement.preload`).
3. Then tasks whose weights are all there: what finishes a job first, then in order. What finishes a job counts as such
   where its weights take little time beside its run: jobs that are begun are done soon, and do not pile up.
4. Then what costs least (upload, patches, streaming), with what of that is wasted counted twice, without what others
   pay who wait for the same (`scheduler.placement.shared_loads`), and with three tenths of what it waited taken off,
   less where
   that came to more than a run for who waited longest of them; of the first lines in order, and of those that use what
   is on the idle workers. While it can, the account pays what that costs more than the cheapest, but no more than what
   its waiting was worth: the cheapest may be one that waits for a busy worker. Wasted is what it costs here beyond what
   it would on the worker that has most of it: a model that is nowhere has to be loaded by somebody, a second copy need
   not be made.
5. Under 2 and 4 a task waits for a busy worker that should finish it sooner, counting the tasks that wait for that one
   already; none waits for a run of unknown length. So a line gets a second worker exactly when waiting takes longer
   than a load.
6. When no worker is busy, something starts.
7. Rules 2 to 5 hold among users whose turn it is: who is ahead of the first in order by more than the window of shares
   (`scheduler.queue.shares`) is looked at when none of those starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice

from modelpool.scheduler.costs.cost_model import least_extra_seconds
from modelpool.scheduler.placement.idle_workers import MOST_IDLE, best_idle, least_evicting, near
from modelpool.scheduler.placement.overlap import comes_beside
from modelpool.scheduler.placement.reservations import Look, first_for_idle, is_sooner_elsewhere
from modelpool.scheduler.placement.rules import Choice, Question, choice_of
from modelpool.scheduler.placement.shared_loads import seconds_of_others
from modelpool.scheduler.queue.backlog import Line
from modelpool.scheduler.queue.shares import turn_end
from modelpool.scheduler.tables.cost_classes import LAST_RANK, Signature
from modelpool.scheduler.tables.jobs import Order, Task
from modelpool.scheduler.tables.placement_record import Rule
from modelpool.scheduler.tables.user_account import NO_TAG
from modelpool.scheduler.tables.workers import Worker

#: lines that read what one idle worker has
MOST_NEAR = 8
#: lines, the cheapest first, that are asked whether they would wait for a busy worker; when all of them would, whatever
#: is left is looked at when one of those is free
MOST_ASKED = 16
#: files of an idle worker's machine, the last read first, that are looked at
MOST_FILES = 32
#: lines that finish jobs, and idle workers for each, that are looked at
MOST_FINISHING = 4
#: lines that are gone through for them, where the others are of one batch with what starts anyway
MOST_LINES = 256
#: seconds of load that a second of waiting is worth; but the longest wait is worth no more than a run.
#: From benchmarks/scheduling.py: at 0.1 the last percent waited longer than in plain order on the calibrated workload;
#: and where GPUs are short everybody waits long, and counting all of that would change weights with each task
WAITING = 0.3
#: of a run: to bring a VAE for a decode takes little more than this on any GPU, and its image waits for nothing else
LITTLE = 0.2
#: lines, the oldest first, that are looked at for having waited long
MOST_RIPE = 4


class _Offer:
    """A line and the best idle worker for it.

    extra_seconds   what it takes there beside the run
    wasted_seconds  what of that is taken by a copy beside those that there are
    price_seconds   both, without what others pay who wait for the same
    waited_seconds  by its first task; 0 for a batch, which does not hurry
    """

    __slots__ = ("extra_seconds", "line", "price_seconds", "waited_seconds", "wasted_seconds", "worker")

    def __init__(
        self,
        line: Line,
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


def soonest(question: Question) -> Choice | None:
    """The start that finishes the queue soonest; None when every ready task is better off waiting for a busy worker."""
    backlog, most_bytes = question.backlog, question.workers.largest_idle_bytes
    look = Look(question)
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
    look = Look(question)
    for deadline, _, task in question.backlog.hurried.now(question.at):
        best = best_idle(question, task) if task.priority == priority else None
        if best is None:
            continue
        if task.passed >= question.config.overtaking_limit:
            note = f"passed over {task.passed:.0f} times by every worker, so it goes first"
            return choice_of(question, task, best[0], Rule.WAITED, note)
        if task.goes_first:
            return choice_of(question, task, best[0], Rule.LOST, "its worker was lost, so it goes first")
        if is_sooner_elsewhere(look, task, *best):
            continue
        note = f"{deadline - question.at:.0f} s before its deadline, so it goes first"
        return choice_of(question, task, best[0], Rule.DEADLINE, note, look.seen)
    return None


def _of_priority(look: Look, oldest: Task) -> Choice | None:
    """What to start among tasks of one priority, the first of which in order is `oldest`."""
    question = look.question
    if question.backlog.hurried and (choice := _hurried(question, oldest.priority)) is not None:
        return choice
    if oldest.passed >= question.config.overtaking_limit and (best := best_idle(question, oldest)) is not None:
        note = f"passed over {oldest.passed:.0f} times by every worker, so it goes first"
        return choice_of(question, oldest, best[0], Rule.WAITED, note)
    latest_tag = turn_end(oldest.order, question.config.share_window_seconds * question.workers.count)
    choice = _in_turn(look, oldest, latest_tag)
    if choice is None and latest_tag < NO_TAG:  # those whose turn it is wait for busy workers: no reason to be idle
        choice = _in_turn(Look(question), oldest, NO_TAG)
    return choice


def _in_turn(look: Look, oldest: Task, latest_tag: float) -> Choice | None:
    """Rules 2 to 5, for tasks of users whose turn it is by then."""
    question = look.question
    choice = _resident(look, oldest, latest_tag) or _cheapest(look, oldest, latest_tag)
    return None if choice is None else _ripe(question, oldest, choice) or choice


def _resident(look: Look, oldest: Task, latest_tag: float) -> Choice | None:
    """Rule 3."""
    question, priority = look.question, oldest.priority
    workers, extra_seconds = question.workers, question.costs.extra_seconds
    best: Line | None = None
    on: list[Worker] = []
    best_rank, best_order = False, oldest.order
    for line, worker in _pairs(question):
        order, signature = line.order, line.signature
        rank = signature.rank == LAST_RANK
        if rank < best_rank or order[0] != -priority or order[1] > latest_tag:
            continue
        if best is not None and line is not best and rank == best_rank and order > best_order:
            continue
        extra = extra_seconds(line.head.spec, signature, worker)
        if extra is None or (extra > 0.0 and (not rank or not _is_little(question, line.head, worker, extra))):
            continue
        if line is best:
            on.append(worker)
        else:
            best, best_rank, best_order, on = line, rank, order, [worker]
    if best is None:
        return None
    if workers.are_alike:
        worker = on[0] if len(on) == 1 else least_evicting(question.costs, best.signature, on)
        return choice_of(question, best.head, worker, Rule.RESIDENT)
    soonest_idle = best_idle(question, best.head)  # a faster one may have to load, and be sooner all the same
    assert soonest_idle is not None, f"{best.head.name} fits on {on[0].worker_id}"
    place = first_for_idle(look, best, *soonest_idle)
    rule = Rule.RESIDENT if soonest_idle[1] == 0.0 else Rule.CHEAPEST
    return None if place is None else choice_of(question, best.tasks[place], soonest_idle[0], rule)


def _is_little(question: Question, task: Task, worker: Worker, extra_seconds: float) -> bool:
    """What it takes to bring its weights is little beside its run."""
    return extra_seconds <= LITTLE * question.costs.resident_seconds(task.spec, task.signature, worker)


def _pairs(question: Question) -> Iterable[tuple[Line, Worker]]:
    """Lines and idle workers that may have all that they use, or need little for what finishes a job."""
    backlog, workers = question.backlog, question.workers
    if workers.idle_count <= backlog.line_count:
        pairs: list[tuple[Line, Worker]] = []
        if finishing := backlog.finishing(MOST_FINISHING):  # first: where one starts, the others need no look
            first = workers.some_idle(MOST_FINISHING)
            pairs = [(line, worker) for line in finishing for worker in first]
        for worker in workers.some_idle(workers.idle_count):
            pairs += [(line, worker) for line in backlog.using(worker.entries.values())]
        return pairs
    return [
        (line, worker)
        for line in backlog.lines(workers.largest_idle_bytes)
        for worker in _idle_with(question, line.signature)
    ]


def _ripe(question: Question, oldest: Task, cheaper: Choice) -> Choice | None:
    """Rule 2. `cheaper` is what would start without it."""
    if question.switch_seconds <= 0.0:
        return None
    if oldest.signature is cheaper.task.signature:
        return None  # its line is the first of those below
    look = Look(question)
    looked_at = 0
    for line in islice(question.backlog.lines(question.workers.largest_idle_bytes, oldest.order), MOST_LINES):
        task = line.head
        if task.priority != oldest.priority or line.signature is cheaper.task.signature:
            return None  # what starts anyway is the oldest of those that are left
        if task.batch and task.batch == cheaper.task.batch:
            continue
        looked_at += 1
        if looked_at > MOST_RIPE:
            return None
        best = best_idle(question, task)
        if best is None or best[1] == 0.0 or best[1] * question.patience > task.waited_seconds(question.at):
            continue
        if first_for_idle(look, line, *best) == 0:
            is_worked_on = best[0] is cheaper.worker and cheaper.why.chosen.extra_seconds == 0.0
            if is_worked_on and question.config.upload_ahead and _comes_beside(question, best[0], cheaper.task, task):
                cheaper.beside = task
                return cheaper
            note = f"it waited {task.waited_seconds(question.at):.0f} s"
            spent_seconds = max(0.0, best[1] - cheaper.why.chosen.extra_seconds)
            return choice_of(question, task, best[0], Rule.WAITED, note, look.seen, spent_seconds)
    return None


def _comes_beside(question: Question, worker: Worker, running: Task, coming: Task) -> bool:
    costs, backlog, workers = question.costs, question.backlog, question.workers
    return comes_beside(costs, backlog, workers, worker, running.signature, coming.signature)


def _cheapest(look: Look, oldest: Task, latest_tag: float) -> Choice | None:
    """Rule 4."""
    question = look.question
    offers: list[_Offer] = []
    for line in _candidates(question, oldest, latest_tag):
        best = best_idle(question, line.head)
        if best is not None:
            offers.append(_offer(question, line, *best))
    if not offers:
        return None
    worth = _worth_of_waiting(question, offers)
    ranked: list[tuple[float, int, Order, _Offer]] = []
    for offer in offers:
        line = offer.line
        ranked.append((offer.price_seconds - worth * offer.waited_seconds, -line.signature.rank, line.order, offer))
    ranked.sort()  # no two lines have one order: no more is compared than price, rank and order
    for _, _, _, offer in ranked[:MOST_ASKED]:
        look.seen = []
        line, worker = offer.line, offer.worker
        place = first_for_idle(look, line, worker, offer.extra_seconds)
        if place is not None and (place == 0 or _is_worth(question, line, place, worker, offer.wasted_seconds)):
            spent_seconds = _spent_on_waiting(question, offer, offers, worth)
            return choice_of(question, line.tasks[place], worker, Rule.CHEAPEST, "", look.seen, spent_seconds)
    return None


def _spent_on_waiting(question: Question, chosen: _Offer, offers: Sequence[_Offer], worth: float) -> float:
    """What the account pays for one that is not the cheapest."""
    if question.account_seconds <= 0.0:
        return 0.0
    least_seconds = min([offer.price_seconds for offer in offers])
    return min(chosen.price_seconds - least_seconds, worth * chosen.waited_seconds)


def _offer(question: Question, line: Line, worker: Worker, extra_seconds: float) -> _Offer:
    """What a line costs on this worker, the best of the idle ones for it."""
    wasted_seconds = extra_seconds - _least_extra(question, line.head, extra_seconds)
    others_seconds = seconds_of_others(question, line.signature, worker) if extra_seconds > 0.0 else 0.0
    price_seconds = max(0.0, wasted_seconds - others_seconds) + extra_seconds - others_seconds
    waited_seconds = 0.0 if line.head.batch else line.head.waited_seconds(question.at)
    return _Offer(line, worker, extra_seconds, wasted_seconds, price_seconds, waited_seconds)


def _worth_of_waiting(question: Question, offers: Sequence[_Offer]) -> float:
    """Seconds of load that a second of waiting is worth now: less than usual where who waited longest of these would
    get more for it than its run takes.

    Also where that is a short run, which makes everybody's waiting worth little: with the longest run of the offers
    instead, each one's own, or none that is short beside its load, the last percent waited longer where GPUs hardly
    keep up (benchmarks/RESULTS.md).
    """
    longest = offers[0]
    for offer in offers:
        if offer.waited_seconds > longest.waited_seconds:
            longest = offer
    line = longest.line
    most_seconds = question.costs.resident_seconds(line.head.spec, line.signature, longest.worker)
    return WAITING if longest.waited_seconds * WAITING <= most_seconds else most_seconds / longest.waited_seconds


def _least_extra(question: Question, task: Task, extra_seconds: float) -> float:
    """The least of `extra_seconds` and what the task would take on some workers that have a part of what it
    uses."""
    uses = task.signature.uses
    if not uses or extra_seconds == 0.0:
        return extra_seconds
    holders: Iterable[Worker] = islice(question.workers.holders.get(uses[0].component, ()), MOST_NEAR)
    if question.costs.nodes.holders:
        holders = chain(near(question, task.signature), holders)
    return least_extra_seconds(question.costs, task.spec, task.signature, holders, extra_seconds)


def _is_worth(question: Question, line: Line, place: int, worker: Worker, wasted_seconds: float) -> bool:
    """What is left of the line for another worker takes longer than the copy that it needs for that."""
    task = line.head
    run_seconds = question.costs.resident_seconds(task.spec, task.signature, worker)
    return (len(line.tasks) - place) * run_seconds >= wasted_seconds


def _candidates(question: Question, oldest: Task, latest_tag: float) -> Iterable[Line]:
    """Lines of the priority of `oldest`, each once: the first in order, and what may be cheap on an idle worker."""
    backlog, workers = question.backlog, question.workers
    found = dict.fromkeys(islice(backlog.lines(workers.largest_idle_bytes, oldest.order), question.config.window))
    for worker in workers.some_idle(MOST_IDLE):
        for component in worker.entries:
            for line in backlog.of_component(component, MOST_NEAR):
                found[line] = None
        node = question.costs.nodes.of(worker.spec) if backlog.reads_adapters else None
        for file in () if node is None else islice(reversed(node.files), MOST_FILES):
            found.update(dict.fromkeys(islice(backlog.of_adapter(file), MOST_NEAR)))
    first = -oldest.priority
    chosen: list[Line] = []
    for line in found:
        priority, tag, _ = line.order
        if priority == first and tag <= latest_tag:
            chosen.append(line)
    return chosen


def _idle_with(question: Question, signature: Signature) -> list[Worker]:
    """Some idle workers that hold the first thing that it uses; of those that need no weights, any."""
    if not signature.uses:
        return list(islice(question.workers.idle_workers(), MOST_IDLE))
    return question.workers.idle_holders(signature.uses[0].component, MOST_IDLE)
