"""Parses GPU specifications such as '64xH100,32x4090' to simulated GPUs and their machines. Pure.

Data of GPU kinds is in `scheduler.model.gpu_kinds`. Run seconds of a workload are for one kind, the reference;
slower kinds take proportionally longer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from modelpool.pool.values.core.errors import (
    GIB,
    MIB,
    UserError,
    does_not_fit,
    format_bytes,
    parse_bytes,
    unknown_name,
    unusable_field,
)
from modelpool.pool.values.specs.spec import NO_NODE, NodeId, WorkerId
from modelpool.pool.weights.plan.eviction_plan import needed_bytes
from modelpool.scheduler.model.gpu_kinds import GPU_KINDS, PCIE4, kind_of
from modelpool.scheduler.model.messages import Submitted
from modelpool.scheduler.simulator.cluster import SimulatedGpu, SimulatedNode

#: the default kind that the seconds of a workload were measured on
REFERENCE_KIND = "H100"
#: properties of a GPU of no named kind: pinned copies over PCIe 4.0, the reference's speed
UNNAMED_LINK_BYTES_PER_SECOND = PCIE4
UNNAMED_SPEED = 1.0
#: maximum GPUs of a simulation, and the digits of such a count
MOST_GPUS = 100_000
MOST_DIGITS = 9
#: no GPU has less: a unit is missing in the specification
LEAST_MEMORY_BYTES = 256 * MIB

_GROUP = re.compile(r"(?:(?P<count>\d+)\s*x\s*)?(?P<name>[^:]+?)(?:\s*:\s*(?P<memory>.+))?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """A number of GPUs of one kind. `kind` is its common name, or '24GiB' if it has none."""

    count: int
    kind: str
    memory_bytes: int
    link_bytes_per_second: float
    speed: float

    @property
    def words(self) -> str:
        """The specification of the group."""
        return f"{self.count}x{self.kind}"


@dataclass(frozen=True, slots=True)
class NodeShape:
    """The properties of one machine. With 0 GPUs there are no machines, and every file is in memory."""

    gpus: int = 8
    host_bytes: int = 512 * GIB
    storage_bytes_per_second: float = 3e9


def parse_gpus(text: str, reference: str = REFERENCE_KIND, field: str = "--gpus") -> tuple[GpuGroup, ...]:
    """Parse groups such as '64xH100,32x4090', '4xH100:48GiB' (less memory than it has), '4x24GiB' (no named kind).

    The count defaults to 1. `reference` is the kind with speed 1. Raises UnusableField and UnknownName.
    """
    measured_on = kind_of(reference)
    if measured_on is None:
        raise unknown_name("kind of GPU in --measured-on", reference, GPU_KINDS)
    expected = "GPUs such as 64xH100,32x4090, 4xH100:48GiB or 4x24GiB"
    groups = []
    for part in text.split(","):
        match = _GROUP.fullmatch(part.strip())
        if match is None:
            raise unusable_field(field, text, expected)
        digits = match["count"] or "1"
        count = int(digits) if len(digits) <= MOST_DIGITS else 0
        if not 1 <= count <= MOST_GPUS:
            raise unusable_field(field, _short(part), f"1 to {MOST_GPUS} GPUs of a kind")
        group = _group(match["name"], match["memory"], measured_on.speed, field)
        groups.append(replace(group, count=count))
    kinds = [group.kind for group in groups]
    if len(set(kinds)) < len(kinds):
        raise unusable_field(field, text, "each kind once")
    if sum(group.count for group in groups) > MOST_GPUS:
        raise unusable_field(field, text, f"at most {MOST_GPUS} GPUs")
    return tuple(groups)


def _group(name: str, memory: str | None, reference_speed: float, field: str) -> GpuGroup:
    kind = kind_of(name)
    if kind is None:
        try:
            unnamed_bytes = parse_bytes(name) if memory is None else 0
        except UserError:
            unnamed_bytes = 0
        if not unnamed_bytes or not re.search(r"[a-z]\s*$", name, re.IGNORECASE):
            if re.fullmatch(r"[\d.,_e+-]+\s*x.*", name, re.IGNORECASE):
                raise unusable_field(field, _short(name), f"a whole number of GPUs before the x, up to {MOST_GPUS}")
            raise unknown_name(f"kind of GPU in {field}", _short(name), GPU_KINDS)
        _require_memory(unnamed_bytes, name, field)
        return GpuGroup(1, name.strip(), unnamed_bytes, UNNAMED_LINK_BYTES_PER_SECOND, UNNAMED_SPEED)
    speed = kind.speed / reference_speed
    if memory is None:
        return GpuGroup(1, kind.name, kind.memory_bytes, kind.link_bytes_per_second, speed)
    memory_bytes = parse_bytes(memory)
    _require_memory(memory_bytes, f"{name}:{memory}", field)
    if memory_bytes > kind.memory_bytes:
        raise unusable_field(field, f"{name}:{memory}", f"at most its memory, {format_bytes(kind.memory_bytes)}")
    return GpuGroup(1, f"{kind.name}:{memory.strip()}", memory_bytes, kind.link_bytes_per_second, speed)


def _require_memory(memory_bytes: int, text: str, field: str) -> None:
    if memory_bytes < LEAST_MEMORY_BYTES:
        least = format_bytes(LEAST_MEMORY_BYTES)
        raise unusable_field(field, _short(text), f"at least {least} of memory; a unit may be missing, such as 48GiB")


def _short(text: str) -> str:
    """The beginning of a text, for an error message."""
    return text.strip() if len(text) <= 80 else f"{text.strip()[:80]}..."


def simulated_gpus(
    groups: Iterable[GpuGroup], shape: NodeShape, reserve_bytes: int = 0
) -> tuple[tuple[SimulatedGpu, ...], tuple[SimulatedNode, ...]]:
    """Return the GPUs, named by kind and number, and the machines, each with GPUs of one kind.

    reserve_bytes  of each GPU, left to other programs
    """
    gpus: list[SimulatedGpu] = []
    nodes: list[SimulatedNode] = []
    for group in groups:
        for number in range(group.count):
            if shape.gpus and number % shape.gpus == 0:
                node = NodeId(f"node-{len(nodes)}")
                nodes.append(SimulatedNode(node, shape.host_bytes, shape.storage_bytes_per_second))
            gpus.append(
                SimulatedGpu(
                    worker_id=WorkerId(f"{group.kind}-{number}"),
                    capacity_bytes=group.memory_bytes - reserve_bytes,
                    link_bytes_per_second=group.link_bytes_per_second,
                    speed=group.speed,
                    kind=group.kind,
                    node=nodes[-1].node if nodes and shape.gpus else NO_NODE,
                )
            )
    return tuple(gpus), tuple(nodes)


def require_fit(jobs: Sequence[Submitted], gpus: Sequence[SimulatedGpu]) -> None:
    """Raise DoesNotFit for the first job that fits on none of the GPUs at any division of its tasks."""
    largest_bytes = max(gpu.capacity_bytes for gpu in gpus)
    for submitted in jobs:
        for task in submitted.job.tasks:
            least_bytes = needed_bytes(task.uses, task.least_activation_bytes)
            if least_bytes > largest_bytes:
                what = f"{submitted.job.job_id} ({task.stage.value})"
                raise does_not_fit(what, least_bytes, largest_bytes, "the largest of the GPUs")
