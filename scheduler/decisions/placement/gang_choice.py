"""Decides how many GPUs share a run, and which. Pure: reads the query, changes nothing.

Rules
1. The workers are on one machine and of one kind.
2. Of the numbers of GPUs that the task may have, the one counts with which it should complete soonest: the slowest
   load of a member, the time until they have found each other (`FORMING_SECONDS`: a group is formed for each run), and
   the run, with the weights that members read from their hosts or from each other's GPUs in its steps. Of two, the
   larger one must be sooner by `LEAST_GAIN`.
3. Only GPUs that nothing else waits for are used, but for those that are kept free for deadlines, and only as much GPU
   time as the load leaves (`GangLoad`): under load a run has one GPU. A run that takes less GPU time on several than on
   one, as weights that do not fit on one stream no more, gets them whatever waits.
4. A task that would miss its deadline gets the least number of GPUs with which it meets it, whatever waits. One that
   misses it anyway is treated as if it had none.
5. A task that continues after a loss, or with another number of GPUs (`Task.resume_degree`), gets as many of them as
   are idle, whatever waits: it had them.
6. Of the workers of a machine, those with least to load are taken; of equal ones, those that shared the last run.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from modelpool.pool.values.specs.spec import NodeId
from modelpool.scheduler.decisions.costs.gang_costs import gang_extra_seconds, moving_seconds, streams
from modelpool.scheduler.decisions.placement.placement_query import PlacementQuery
from modelpool.scheduler.model.gang_times import FORMING_SECONDS
from modelpool.scheduler.model.jobs import Task
from modelpool.scheduler.model.workers import Worker

#: a larger number of GPUs must complete the task sooner by this part
LEAST_GAIN = 0.05
#: idle workers, and machines, that are considered
MOST_IDLE = 512
MOST_MACHINES = 64


class GangChoice:
    """A number of GPUs for a run, and the workers, the one that leads first.

    extra_seconds  until all of them are ready: loads, and finding each other; and for weights that stream
    run_seconds    of the run on them without that
    moving_seconds  for weights that stream, of `extra_seconds`
    alone_seconds  until it would complete on one GPU; infinity if it cannot run there
    """

    __slots__ = ("alone_seconds", "extra_seconds", "moving_seconds", "note", "run_seconds", "workers")

    def __init__(
        self,
        workers: tuple[Worker, ...],
        extra_seconds: float,
        run_seconds: float,
        moving_seconds: float,
        alone_seconds: float,
        note: str,
    ) -> None:
        self.workers = workers
        self.extra_seconds = extra_seconds
        self.run_seconds = run_seconds
        self.moving_seconds = moving_seconds
        self.alone_seconds = alone_seconds
        self.note = note

    @property
    def seconds(self) -> float:
        """Until the run completes."""
        return self.extra_seconds + self.run_seconds

    @property
    def gpu_seconds(self) -> float:
        """GPU time of the run, all members together, without the time until they are ready."""
        return len(self.workers) * (self.run_seconds + self.moving_seconds)


def choose_gang(
    query: PlacementQuery,
    task: Task,
    alone: tuple[Worker, float] | None,
    most_times: float,
    deadline: float,
    reserved: int = 0,
) -> GangChoice | None:
    """Return the workers that should share the next run of `task`, which would start on `alone` (worker and extra
    seconds) otherwise; None if it had better run there.

    most_times  how many times its GPU time on one GPU it may take
    deadline    when the run must have completed; infinity if there is none
    reserved    idle GPUs that stay free for jobs with deadlines that may come (`GangLoad.reserved`)
    """
    degrees = [degree for degree in task.degrees if degree > 1]
    if not degrees:
        return None
    machines = _machines(query, task)
    run_seconds = inf if alone is None else query.costs.resident_seconds(task.spec, task.cost_class, alone[0])
    alone_seconds = inf if alone is None or 1 not in task.degrees else alone[1] + run_seconds
    found = [choice for degree in degrees if (choice := _soonest(query, task, degree, machines, alone_seconds))]
    if not found:
        return None
    if task.resume_degree:
        fitting = [choice for choice in found if len(choice.workers) <= task.resume_degree]
        best = fitting[-1] if fitting and task.resume_degree > 1 else None
        return None if best is None else _noted(best, "it continues on as many")
    if alone_seconds == inf:
        return _noted(_best(found, inf) or found[0], "it never runs on one")
    idle = query.workers.idle_count - reserved
    spare = idle - max(0, query.backlog.count - 1)
    gpu_seconds = run_seconds
    if alone is not None:
        gpu_seconds += moving_seconds(query.costs, task.spec, task.cost_class, alone[0], 1)
    affordable = [
        choice
        for choice in found
        if (len(choice.workers) <= spare and choice.gpu_seconds <= most_times * gpu_seconds)
        or (len(choice.workers) <= idle and choice.gpu_seconds <= gpu_seconds)
    ]
    best = _best(affordable, alone_seconds)
    best_seconds = alone_seconds if best is None else best.seconds
    if query.at + best_seconds > deadline:
        in_time = [choice for choice in found if query.at + choice.seconds <= deadline]
        if in_time:
            return _noted(in_time[0], f"it would miss its deadline in {deadline - query.at:.0f} s on fewer")
    kept = f", and {reserved} stay free for jobs with deadlines" if reserved else ""
    return None if best is None else _noted(best, f"nothing else waits for them{kept}")


def _best(choices: Sequence[GangChoice], seconds: float) -> GangChoice | None:
    """Rule 2: of choices with rising numbers of GPUs, the one that is worth it, compared with `seconds` on fewer."""
    best: GangChoice | None = None
    for choice in choices:
        if choice.seconds < (1.0 - LEAST_GAIN) * seconds:
            best, seconds = choice, choice.seconds
    return best


def _noted(choice: GangChoice, reason: str) -> GangChoice:
    """Say why these workers share the run."""
    names = ", ".join([worker.worker_id for worker in choice.workers])
    instead = "" if choice.alone_seconds == inf else f" instead of {choice.alone_seconds:.2f} s on one"
    choice.note = f"{len(choice.workers)} GPUs ({names}), as {reason}: {choice.seconds:.2f} s{instead}"
    return choice


def _machines(query: PlacementQuery, task: Task) -> list[list[tuple[Worker, float]]]:
    """The idle workers that can run the task, with their extra seconds, by machine and kind."""
    by_machine: dict[tuple[NodeId, str], list[tuple[Worker, float]]] = {}
    for worker in query.workers.some_idle(MOST_IDLE):
        spec = worker.spec
        if spec is None or not spec.node:
            continue
        extra_seconds = query.costs.extra_seconds(task.spec, task.cost_class, worker)
        if extra_seconds is not None:
            by_machine.setdefault((spec.node, spec.device_name), []).append((worker, extra_seconds))
    found = [workers for workers in by_machine.values() if len(workers) > 1]
    found.sort(key=lambda workers: -len(workers))
    return found[:MOST_MACHINES]


def _soonest(
    query: PlacementQuery,
    task: Task,
    degree: int,
    machines: Sequence[Sequence[tuple[Worker, float]]],
    alone_seconds: float,
) -> GangChoice | None:
    """The workers of one machine with which a run on `degree` GPUs completes soonest."""
    costs, spec, cost_class = query.costs, task.spec, task.cost_class
    best: GangChoice | None = None
    for workers in machines:
        if len(workers) < degree:
            continue
        moving = 0.0
        there = workers
        if any(streams(costs, cost_class, worker) for worker, _ in workers):
            there = _in_gang(query, task, degree, workers)
        members, extra_seconds = _members(there, degree)
        if there is not workers:
            moving = max([moving_seconds(costs, spec, cost_class, worker, degree) for worker in members])
        run_seconds = costs.gang_seconds(spec, cost_class, members[0], degree, task.remaining)
        if best is None or extra_seconds + run_seconds < best.seconds:
            best = GangChoice(members, extra_seconds, run_seconds, moving, alone_seconds, "")
    return best


def _in_gang(
    query: PlacementQuery, task: Task, degree: int, workers: Sequence[tuple[Worker, float]]
) -> list[tuple[Worker, float]]:
    """The workers with their extra seconds as members of a gang, in which less may have to come from their host."""
    found: list[tuple[Worker, float]] = []
    for worker, alone_seconds in workers:
        seconds = gang_extra_seconds(query.costs, task.spec, task.cost_class, worker, degree)
        found.append((worker, alone_seconds if seconds is None else seconds))
    return found


def _members(workers: Sequence[tuple[Worker, float]], degree: int) -> tuple[tuple[Worker, ...], float]:
    """Rule 6: the best workers of a machine, and the seconds until they are ready."""
    cheapest = sorted(workers, key=lambda pair: (pair[1], pair[0].worker_id))[:degree]
    members = tuple([worker for worker, _ in cheapest])
    extra_seconds = cheapest[-1][1]
    kept = _last_together(workers, degree)
    if kept is not None:
        kept_extra = max([extra for worker, extra in workers if worker in kept])
        if kept_extra <= extra_seconds:
            return kept, kept_extra + FORMING_SECONDS
    return members, extra_seconds + FORMING_SECONDS


def _last_together(workers: Sequence[tuple[Worker, float]], degree: int) -> tuple[Worker, ...] | None:
    """So many workers that shared their last run, in the order of their ranks, if all of them are among `workers`."""
    known = {(worker.worker_id, worker.incarnation): worker for worker, _ in workers}
    for worker, _ in workers:
        last = worker.last_gang
        if len(last) == degree and last[0].worker_id == worker.worker_id:
            found = [known.get((member.worker_id, member.incarnation)) for member in last]
            together = tuple([one for one in found if one is not None and one.last_gang == last])
            if len(together) == degree:
                return together
    return None
