"""What of one task's weights fits on a worker beside a run of another: `pool.plan.preload_plan` asked with what the
core believes.

Functions of what they are shown; they change nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from modelpool.pool.plan.preload_plan import MARGIN_PART, AheadPlan, Held, plan_ahead
from modelpool.pool.specs.outlook import NO_OUTLOOK, Outlook
from modelpool.pool.specs.spec import ComponentKey
from modelpool.scheduler.costs.cost_model import Costs
from modelpool.scheduler.queue.backlog import Backlog
from modelpool.scheduler.tables.cost_classes import Signature
from modelpool.scheduler.tables.worker_index import Whereabouts
from modelpool.scheduler.tables.workers import Worker

#: holders of a component that are looked at
MOST_HOLDERS = 8


def held_by(worker: Worker, signature: Signature, members: int, kept: Iterable[ComponentKey] = ()) -> Held:
    """What a run of so many tasks with this signature holds there, with what is to stay besides."""
    run_bytes = signature.way(worker.capacity_bytes or 0).activation_bytes * members
    return Held(frozenset((*signature.components, *kept)), run_bytes + signature.scratch_bytes)


def ahead_of(
    costs: Costs, worker: Worker, held: Held, signature: Signature, outlook: Outlook = NO_OUTLOOK
) -> AheadPlan:
    """What moves beside the run that holds this, for a task with this signature."""
    now = worker.residency
    assert now is not None, f"{worker.name} is not up"
    working_bytes = signature.way(now.capacity_bytes).activation_bytes
    return plan_ahead(now, held, signature.uses, costs.components, working_bytes, outlook)


def is_at_hand(costs: Costs, worker: Worker, signature: Signature) -> bool:
    """It runs whole there, and all that it lacks is in the memory of the machine."""
    setup, node = costs.setup(signature, worker), costs.nodes.of(worker.spec)
    return setup is not None and not setup.streamed_bytes and (node is None or node.has(setup.reads, costs.at))


def may_come(costs: Costs, worker: Worker, held: Held, signature: Signature, least_bytes: float) -> bool:
    """Whether `ahead_of` may find so many bytes to bring. A bound that costs little: most tasks that it is asked for
    lack too little there, or find no room beside what the run holds."""
    setup, entries = costs.setup(signature, worker), worker.entries
    if setup is None or setup.upload_bytes < least_bytes:
        return False
    if setup.switches:
        return True  # what is there with other patches needs no more room
    free_bytes = (worker.capacity_bytes or 0) - held.run_bytes - held.run_bytes // MARGIN_PART
    room_bytes = free_bytes - signature.scratch_bytes - worker.used_bytes
    leaving_bytes = worker.used_bytes - setup.own_bytes - setup.room_bytes
    if leaving_bytes > 0:  # of these, what the run holds stays
        stays, components, others_bytes = held.components, signature.components, 0
        for key, entry in entries.items():
            if key not in stays and key not in components:
                others_bytes += entry.resident_bytes
        room_bytes += min(leaving_bytes, others_bytes)
    return room_bytes > 0


def worked_with(
    costs: Costs, backlog: Backlog, workers: Whereabouts, worker: Worker
) -> tuple[float, dict[ComponentKey, None]]:
    """What waits for weights that the worker has, in seconds of it when all that have them share it; and these."""
    seconds, wanted = 0.0, dict[ComponentKey, None]()
    for line in backlog.using(worker.entries.values()):
        task, signature = line.head, line.signature
        if costs.extra_seconds(task.spec, signature, worker) == 0.0:
            run_seconds = costs.resident_seconds(task.spec, signature, worker)
            components = signature.components
            sharing = _with_patches(workers, signature) if components else workers.count
            seconds += len(line.tasks) * run_seconds / max(1, sharing)
            for key in components:
                wanted[key] = None
    return seconds, wanted


def is_switch_of(worker: Worker, signature: Signature, wanted: Container[ComponentKey]) -> bool:
    """Some of what is `wanted` there would get other patches for it."""
    entries = worker.entries
    for use in signature.uses:
        if use.component in wanted:
            entry = entries.get(use.component)
            if entry is not None and entry.patch_digest != use.patch_digest:
                return True
    return False


def _with_patches(workers: Whereabouts, signature: Signature) -> int:
    """Workers that have the first component that it uses in its patches; no more are counted than matter."""
    component, digest = signature.uses[0].component, signature.uses[0].patch_digest
    holders = workers.holders.get(component)
    if holders is None or len(holders) < 2:
        return 1
    found = 0
    for place, other in enumerate(holders):
        if place == MOST_HOLDERS:
            break
        if other.entries[component].patch_digest == digest:
            found += 1
    return found


def comes_beside(
    costs: Costs, backlog: Backlog, workers: Whereabouts, worker: Worker, running: Signature, coming: Signature
) -> bool:
    """All that `coming` lacks there could be brought beside a run of `running`, without taking from what waits there;
    and nothing says that it would not be: a worker that was told of as much before has it, if it does what it is
    told."""
    setup = costs.setup(coming, worker)
    if setup is None or not is_at_hand(costs, worker, coming):
        return False
    whole_bytes = sum([costs.components[key].upload_bytes for key in coming.components])
    if worker.ahead.get(coming, 0) >= whole_bytes:
        return False
    if setup.upload_bytes and not may_come(costs, worker, held_by(worker, running, 1), coming, 0.0):
        return False  # what follows takes longer than to see that
    _, wanted = worked_with(costs, backlog, workers, worker)
    if is_switch_of(worker, coming, wanted):
        return False
    kept = [key for key in wanted if key not in coming.components]
    return ahead_of(costs, worker, held_by(worker, running, 1, kept), coming).upload_bytes >= setup.upload_bytes
