"""Which weights a worker should bring to its GPU while it runs something: those of tasks that are next to need some.

Rules
1. A worker that begins a run is told of some tasks for its length, of no more than fit into it; one that was told of
   nothing is told when a job comes in. What is told holds for this run only: when the next one begins it is decided
   anew.
2. What follows from the run itself comes first, then what waits, in order, each with what follows from it.
3. A line is brought when the work for what is on that GPU will be done before its load would be, or when its first task
   waited for many times the length of its load: beside a run a load takes no time of the GPU, but its room, and what
   leaves for it may have to be loaded again.
4. None is brought that other workers should have done before this one could begin with it; nor at the cost of what
   waits for weights that are there: these do not leave for it, and get no other patches. What was brought because
   somebody waited long is used before more is brought for that reason.
5. None of which the run hides a small part only. Only files that the machine has in memory: a run must not wait for its
   disk. Nothing beside runs that stream, which need the link themselves, or of unknown length.
6. What will have arrived by the end of the run is taken to be there (`pool.plan.preload_plan`, over the link); its
report corrects
   that. So a load that is hidden costs nothing in the choices to come, and one that is half hidden half of it.
7. The placement puts off a load for who waited long where it can be done beside a run (`Choice.beside`): that comes
   before all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from modelpool.pool.plan.preload_plan import Held
from modelpool.pool.specs.outlook import NO_OUTLOOK, Outlook
from modelpool.pool.specs.spec import ComponentKey, TaskId, WorkerId
from modelpool.scheduler.costs.cost_model import Costs
from modelpool.scheduler.placement.eviction_hints import expected
from modelpool.scheduler.placement.overlap import ahead_of, held_by, is_at_hand, is_switch_of, may_come, worked_with
from modelpool.scheduler.placement.rules import Choice
from modelpool.scheduler.queue.demand import Demand
from modelpool.scheduler.tables.config import SchedulerConfig
from modelpool.scheduler.tables.cost_classes import Signature
from modelpool.scheduler.tables.jobs import Task
from modelpool.scheduler.tables.messages import Command, UploadAhead
from modelpool.scheduler.tables.placement_record import Brought
from modelpool.scheduler.tables.story import Story
from modelpool.scheduler.tables.workers import Fleet, Worker

#: tasks that one run's worker is told of
MOST_TASKS = 3
#: lines of waiting tasks, in order, that are looked at
MOST_LINES = 8
#: tasks that read what a run makes, and holders of a component, that are looked at
MOST_READERS = 4
MOST_HOLDERS = 8
#: busy workers, soonest free first, of which one is told when a job comes in
MOST_TOLD = 4
#: who would load for more than this part of a load is no better place than any other
MOST_OF_LOAD = 0.5
#: of a load that is hidden, as much counts here: it takes room, and what leaves for it is loaded again
COUNTED = 3.0
#: less than this is not worth a message
LEAST_SAVED_SECONDS = 0.005
#: nor is a run that hides less than this part of a load. On the zipf rows and the batch of benchmarks/scheduling.py
#: loads take about as long at 0.05 as at 0.25 (up to 7% longer, or less), at 0.5 up to 14% longer; but where runs are
#: short beside loads (benchmarks/against_ray.py) two workers get 40 requests a second at 0.02, 37 at 0.1, 35 at 0.25
LEAST_PART = 0.05
#: work for what is there, as a multiple of the load that comes: below it the load begins. On the trace of
#: benchmarks/against_ray.py, at 1 four workers load half as often again for no more throughput; at 0.5 two are slower
WORK_LEFT = 0.6
#: a line is brought whatever work there is when its first task waited for so many times the length of its load ...
PATIENCE = 20.0
#: ... unless for so many tasks something was brought that was not used yet
MOST_UNUSED = 1


class UploadingAhead:
    """Tells workers what to bring beside their runs. Appends its commands to `out`."""

    def __init__(
        self, config: SchedulerConfig, costs: Costs, demand: Demand, fleet: Fleet, story: Story, out: list[Command]
    ) -> None:
        self._config = config
        self._costs = costs
        self._demand = demand
        self._fleet = fleet
        self._story = story
        self._out = out
        #: workers that began a run since the last look, with the task that was put off for it
        self._started: list[tuple[Worker, Task | None]] = []
        #: workers that were told of something since their run began
        self._told: set[WorkerId] = set()

    def run_started(self, worker: Worker, signature: Signature, choice: Choice) -> None:
        """A worker began a run, and what that leaves on it is assumed."""
        if not self._config.upload_ahead:
            return
        self._told.discard(worker.worker_id)
        worker.ahead = {one: size for one, size in worker.ahead.items() if one is not signature and one.tasks}
        why = choice.why
        if why.streamed_bytes or worker.expected_end is None:
            worker.loaded_at = None
            return
        worker.loaded_at = self._costs.at + why.chosen.extra_seconds
        self._started.append((worker, choice.beside))

    def look(self, job_came: bool) -> None:
        """All that can start has started: tell those that began to run, and another one when a job came in."""
        for worker, put_off in self._started:
            if not worker.is_idle and worker.live:
                self._tell(worker, put_off)
        self._started.clear()
        if job_came and self._demand.backlog.count:
            for _, _, worker in self._fleet.whereabouts.busy[:MOST_TOLD]:
                if worker.worker_id not in self._told and worker.loaded_at is not None:
                    self._tell(worker)
                    return

    def _tell(self, worker: Worker, put_off: Task | None = None) -> None:
        """Tell the worker, and assume what comes of it."""
        assert worker.expected_end is not None, f"{worker.name} runs for nobody knows how long"
        assert worker.loaded_at is not None, f"{worker.name} streams"
        window_seconds = worker.expected_end - max(self._costs.at, worker.loaded_at)
        if window_seconds < LEAST_SAVED_SECONDS or not worker.wanted:
            return
        sooner: dict[ComponentKey, None] = {}
        for signature in worker.ahead:
            for key in signature.components:
                sooner[key] = None
        found = self._candidates(worker, window_seconds, sooner)
        if put_off is not None and put_off.ready_at is not None:
            found = [put_off, *(task for task in found if task.signature is not put_off.signature)]
        tasks: list[Task] = []
        for task in found:
            if is_at_hand(self._costs, worker, task.signature) and not is_switch_of(worker, task.signature, sooner):
                tasks.append(task)
                if len(tasks) == MOST_TASKS:
                    break
        if tasks:
            self._bring(worker, tasks, window_seconds, sooner)

    def _bring(
        self, worker: Worker, tasks: Sequence[Task], window_seconds: float, sooner: Mapping[ComponentKey, None]
    ) -> None:
        """Tell the worker of those of these tasks of which something fits beside its run, in its room and its time."""
        costs, entries = self._costs, worker.entries
        assert worker.task_id is not None, f"{worker.name} runs nothing"
        running = self._demand.tasks[worker.task_id]
        coming = {key for task in tasks for key in task.signature.components}
        kept = tuple([key for key in sooner if key in entries and key not in coming])
        held, told, stays_bytes = held_by(worker, running.signature, worker.members, kept), list[TaskId](), 0
        for key in held.components:
            entry = entries.get(key)
            if entry is not None:
                stays_bytes += entry.resident_bytes
        if stays_bytes + held.run_bytes >= (worker.capacity_bytes or 0):
            return  # what follows takes longer than to see that
        least_bytes = LEAST_SAVED_SECONDS * worker.link_bytes_per_second
        needed: tuple[ComponentKey, ...] | None = None
        for task in tasks:
            if window_seconds < LEAST_SAVED_SECONDS:
                break
            if not may_come(costs, worker, held, task.signature, least_bytes):
                continue
            outlook = NO_OUTLOOK
            if costs.makes_room(task.signature, worker):
                if needed is None:
                    needed = expected(running, worker, self._demand, self._fleet.whereabouts)
                outlook = Outlook(needed)
            ahead = ahead_of(costs, worker, held, task.signature, outlook)
            upload_bytes, patch_seconds = ahead.upload_bytes, ahead.switches * costs.patch_seconds(worker)
            hidden_bytes = int((window_seconds - patch_seconds) * worker.link_bytes_per_second)
            hidden_bytes = min(hidden_bytes, upload_bytes)
            if hidden_bytes < least_bytes:
                continue
            if needed is None:
                needed = expected(running, worker, self._demand, self._fleet.whereabouts)
            assert worker.residency is not None, f"{worker.name} is not up"
            self._fleet.assume(worker, ahead.after(worker.residency, hidden_bytes))
            worker.ahead[task.signature] = worker.ahead.get(task.signature, 0) + hidden_bytes
            told.append(task.spec.task_id)
            self._story.note(task, Brought(hidden_bytes, worker.worker_id))
            window_seconds -= patch_seconds + upload_bytes / worker.link_bytes_per_second
            held = Held(held.components.union(task.signature.components), held.run_bytes)
        if told and needed is not None:
            self._told.add(worker.worker_id)
            self._out.append(UploadAhead(worker.worker_id, worker.incarnation, tuple(told), needed, kept))

    def _candidates(self, worker: Worker, window_seconds: float, sooner: dict[ComponentKey, None]) -> list[Task]:
        """Tasks whose weights would be brought, the first to be tried first. Notes in `sooner` what is needed before
        them."""
        backlog, costs = self._demand.backlog, self._costs
        left_seconds, most_seconds, found = 0.0, window_seconds / LEAST_PART, dict[Signature, Task]()
        for task in self._readers(worker):
            extra = costs.extra_seconds(task.spec, task.signature, worker)
            if extra == 0.0:
                left_seconds += costs.resident_seconds(task.spec, task.signature, worker)
                for key in task.signature.components:
                    sooner[key] = None
            elif extra is None or extra > most_seconds:
                continue
            elif not self._is_sooner_elsewhere(task, 1, worker, extra, window_seconds):
                found[task.signature] = task
        if not backlog.count:
            return list(found.values())
        for signature in worker.ahead:
            line = backlog.line(signature)
            if line is not None:
                extra = costs.extra_seconds(line.head.spec, signature, worker)
                if extra and extra <= most_seconds:
                    found[signature] = line.head
        work_seconds, wanted = worked_with(costs, backlog, self._fleet.whereabouts, worker)
        left_seconds += work_seconds
        sooner.update(wanted)
        patience = PATIENCE if len(worker.ahead) < MOST_UNUSED else inf
        here_seconds = window_seconds + left_seconds
        is_work_left = left_seconds >= WORK_LEFT * most_seconds
        for line in backlog.first_lines(worker.capacity_bytes or 0, MOST_LINES):
            head = line.head
            waited_seconds = 0.0 if head.batch else head.waited_seconds(costs.at)
            # a load that is looked at is no shorter and no longer than this: none of these tasks is due
            is_never_due = is_work_left and waited_seconds < patience * LEAST_SAVED_SECONDS
            for task in () if is_never_due else (head, *self._readers_of(head)):
                extra = costs.extra_seconds(task.spec, task.signature, worker)
                if extra is None or not LEAST_SAVED_SECONDS <= extra <= most_seconds:
                    continue
                is_due = left_seconds < WORK_LEFT * extra or waited_seconds >= patience * extra
                if is_due and not self._is_sooner_elsewhere(task, len(line.tasks), worker, extra, here_seconds):
                    found.setdefault(task.signature, task)
            if found:
                break
            for key in head.signature.components:
                sooner[key] = None
        return list(found.values())

    def _readers(self, worker: Worker) -> Iterable[Task]:
        """The tasks that read what the worker makes now."""
        tasks = self._demand.tasks
        if not worker.mates:
            return () if worker.task_id is None else self._readers_of(tasks[worker.task_id])
        return [reader for task_id in worker.task_ids for reader in self._readers_of(tasks[task_id])]

    def _readers_of(self, task: Task) -> Iterable[Task]:
        """The first that read its result and run nowhere yet."""
        readers = self._demand.results.readers.get(task.spec.task_id)
        if readers is None or self._config.batch_limit > 1:
            return ()  # with batches they wait for others of their kind, wherever those are
        tasks, left, found = self._demand.tasks, MOST_READERS, list[Task]()
        for task_id in readers:
            reader = tasks[task_id]
            if reader.worker_id is None:
                found.append(reader)
            left -= 1
            if not left:
                break
        return found

    def _is_sooner_elsewhere(
        self, task: Task, count: int, worker: Worker, load_seconds: float, here_seconds: float
    ) -> bool:
        """A worker that has most of its weights, or gets them, should be done with so many of its like before this one
        could be with the first, which it could begin with in so many seconds."""
        costs, signature = self._costs, task.signature
        if not signature.components:
            return False
        holders = self._fleet.whereabouts.holders.get(signature.components[0])
        if holders is None:
            return False
        run_seconds = costs.resident_seconds(task.spec, signature, worker)
        stay_together = self._config.batch_limit > 1  # a line in two places makes smaller batches
        for place, other in enumerate(holders):
            if place == MOST_HOLDERS:
                break
            if other is worker:
                continue
            extra, wait = costs.extra_seconds(task.spec, signature, other), other.wait_seconds(costs.at)
            if extra is None or wait is None or extra > MOST_OF_LOAD * load_seconds:
                continue
            if (
                stay_together
                or wait + extra + count * run_seconds <= here_seconds + COUNTED * load_seconds + run_seconds
            ):
                return True
        return False
