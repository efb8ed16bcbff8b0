"""Groups of nodes that the pool may request, and the limits of all of them together: settings of scaling.

A node is one machine; `scheduler.autoscaling` decides how many of each group exist, `actors` requests them from Ray.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from modelpool.pool.values.core.errors import UnusableField, unusable_field
from modelpool.pool.values.specs.spec import WorkerId
from modelpool.pool.values.specs.wire_value import WireValue

#: names of groups are parts of worker ids and of file names
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: most nodes of a group, and GPUs of a node
MOST_NODES = 100_000
MOST_GPUS_PER_NODE = 1024


@dataclass(frozen=True, slots=True)
class NodeGroup(WireValue):
    """Nodes of one kind that can be requested. Raises UnusableField naming the field.

    gpu_type        as in `WorkerSpec.device_name`, and Ray's accelerator type; "" is any
    gpu_bytes       memory of each GPU; 0: unknown until a worker of the group was up
    gpus_per_node   workers of each node; a node is requested and ended as a whole
    min_nodes       nodes that are kept, with work or without
    max_nodes       most nodes at a time
    price_per_hour  of a node; the unit is the user's currency
    spot            the provider may take nodes back
    labels          Ray node labels that request the group: pairs of key and value
    resources       custom Ray resources of each worker: pairs of name and amount
    start_seconds   expected time from the request to the worker being up; measurements replace it
    part_of         name of a set of groups, such as the instance types and zones of one kind of node: `min_nodes` and
                    `max_nodes` count all its groups together. Each backs off alone
    """

    name: str
    gpu_type: str = ""
    gpu_bytes: int = 0
    gpus_per_node: int = 1
    min_nodes: int = 0
    max_nodes: int = 1
    price_per_hour: float = 0.0
    spot: bool = False
    labels: tuple[tuple[str, str], ...] = ()
    resources: tuple[tuple[str, float], ...] = ()
    start_seconds: float = 180.0
    part_of: str = ""

    def __post_init__(self) -> None:
        if not NAME_PATTERN.fullmatch(self.name):
            raise unusable_field("name", self.name, "letters, digits, '.', '_' and '-'; it begins worker ids")
        _require_text("gpu_type", self.gpu_type)
        _require_count("gpu_bytes", self.gpu_bytes, 0, 1 << 50)
        _require_count("gpus_per_node", self.gpus_per_node, 1, MOST_GPUS_PER_NODE)
        _require_count("min_nodes", self.min_nodes, 0, MOST_NODES)
        _require_count("max_nodes", self.max_nodes, 0, MOST_NODES)
        if self.max_nodes < self.min_nodes:
            raise unusable_field("max_nodes", self.max_nodes, f"at least min_nodes, {self.min_nodes}")
        _require_number("price_per_hour", self.price_per_hour)
        _require_number("start_seconds", self.start_seconds)
        if not isinstance(self.spot, bool):
            raise unusable_field("spot", self.spot, "true or false")
        for key, value in self.labels:
            _require_text("labels", key, "names that are text")
            _require_text(f"labels.{key}", value)
        for key, amount in self.resources:
            _require_text("resources", key, "names that are text")
            _require_number(f"resources.{key}", amount)
        for field, pairs in (("labels", self.labels), ("resources", self.resources)):
            names = [name for name, _ in pairs]
            if len(set(names)) < len(names):
                raise unusable_field(field, names, "each name once")

    @property
    def set_name(self) -> str:
        """The name of the set that it is part of; its own if it is part of none."""
        return self.part_of or self.name

    @property
    def price_per_gpu_hour(self) -> float:
        """The price of one of its GPUs."""
        return self.price_per_hour / self.gpus_per_node

    @property
    def most_gpus(self) -> int:
        """GPUs of all its nodes."""
        return self.max_nodes * self.gpus_per_node

    def worker_id(self, number: int) -> WorkerId:
        """The id of a worker of the group; numbers only grow."""
        return WorkerId(f"{self.name}-{number}")


@dataclass(frozen=True, slots=True)
class AutoscalingConfig(WireValue):
    """Limits over all groups, and how decisions are taken. Raises UnusableField naming the field.

    max_gpus           most GPUs of all groups at a time; None: only the groups have limits
    max_cost_per_hour  most that all requested nodes may cost in an hour; None: no limit
    max_cost           most that the pool may spend on nodes in its life. It is never exceeded: nodes end before it is
                       spent, minimum or not; None: no limit
    wait_seconds       how long work without a deadline may queue for fewer GPUs: a node ends although it is used, if
                       the others would have kept up within this time. 0 keeps nodes for the busiest moments
    delay_tolerance    part of the time until waiting work without a deadline ends by which it may end later on nodes
                       that cost less. 0 takes the nodes with which it ends first
    interval_seconds   between two evaluations without another cause
    """

    max_gpus: int | None = None
    max_cost_per_hour: float | None = None
    max_cost: float | None = None
    wait_seconds: float = 10.0
    delay_tolerance: float = 0.25
    interval_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.max_gpus is not None:
            _require_count("max_gpus", self.max_gpus, 0, MOST_NODES * MOST_GPUS_PER_NODE)
        for field in ("max_cost_per_hour", "max_cost"):
            if getattr(self, field) is not None:
                _require_number(field, getattr(self, field))
        _require_number("wait_seconds", self.wait_seconds)
        _require_number("delay_tolerance", self.delay_tolerance)
        _require_number("interval_seconds", self.interval_seconds, least=0.1)


def check_groups(groups: tuple[NodeGroup, ...], limits: AutoscalingConfig) -> None:
    """Raise UnusableField for a name that two groups have, and for minima that exceed the limits of all groups
    together."""
    names = [group.name for group in groups]
    for name in names:
        if names.count(name) > 1:
            raise UnusableField(f"groups: found {name!r} {names.count(name)} times, expected each name once")
    for group in groups:
        first = next(other for other in groups if other.set_name == group.set_name)
        for field, found, expected in (
            ("min_nodes", group.min_nodes, first.min_nodes),
            ("max_nodes", group.max_nodes, first.max_nodes),
        ):
            if found != expected:
                other = f"{expected}, as group {first.name}, which is part of {group.set_name} too"
                raise unusable_field(field, f"{found} in group {group.name}", other)
    least_gpus, least_cost = least_of_sets(groups)
    if limits.max_gpus is not None and least_gpus > limits.max_gpus:
        raise unusable_field("max_gpus", limits.max_gpus, f"at least the GPUs of all min_nodes, {least_gpus}")
    if limits.max_cost_per_hour is not None and least_cost > limits.max_cost_per_hour:
        raise unusable_field(
            "max_cost_per_hour", limits.max_cost_per_hour, f"at least the price of all min_nodes, {least_cost:g}"
        )


def least_of_sets(groups: Iterable[NodeGroup]) -> tuple[int, float]:
    """Return the GPUs and the price per hour of the `min_nodes` of all sets, of the groups where they are least."""
    gpus: dict[str, int] = {}
    prices: dict[str, float] = {}
    for group in groups:
        name = group.set_name
        own_gpus, own_price = group.min_nodes * group.gpus_per_node, group.min_nodes * group.price_per_hour
        gpus[name] = min(gpus.get(name, own_gpus), own_gpus)
        prices[name] = min(prices.get(name, own_price), own_price)
    return sum(gpus.values()), sum(prices.values())


def _require_text(field: str, found: Any, expected: str = "a text") -> None:
    if not isinstance(found, str):
        raise unusable_field(field, found, expected)


def _require_count(field: str, found: Any, least: int, most: int) -> None:
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
        raise unusable_field(field, found, f"a whole number from {least} to {most}")


def _require_number(field: str, found: Any, least: float = 0.0) -> None:
    is_number = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
    if not is_number or found < least:
        raise unusable_field(field, found, f"a finite number from {least:g}")


#: limits of a pool that states none
NO_LIMITS = AutoscalingConfig()
