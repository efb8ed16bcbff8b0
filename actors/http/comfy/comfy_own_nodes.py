"""Nodes of users that the operator permits, as nodes of ComfyUI: their kinds follow from what the pool lists. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_node_types import NodeInput, NodeType, combo, link, only_in_workflows
from modelpool.actors.http.comfy.comfy_nodes import NODE_TYPES
from modelpool.actors.http.comfy.comfy_values import NodeImage, NodeLatent, NodeMask
from modelpool.actors.http.comfy.comfy_workflow_nodes import OperationRow
from modelpool.pool.values.core.node_listing import NodeListing, NodeSettingListing

_RESULTS: Mapping[str, type[NodeImage | NodeMask | NodeLatent]] = MappingProxyType(
    {"image": NodeImage, "mask": NodeMask, "latent": NodeLatent}
)
_WIDGETS: Mapping[str, str] = MappingProxyType({"bool": "BOOLEAN", "int": "INT", "float": "FLOAT", "str": "STRING"})
#: bounds of numbers without their own
_LEAST, _MOST = -(2.0**53), 2.0**53


def kinds_with(nodes: Sequence[NodeListing]) -> Mapping[str, NodeType]:
    """Return the nodes that work here, with those of users; a node of a user does not replace another one."""
    own = {node.name: _kind(node) for node in nodes if node.name not in NODE_TYPES}
    return MappingProxyType({**NODE_TYPES, **own}) if own else NODE_TYPES


def _kind(node: NodeListing) -> NodeType:
    links = tuple(link(name, kind.upper(), name not in node.optional) for name, kind in node.inputs)
    widgets = tuple(_widget(setting) for setting in node.settings if setting.type in _WIDGETS)
    # settings that ComfyUI has no widget for keep their defaults
    row = OperationRow(
        node.name,
        _RESULTS[node.result],
        {name: name for name, _ in node.inputs},
        {given.name: given.name for given in widgets},
    )

    def build(given: Mapping[str, Any]) -> tuple[Any, ...]:
        return row.build(given) if "nodes" in given else only_in_workflows(given)

    return NodeType(node.name, node.category, (*links, *widgets), (node.result.upper(),), build)


def _widget(setting: NodeSettingListing) -> NodeInput:
    if setting.choices:
        return combo(
            setting.name, (str(setting.default), *(each for each in setting.choices if each != setting.default))
        )
    least = _LEAST if setting.least is None else setting.least
    most = _MOST if setting.most is None else setting.most
    return NodeInput(setting.name, _WIDGETS[setting.type], setting.default, least, most)
