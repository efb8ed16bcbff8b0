"""Nodes of users that the operator permits, as nodes of ComfyUI: their kinds follow from what the pool lists, or,
before there is a pool, from what a workflow links them to. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_node_types import (
    ANY,
    NodeInput,
    NodeType,
    combo,
    link,
    only_in_workflows,
    text,
)
from modelpool.actors.http.comfy.comfy_nodes import NODE_TYPES
from modelpool.actors.http.comfy.comfy_values import NodeImage, NodeLatent, NodeMask
from modelpool.actors.http.comfy.comfy_workflow_nodes import OperationRow
from modelpool.actors.http.comfy.node_errors import link_of
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.node_listing import NodeListing, NodeSettingListing

_RESULTS: Mapping[str, type[NodeImage | NodeMask | NodeLatent]] = MappingProxyType(
    {"image": NodeImage, "mask": NodeMask, "latent": NodeLatent}
)
_WIDGETS: Mapping[str, str] = MappingProxyType({"bool": "BOOLEAN", "int": "INT", "float": "FLOAT", "str": "STRING"})
#: bounds of numbers without their own
_LEAST, _MOST = -(2.0**53), 2.0**53


def kinds_with(nodes: Sequence[NodeListing]) -> Mapping[str, NodeType]:
    """Return the nodes that work here, the users' own included; a user's node does not replace another one."""
    own = {node.name: _kind(node) for node in nodes if node.name not in NODE_TYPES}
    return MappingProxyType({**NODE_TYPES, **own}) if own else NODE_TYPES


def _kind(node: NodeListing) -> NodeType:
    links = tuple(link(name, kind.upper(), name not in node.optional) for name, kind in node.inputs)
    widgets = tuple(map(_widget, node.settings))
    return _type(node.name, node.category, links, widgets, node.result)


def _type(
    name: str, category: str, links: tuple[NodeInput, ...], widgets: tuple[NodeInput, ...], result: str
) -> NodeType:
    row = OperationRow(
        name, _RESULTS[result], {each.name: each.name for each in links}, {each.name: each.name for each in widgets}
    )

    def build(given: Mapping[str, Any]) -> tuple[Any, ...]:
        return row.build(given) if "nodes" in given else only_in_workflows(given)

    return NodeType(name, category, (*links, *widgets), (result.upper(),), build)


def kinds_as_used(graph: Mapping[str, Any]) -> Mapping[str, NodeType]:
    """Return the nodes that work here, with each other kind of a workflow as a node of a user that is used rightly: its
    inputs have the types of what they are linked to, its result the type of what reads it, and its settings are
    written. The pool checks them all. Raises UserError for a result of no known type."""
    nodes = {node_id: node for node_id, node in graph.items() if isinstance(node, dict)}
    own = {node.get("class_type"): node for node in nodes.values() if node.get("class_type") not in NODE_TYPES}
    results = _results_as_read(nodes)
    kinds: dict[str, NodeType] = {}
    for name in own:
        links: dict[str, NodeInput] = {}
        widgets: dict[str, NodeInput] = {}
        for node in nodes.values():
            if node.get("class_type") != name:
                continue
            for given, value in (node.get("inputs") or {}).items():
                source = link_of(node, given)
                if source is None:
                    widgets[given] = _written(given, value)
                else:
                    links[given] = link(given, _output_type(nodes, results, source), is_required=False)
        kind = results.get(str(name), "")
        if kind.lower() not in _RESULTS:
            expected = "an input of a node of the pool that reads an image, a mask or a latent"
            raise UserError(f"node {name}: found a result that leads to {kind or 'nothing'}, expected {expected}")
        kinds[str(name)] = _type(str(name), "own", tuple(links.values()), tuple(widgets.values()), kind.lower())
    return MappingProxyType({**NODE_TYPES, **kinds})


def _results_as_read(nodes: Mapping[str, Any]) -> dict[str, str]:
    """Return the types of the results of nodes of users, by kind, as the inputs of other nodes have them. A node of a
    user that reads another one says nothing."""
    found: dict[str, str] = {}
    for node in nodes.values():
        kind = NODE_TYPES.get(node.get("class_type"))
        for given in () if kind is None else kind.inputs:
            source = link_of(node, given.name)
            made = None if source is None else nodes.get(source[0])
            if made is not None and made.get("class_type") not in NODE_TYPES and given.type != ANY:
                found.setdefault(str(made.get("class_type")), given.type)
    # of a node that only nodes of users read: most change what they read, and keep its type
    for node in nodes.values():
        for given in (node.get("inputs") or {}) if str(node.get("class_type")) in found else ():
            source = link_of(node, given)
            made = None if source is None else nodes.get(source[0])
            if made is not None and made.get("class_type") not in NODE_TYPES:
                found.setdefault(str(made.get("class_type")), found[str(node.get("class_type"))])
    return found


def _output_type(nodes: Mapping[str, Any], results: Mapping[str, str], source: tuple[str, int]) -> str:
    name = str(nodes.get(source[0], {}).get("class_type"))
    kind = NODE_TYPES.get(name)
    if kind is None:
        return results.get(name, ANY)
    return kind.outputs[source[1]] if 0 <= source[1] < len(kind.outputs) else ANY


def _written(name: str, value: Any) -> NodeInput:
    match value:
        case bool():
            return NodeInput(name, "BOOLEAN", is_required=False)
        case int():
            return NodeInput(name, "INT", None, _LEAST, _MOST, is_required=False)
        case float():
            return NodeInput(name, "FLOAT", None, _LEAST, _MOST, is_required=False)
    return NodeInput(name, "STRING", is_required=False)


def _widget(setting: NodeSettingListing) -> NodeInput:
    if setting.choices:
        return combo(
            setting.name, (str(setting.default), *(each for each in setting.choices if each != setting.default))
        )
    if setting.type not in _WIDGETS:  # a tuple of numbers: a text, which the pool reads
        return text(setting.name, ", ".join(map(str, setting.default)), is_required=False)
    least = _LEAST if setting.least is None else setting.least
    most = _MOST if setting.most is None else setting.most
    return NodeInput(setting.name, _WIDGETS[setting.type], setting.default, least, most)
