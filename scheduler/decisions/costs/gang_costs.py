"""Predicts the transfers of a member of a gang: weights that do not fit on its GPU come from the GPUs of other members
or from its host, whichever takes less time for the run (`pool.weights.plan.peer_shares`).

Costs nothing for what fits: a run that streams no weights on a worker alone streams none in a gang. A task with options
is expected to read from the host, since members hold nothing where something acts inside of the model.
"""

from __future__ import annotations

from modelpool.pool.values.specs.eviction_hints import EvictionHints
from modelpool.pool.values.specs.spec import TaskSpec
from modelpool.pool.weights.plan.eviction_plan import Residency, plan
from modelpool.pool.weights.plan.peer_shares import PeerLink, exchanged_in_run, run_share
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.costs.predict import files_read
from modelpool.scheduler.model.cost_classes import MOST_PREDICTIONS, CostClass, LoadEstimate, PeerLoad, PeerLoadKey
from modelpool.scheduler.model.workers import Worker


def gang_link(costs: Costs, worker: Worker, degree: int) -> float:
    """Return the bytes per second among the GPUs of `degree` workers like this one: as stated, as their machine's last
    gang measured, or by the data sheet of the GPU. 0 if they hold nothing for each other, or nothing is known."""
    spec = worker.spec
    if spec is None or not spec.holds_shares:
        return 0.0
    node = None if spec.gang_link_bytes_per_second > 0.0 else costs.nodes.of(spec)
    measured = None if node is None else node.gang_links.get(degree)
    return worker.gang_link_bytes_per_second if measured is None else measured


def streams(costs: Costs, cost_class: CostClass, worker: Worker) -> bool:
    """Whether weights stream during a run on a live worker alone."""
    load = costs.load_estimate(cost_class, worker)
    return load is not None and load.streamed_bytes > 0


def gang_extra_seconds(
    costs: Costs, task: TaskSpec, cost_class: CostClass, worker: Worker, degree: int
) -> float | None:
    """`Costs.extra_seconds` of a live worker as one of `degree` members."""
    alone_seconds = costs.extra_seconds(task, cost_class, worker)
    if alone_seconds is None or degree < 2:
        return alone_seconds
    load = costs.load_estimate(cost_class, worker)
    if load is None or not load.streamed_bytes:
        return alone_seconds
    link = gang_link(costs, worker, degree)
    peer = _peer_load(costs, task, cost_class, worker, degree, link)
    if peer is None:
        return alone_seconds
    shared_seconds = costs.seconds_of(peer.load, worker) + peer.exchanged_bytes / link
    return alone_seconds - costs.seconds_of(load, worker) + shared_seconds


def moving_seconds(costs: Costs, task: TaskSpec, cost_class: CostClass, worker: Worker, degree: int) -> float:
    """Seconds of a whole run on `degree` workers like this live one in which weights come from hosts or other GPUs."""
    load = costs.load_estimate(cost_class, worker)
    if load is None or not load.streamed_bytes:
        return 0.0
    host = worker.link_bytes_per_second
    link = gang_link(costs, worker, degree) if degree > 1 else 0.0
    peer = _peer_load(costs, task, cost_class, worker, degree, link)
    if peer is None:
        return load.streamed_bytes / host
    return peer.load.streamed_bytes / host + peer.exchanged_bytes / link


def residency_in_gang(
    costs: Costs, task: TaskSpec, cost_class: CostClass, worker: Worker, degree: int, hints: EvictionHints
) -> Residency:
    """`Costs.residency_after` of a live worker as one of `degree` members: its share leaves less room for weights."""
    now = worker.residency
    if now is None or not streams(costs, cost_class, worker):
        return costs.residency_after(cost_class, worker, hints)
    peer = _peer_load(costs, task, cost_class, worker, degree, gang_link(costs, worker, degree))
    if peer is None:
        return costs.residency_after(cost_class, worker, hints)
    needed_bytes = peer.load.mode.activation_bytes + peer.share_bytes
    return plan(now, cost_class.uses, costs.components, needed_bytes, hints=hints).after


def _peer_load(
    costs: Costs, task: TaskSpec, cost_class: CostClass, worker: Worker, degree: int, link: float
) -> PeerLoad | None:
    """The transfers of a member that holds a share; None if it holds none."""
    capacity_bytes, host = worker.capacity_bytes, worker.link_bytes_per_second
    if link <= host or task.options or capacity_bytes is None:  # slower than twice the host never pays
        return None
    entries = tuple([worker.entries.get(key) for key in cost_class.components])
    key: PeerLoadKey = (capacity_bytes, entries, degree, host, link)
    if key in cost_class.peer_loads:
        return cost_class.peer_loads[key]
    if len(cost_class.peer_loads) >= MOST_PREDICTIONS:
        cost_class.peer_loads.clear()
    found = cost_class.peer_loads[key] = _predicted(costs, cost_class, key)
    return found


def _predicted(costs: Costs, cost_class: CostClass, key: PeerLoadKey) -> PeerLoad | None:
    capacity_bytes, entries, degree, host, link = key
    uses, specs, mode = cost_class.uses, costs.components, cost_class.mode(capacity_bytes)
    room_bytes = capacity_bytes - mode.activation_bytes - cost_class.scratch_bytes
    share_bytes = run_share(uses, specs, room_bytes, degree, host, PeerLink(link))
    if not share_bytes:
        return None
    present = tuple([entry for entry in entries if entry is not None])
    moves = plan(Residency(capacity_bytes, present), uses, specs, mode.activation_bytes + share_bytes)
    model = moves.after.of(uses[0].component)
    resident_bytes = 0 if model is None else model.resident_bytes
    exchanged = exchanged_in_run(uses[0], specs[uses[0].component], resident_bytes, share_bytes, degree)
    load = LoadEstimate(
        upload_bytes=moves.upload_bytes + share_bytes,
        streamed_bytes=max(0, moves.streamed_bytes - exchanged),
        switches=len(moves.switched),
        present_bytes=sum([entry.resident_bytes for entry in present]),
        room_bytes=room_bytes - share_bytes - moves.after.used_bytes,
        self_evicted_bytes=moves.evicted_bytes,
        arrived=moves.after.entries,
        mode=mode,
        reads=files_read(uses, moves, specs),
    )
    return PeerLoad(load, share_bytes, exchanged)
