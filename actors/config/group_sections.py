"""Groups of nodes in a pool's configuration: the tables [groups.NAME] and [autoscaling]."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from modelpool.actors.request.strict import Strict, no_truth_value
from modelpool.pool.values.core.errors import UnusableField, UserError, parse_bytes, unusable_field
from modelpool.scheduler.model.node_groups import NO_LIMITS, AutoscalingConfig, NodeGroup, check_groups

GROUPS = "groups"
AUTOSCALING = "autoscaling"


#: Ray's label of the zone of a node
ZONE_LABEL = "ray.io/availability-zone"


class InstanceTypeSection(Strict):
    """[groups.NAME.instance_types.TYPE]: what differs from the group; labels and resources are added to its own."""

    gpu_type: str | None = None
    gpu_memory: str | int | None = None
    gpus_per_node: int | None = None
    price_per_hour: float | None = None
    spot: bool | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    resources: dict[str, float] = Field(default_factory=dict)
    start_seconds: float | None = None


class ZoneSection(Strict):
    """[groups.NAME.zones.ZONE]: a zone. Its prices are `price_factor` times the prices of the group. By default, its
    nodes have Ray's label of a zone, ray.io/availability-zone = ZONE."""

    price_factor: float = 1.0
    labels: dict[str, str] | None = None
    start_seconds: float | None = None


class GroupSection(Strict):
    """[groups.NAME]: nodes that the pool may request; see `scheduler.model.node_groups.NodeGroup`.

    gpu_type        kind of GPU, such as "A100"; by default any
    gpu_memory      memory of each GPU, such as "40GiB"; by default known when the first worker is up
    gpus_per_node   workers of each node
    min, max        nodes at a time
    price_per_hour  of a node
    spot            whether the provider may take nodes back
    labels          Ray node labels that request the group
    resources       custom Ray resources of each worker
    start_seconds   expected time until a requested node works; corrected by measurements
    part_of         set of groups that have `min` and `max` together; see `instance_types`
    instance_types  [groups.NAME.instance_types.TYPE]: kinds of nodes of the group, each with what differs. The cheapest
                    that can be had is requested; one without capacity backs off alone
    zones           [groups.NAME.zones.ZONE]: zones of the group, likewise, with each instance type
    """

    gpu_type: str = ""
    gpu_memory: str | int | None = None
    gpus_per_node: int = 1
    min: int = 0
    max: int = 1
    price_per_hour: float = 0.0
    spot: bool = False
    labels: dict[str, str] = Field(default_factory=dict)
    resources: dict[str, float] = Field(default_factory=dict)
    start_seconds: float = 180.0
    part_of: str = ""
    instance_types: dict[str, InstanceTypeSection] = Field(default_factory=dict)
    zones: dict[str, ZoneSection] = Field(default_factory=dict)

    _no_truth_value = field_validator(
        "gpu_memory", "gpus_per_node", "min", "max", "price_per_hour", "start_seconds", mode="before"
    )(no_truth_value)

    @field_validator("spot", mode="before")
    @classmethod
    def _truth_value(cls, value: Any) -> Any:
        if not isinstance(value, bool):
            raise unusable_field("spot", value, "true or false")
        return value

    @field_validator("labels", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise unusable_field("labels", value, 'a table of texts, such as { "market" = "spot" }')
        for name, text in value.items():
            if not isinstance(text, str):
                raise unusable_field(f"labels.{name}", text, "a text")
        return value

    def group_of(self, name: str) -> NodeGroup:
        """Convert to the scheduler's form. Raises UnusableField, with the names of the file."""
        if self.max < self.min:
            raise unusable_field("max", self.max, f"at least min, {self.min}")
        try:
            gpu_bytes = 0 if self.gpu_memory is None else parse_bytes(str(self.gpu_memory))
        except UserError:
            raise unusable_field("gpu_memory", self.gpu_memory, "a size such as 40GiB") from None
        try:
            return NodeGroup(
                name=name,
                gpu_type=self.gpu_type,
                gpu_bytes=gpu_bytes,
                gpus_per_node=self.gpus_per_node,
                min_nodes=self.min,
                max_nodes=self.max,
                price_per_hour=self.price_per_hour,
                spot=self.spot,
                labels=tuple(self.labels.items()),
                resources=tuple(self.resources.items()),
                start_seconds=self.start_seconds,
                part_of=self.part_of,
            )
        except UnusableField as problem:
            words = str(problem).replace("min_nodes", "min").replace("max_nodes", "max")
            raise UnusableField(words.replace("gpu_bytes", "gpu_memory")) from None


class AutoscalingSection(Strict):
    """[autoscaling]: limits over all groups; see `scheduler.model.node_groups.AutoscalingConfig`."""

    max_gpus: int | None = NO_LIMITS.max_gpus
    max_cost_per_hour: float | None = NO_LIMITS.max_cost_per_hour
    max_cost: float | None = NO_LIMITS.max_cost
    wait_seconds: float = NO_LIMITS.wait_seconds
    delay_tolerance: float = NO_LIMITS.delay_tolerance
    interval_seconds: float = NO_LIMITS.interval_seconds

    _no_truth_value = field_validator("*", mode="before")(no_truth_value)


def node_groups(table: Any) -> tuple[NodeGroup, ...]:
    """Parse the tables [groups.NAME]. Raises UserError naming the table and the key."""
    if not isinstance(table, dict):
        raise unusable_field(GROUPS, table, "tables such as [groups.a100]")
    groups = []
    for name, keys in table.items():
        if not isinstance(keys, dict):
            raise unusable_field(f"[{GROUPS}] {name}", keys, f"a table, [{GROUPS}.{name}]")
        try:
            groups += _groups_of(name, GroupSection(**keys))
        except UserError as problem:
            raise type(problem)(f"[{GROUPS}.{name}] {problem}") from None
    return tuple(groups)


def _groups_of(name: str, section: GroupSection) -> list[NodeGroup]:
    """Return the group of a section, or one for each instance type in each zone. Raises UnusableField."""
    if not section.instance_types and not section.zones:
        return [section.group_of(name)]
    if section.part_of:
        raise unusable_field("part_of", section.part_of, "no such key next to instance_types and zones")
    found = []
    for type_name, kind in (section.instance_types or {"": InstanceTypeSection()}).items():
        for zone_name, zone in (section.zones or {"": ZoneSection(labels={})}).items():
            changes = {key: value for key, value in kind.model_dump().items() if value is not None}
            labels = {ZONE_LABEL: zone_name} if zone.labels is None else zone.labels
            changes["labels"] = {**section.labels, **kind.labels, **labels}
            changes["resources"] = {**section.resources, **kind.resources}
            price = section.price_per_hour if kind.price_per_hour is None else kind.price_per_hour
            changes["price_per_hour"] = price * zone.price_factor
            if zone.start_seconds is not None:
                changes["start_seconds"] = zone.start_seconds
            own = section.model_dump(exclude={"instance_types", "zones"})
            full_name = "-".join(part for part in (name, type_name, zone_name) if part)
            found.append(GroupSection(**{**own, **changes, "part_of": name}).group_of(full_name))
    for group in found:
        same = [one.name for one in found if _selected_by(one) == _selected_by(group)]
        if len(same) > 1:
            raise unusable_field(
                "labels", f"equal ones for {' and '.join(same)}", "labels, resources or a gpu_type that tell them apart"
            )
    return found


def _selected_by(group: NodeGroup) -> tuple[Any, ...]:
    """Return what Ray finds the nodes of a group by."""
    selects = bool(group.labels or group.resources)
    return frozenset(group.labels), frozenset(group.resources), "" if selects else group.gpu_type


def autoscaling_of(table: Any, groups: tuple[NodeGroup, ...]) -> AutoscalingConfig:
    """Parse the table [autoscaling]. Raises UserError naming the key."""
    if not isinstance(table, dict):
        raise unusable_field(AUTOSCALING, table, f"a table, [{AUTOSCALING}]")
    try:
        limits = AutoscalingConfig(**AutoscalingSection(**table).model_dump())
        check_groups(groups, limits)
    except UserError as problem:
        raise type(problem)(f"[{AUTOSCALING}] {problem}") from None
    if table and not groups:
        raise UnusableField(f"[{AUTOSCALING}] found without groups, expected tables such as [{GROUPS}.a100]")
    return limits


def describe_groups(groups: tuple[NodeGroup, ...], limits: AutoscalingConfig) -> list[str]:
    """Format the groups and limits in the shape of the file; nothing without groups."""
    lines: list[str] = []
    for group in groups:
        lines += [
            f"[{GROUPS}.{group.name}]",
            f'gpu_type = "{group.gpu_type}"',
            f"gpu_memory = {group.gpu_bytes}" if group.gpu_bytes else '# gpu_memory = ""  # not set',
            f"gpus_per_node = {group.gpus_per_node}",
            f"min = {group.min_nodes}",
            f"max = {group.max_nodes}",
            f"price_per_hour = {group.price_per_hour}",
            f"spot = {str(group.spot).lower()}",
            "labels = { " + ", ".join(f'"{key}" = "{value}"' for key, value in group.labels) + " }",
            "resources = { " + ", ".join(f'"{key}" = {amount}' for key, amount in group.resources) + " }",
            f"start_seconds = {group.start_seconds}",
            *([f'part_of = "{group.part_of}"'] if group.part_of else []),
            "",
        ]
    if groups:
        values = {name: getattr(limits, name) for name in AutoscalingSection.model_fields}
        set_ones = [f"{name} = {value}" for name, value in values.items() if value is not None]
        lines += [f"[{AUTOSCALING}]", *set_ones, ""]
    return lines
