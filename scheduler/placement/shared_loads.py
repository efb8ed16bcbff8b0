"""What part of a load serves others who wait too. Changes nothing; knows neither order nor policy.

A ControlNet that twenty tasks wait for is not the price of one of them: whoever loads it loads it for all. What is
nobody else's (LoRAs, patches) is paid by the task alone.
"""

from __future__ import annotations

from modelpool.pool.specs.spec import ComponentKey
from modelpool.scheduler.costs.cost_model import Costs
from modelpool.scheduler.placement.rules import Question
from modelpool.scheduler.tables.cost_classes import Setup, Signature
from modelpool.scheduler.tables.workers import Worker


def seconds_of_others(question: Question, signature: Signature, worker: Worker) -> float:
    """Of the extra seconds of a task with this signature on a live worker that it fits on: those that others pay.

    A component of which nothing is there is paid in equal parts by the tasks that wait for it, as many as there are for
    each of its holders and this worker: who waits where many hold it is served by them. What only streams, since there
    is no room for it, serves nobody else. All tasks of the backlog count, whatever their priority, and holders of a
    part as holders. 0 where all is there in part.
    """
    entries, waiting = worker.entries, question.backlog.wanted
    setup: Setup | None = None
    seconds = 0.0
    for key in signature.components:
        if key in entries:
            continue
        holders = question.workers.holders.get(key)
        sharing = waiting.get(key, 0) / (1 + (0 if holders is None else len(holders)))
        if sharing <= 1.0:
            continue
        if setup is None:
            setup = question.costs.setup(signature, worker)
            assert setup is not None, f"the task does not fit on {worker.worker_id}"
        seconds += (1.0 - 1.0 / sharing) * _seconds_of(question.costs, setup, key, worker)
    return seconds


def _seconds_of(costs: Costs, setup: Setup, key: ComponentKey, worker: Worker) -> float:
    """What of the seconds of that setup it takes to bring what stays of this component, of which nothing is there: of
    what is waited for, the disk or the link. From the disk all of it stays, in the memory of the machine."""
    spec, node = costs.components[key], costs.nodes.of(worker.spec)
    if node is not None and setup.reads:
        read_seconds = node.missing_bytes(setup.reads) / node.storage_bytes_per_second
        if read_seconds > (setup.upload_bytes + setup.streamed_bytes) / worker.link_bytes_per_second:
            own_reads = tuple([read for read in setup.reads if read[0] == key])
            return node.missing_bytes(own_reads) / node.storage_bytes_per_second
    part = _resident_bytes(setup, key) / spec.weight_bytes
    return part * spec.upload_bytes / worker.link_bytes_per_second


def _resident_bytes(setup: Setup, key: ComponentKey) -> int:
    """What is on the GPU of this component when the task runs."""
    for entry in setup.arrived:
        if entry.component == key:
            return entry.resident_bytes
    return 0
