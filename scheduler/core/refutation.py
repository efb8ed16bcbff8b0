"""What workers find out about files: results that were made with another file than the expected one do not count."""

from __future__ import annotations

from collections.abc import Container, Sequence

from modelpool.pool.values.specs.spec import ComponentKey, FileVerdict, TaskId, WorkerId
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.core.membership import Membership
from modelpool.scheduler.core.node_limits import NodeLimits
from modelpool.scheduler.core.send_ahead import SendAhead
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.model.file_verdicts import FileVerdicts, Origin, Origins
from modelpool.scheduler.model.jobs import TaskStatus
from modelpool.scheduler.model.messages import Command, DropWeights, FilesJudged, StopTask
from modelpool.scheduler.model.story import Story
from modelpool.scheduler.model.workers import Worker, WorkerTable


class Refutation:
    """Drops what was made with wrong files. Methods append the commands that they cause to `out`."""

    def __init__(
        self,
        verdicts: FileVerdicts,
        costs: Costs,
        story: Story,
        worker_table: WorkerTable,
        demand: Demand,
        node_limits: NodeLimits,
        membership: Membership,
        send_ahead: SendAhead,
        out: list[Command],
    ) -> None:
        #: what workers have found out about the files that they use
        self.verdicts = verdicts
        self._costs = costs
        self._story = story
        self._worker_table = worker_table
        self._demand = demand
        self._node_limits = node_limits
        self._membership = membership
        self._send_ahead = send_ahead
        self._out = out

    def files_judged(self, event: FilesJudged) -> None:
        """A worker knows of files whether they are the expected ones."""
        worker = self._worker_table.current(event.worker_id, event.incarnation)
        if worker is None or not worker.live:
            return
        machine = self._costs.nodes.of(worker.spec)
        right, wrong = list[Origin](), list[Origin]()
        differing: dict[ComponentKey, None] = {}
        for file in event.files:
            is_right = file.verdict is FileVerdict.RIGHT
            origin = self.verdicts.note((event.worker_id, event.incarnation), file.state, is_right)
            (right if is_right else wrong).append(origin)
            if machine is not None and is_right:
                machine.is_right(file.files)
            elif file.verdict in (FileVerdict.DIFFERS, FileVerdict.UNREADABLE):
                differing.update(dict.fromkeys(file.components))
                if machine is not None:
                    machine.differs(file)
        if right:
            self._demand.files_right(frozenset(right))
        near = [other for other in self._worker_table.workers.values() if _shares_files(other, worker)]
        if wrong:
            reason = next(file.reason for file in event.files if file.verdict is not FileVerdict.RIGHT)
            self._refute(frozenset(wrong), near, differing, reason)
        if machine is not None:
            self._node_limits.update(machine.node)
            for other in near:
                other.files_changed()
        if wrong:
            for other in near if differing else [worker]:
                self._drop_weights(other)
        if not self._demand.results.origins_from(event.worker_id, event.incarnation):
            self.verdicts.pending.pop((event.worker_id, event.incarnation), None)
        self._membership.recheck_waiting()

    def _refute(self, wrong: Origins, near: Sequence[Worker], differing: Container[ComponentKey], reason: str) -> None:
        """States of files are not the expected ones: drop the results that were made with them, and stop the runs of
        what read these, and of what uses the `differing` files on the workers `near` them."""
        removed = self._demand.results.made_with(wrong)
        lost = set(removed)
        for worker in self._worker_table.workers.values():
            is_near = worker in near
            queued = {entry.task_id: entry for entry in worker.queue}
            refuted: set[TaskId] = set()
            for task_id in (*worker.task_ids, *queued):
                task = self._demand.tasks[task_id]
                uses = is_near and any(key in differing for key, _ in task.cost_class.files)
                reads = not (lost.isdisjoint(task.spec.needs) and wrong.isdisjoint(task.origins))
                if not uses and not reads and refuted.isdisjoint(task.follows):
                    continue
                refuted.add(task_id)
                if task.is_refuted:
                    continue
                was_asked = task.status is TaskStatus.STOPPING or task.timed_out_at is not None
                task.is_refuted = True
                self._story.note(task, f"does not count: {reason}")
                if task_id in queued:
                    self._send_ahead.ask_back(worker, queued[task_id], "it does not count")
                elif not was_asked:
                    self._out.append(StopTask(worker.worker_id, worker.incarnation, task_id, task.attempt))
        self._demand.remove_results(removed)

    def refute_lost_workers(self) -> bool:
        """Nobody finds out any more with which files workers that are gone have made results. Returns whether there are
        any such workers."""
        if not self.verdicts.pending:
            return False
        lost = self.verdicts.lost(self._is_live)
        for worker_id, incarnation in lost:
            wrong = self._demand.results.origins_from(worker_id, incarnation)
            if wrong:
                self._refute(wrong, (), (), f"{worker_id} was lost before its files were known")
        return bool(lost)

    def _is_live(self, worker_id: WorkerId, incarnation: int) -> bool:
        worker = self._worker_table.current(worker_id, incarnation)
        return worker is not None and worker.live

    def _drop_weights(self, worker: Worker) -> None:
        """Have a worker take all weights off its GPU: at once if it is idle, else when its run has ended."""
        self._out.append(DropWeights(worker.worker_id, worker.incarnation))
        if worker.is_idle and worker.loading is None and worker.residency is not None:
            self._worker_table.assume(worker, Residency(worker.residency.capacity_bytes))


def _shares_files(worker: Worker, other: Worker) -> bool:
    """Whether both are up on one machine."""
    if worker is other or worker.spec is None or other.spec is None or not worker.live:
        return worker is other
    return bool(worker.spec.node) and worker.spec.node == other.spec.node
