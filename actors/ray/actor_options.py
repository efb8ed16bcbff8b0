"""The concurrency groups of a worker, and the resources and labels with which it is requested from Ray. Pure, without
Ray.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelpool.actors.control.cluster_view import ACCELERATOR_PREFIX, GPU
from modelpool.scheduler.model.node_groups import NodeGroup

#: concurrency groups of a worker: one thread runs, others answer and stop, one waits as long as the worker lives, one
#: waits for decodes that overlap with the next runs, and two serve passes: one waits for ends, the other lets runs join
COMPUTE, CONTROL, WATCH, DECODES, PASSES = "compute", "control", "watch", "decodes", "passes"
#: Ray's label of the id of a node
NODE_ID_LABEL = "ray.io/node-id"
#: amount with which Ray requests an accelerator type
_SOME = 0.001


@dataclass(frozen=True, slots=True)
class WorkerNeeds:
    """The demand of one worker: what Ray's autoscaler sees while its actor is pending.

    accelerator_type  in Ray's spelling; "" is any
    """

    gpus: float
    cpus: float = 0.0
    resources: tuple[tuple[str, float], ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    accelerator_type: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of Ray's `options` of an actor."""
        options: dict[str, Any] = {"num_gpus": self.gpus, "num_cpus": self.cpus}
        if self.resources:
            options["resources"] = dict(self.resources)
        if self.labels:
            options["label_selector"] = dict(self.labels)
        if self.accelerator_type:
            options["accelerator_type"] = self.accelerator_type
        return options

    def options_beside(self, avoided: Sequence[str]) -> dict[str, Any]:
        """As `options`, on none of the nodes with the ids `avoided`."""
        if not avoided:
            return self.options
        selector = {**dict(self.labels), NODE_ID_LABEL: f"!in({','.join(avoided)})"}
        return {**self.options, "label_selector": selector}

    @property
    def bundle(self) -> Mapping[str, float]:
        """All resources, as Ray counts them."""
        accelerator = {f"{ACCELERATOR_PREFIX}{self.accelerator_type}": _SOME} if self.accelerator_type else {}
        counted = {"CPU": self.cpus, GPU: self.gpus, **dict(self.resources), **accelerator}
        return {name: amount for name, amount in counted.items() if amount > 0.0}


def worker_threads(overlaps_decode: bool) -> dict[str, int]:
    """Return the threads of each concurrency group. Ray begins the calls of a group in their order only if that has one
    thread: with two, one that reads larger inputs is overtaken."""
    return {COMPUTE: 1, CONTROL: 2, WATCH: 1, PASSES: 2} | ({DECODES: 1} if overlaps_decode else {})


def worker_needs(
    gpus_per_worker: float, cpu_slots: float, group: NodeGroup | None, accelerator_types: Container[str]
) -> WorkerNeeds:
    """Return the demand of a worker of `group`; None is a worker without a group.

    A worker of a group always takes one of its GPUs, even if it simulates one: the GPUs are what the group counts. The
    GPU type is requested as Ray's accelerator type if it is one of `accelerator_types` and nothing else selects the
    group: node types of an autoscaler need not name their accelerators.
    """
    if group is None:
        return WorkerNeeds(gpus_per_worker, cpu_slots)
    selected = bool(group.labels or group.resources)
    by_type = group.gpu_type if not selected and group.gpu_type in accelerator_types else ""
    return WorkerNeeds(max(1.0, gpus_per_worker), 0.0, group.resources, group.labels, by_type)
