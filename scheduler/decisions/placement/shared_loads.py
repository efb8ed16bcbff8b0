"""The part of a load that serves other waiting tasks too. Changes nothing; knows neither order nor policy.

A ControlNet that twenty tasks wait for is not the price of one of them: whichever task loads it loads it for all.
Components that no other task uses (LoRAs, patches) count for the task alone.
"""

from __future__ import annotations

from modelpool.pool.values.specs.spec import ComponentKey
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.placement.placement_query import PlacementQuery
from modelpool.scheduler.model.cost_classes import CostClass, LoadEstimate
from modelpool.scheduler.model.workers import Worker


def shared_load_seconds(query: PlacementQuery, cost_class: CostClass, worker: Worker) -> float:
    """The part of the extra seconds of a task of this cost class that others share, on a live worker that it fits on.

    The tasks that wait for a component share its missing part equally, divided by the number of its holders and this
    worker: tasks waiting for a component with many holders are served by them. What only streams,
    for lack of room, serves no other task. All tasks of the backlog count, at any priority, and partial holders as
    holders.
    0 for a component that is resident with other patches.
    """
    entries, waiting = worker.entries, query.backlog.wanted
    load: LoadEstimate | None = None
    seconds = 0.0
    for use in cost_class.uses:
        key, entry = use.component, entries.get(use.component)
        if entry is not None and entry.patch_digest != use.patch_digest:
            continue
        if entry is not None and entry.resident_bytes >= query.costs.components[key].weight_bytes:
            continue
        holders = query.workers.holders.get(key)
        others = 0 if holders is None else len(holders) - (entry is not None)
        sharing = waiting.get(key, 0) / (1 + others)
        if sharing <= 1.0:
            continue
        if load is None:
            load = query.costs.load_estimate(cost_class, worker)
            assert load is not None, f"the task does not fit on {worker.worker_id}"
        there_bytes = 0 if entry is None else entry.resident_bytes
        seconds += (1.0 - 1.0 / sharing) * _seconds_of(query.costs, load, key, there_bytes, worker)
    return seconds


def _seconds_of(costs: Costs, load: LoadEstimate, key: ComponentKey, there_bytes: int, worker: Worker) -> float:
    """The seconds of that load that bring the lasting part of this component beyond `there_bytes`, on the slower of
    disk and link. From the disk all of it lasts, in the page cache."""
    spec, node = costs.components[key], costs.nodes.of(worker.spec)
    if node is not None and load.reads:
        read_seconds = node.missing_bytes(load.reads) / node.storage_bytes_per_second
        if read_seconds > (load.upload_bytes + load.streamed_bytes) / worker.link_bytes_per_second:
            component_reads = tuple([read for read in load.reads if read[0] == key])
            return node.missing_bytes(component_reads) / node.storage_bytes_per_second
    part = max(0, _resident_bytes(load, key) - there_bytes) / spec.weight_bytes
    return part * spec.upload_bytes / worker.link_bytes_per_second


def _resident_bytes(load: LoadEstimate, key: ComponentKey) -> int:
    """Bytes of this component on the GPU when the task runs."""
    for entry in load.arrived:
        if entry.component == key:
            return entry.resident_bytes
    return 0
