"""Converts workflows that ComfyUI's editor exports to the API format: a table of nodes, each with its inputs by name.

The editor's format lists nodes and links, and the values of widgets by position. Positions follow the table of nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelpool.actors.http.comfy_graph import NodeError, WorkflowRejected
from modelpool.actors.http.comfy_nodes import NODE_TYPES, WIDGET_TYPES

#: nodes of the editor that do nothing
_NOTES = ("Note", "MarkdownNote")
_REROUTE, _PRIMITIVE = "Reroute", "PrimitiveNode"
#: what the editor does with a seed after a run; its value follows that of the seed
_SEED_CONTROLS = ("fixed", "increment", "decrement", "randomize")
_SEEDS = ("seed", "noise_seed")
#: modes of nodes that are switched off
_NEVER, _BYPASS = 2, 4


def api_format(workflow: Any) -> dict[str, Any]:
    """Return a workflow in the API format; one that is in it already as it is. Raises WorkflowRejected."""
    if not isinstance(workflow, dict):
        raise WorkflowRejected("invalid_prompt", "expected a workflow: a table of nodes")
    nodes, links = workflow.get("nodes"), workflow.get("links")
    if not isinstance(nodes, list) or not isinstance(links, list):
        return workflow
    try:
        return _converted({str(node["id"]): node for node in nodes}, {link[0]: link for link in links})
    except (KeyError, IndexError, TypeError, AttributeError) as problem:
        raise WorkflowRejected("invalid_prompt", f"the exported workflow is damaged ({problem!r})") from None


def _converted(nodes: Mapping[str, Any], links: Mapping[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    errors: list[NodeError] = []
    for node_id, node in nodes.items():
        kind = node["type"]
        if kind in (*_NOTES, _REROUTE, _PRIMITIVE) or node.get("mode") == _NEVER:
            continue
        if kind not in NODE_TYPES:
            errors.append(NodeError(node_id, str(kind)[:100], "missing_node_type", "unknown node", str(kind)[:100]))
        elif node.get("mode") == _BYPASS:
            errors.append(NodeError(node_id, kind, "unsupported_value", "not supported by the pool", "bypassed"))
        else:
            found[node_id] = {"class_type": kind, "inputs": {**_widgets(node), **_linked(node, nodes, links)}}
    if errors:
        raise WorkflowRejected("missing_node_type", "the pool does not have these nodes", errors)
    return found


def _widgets(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the widgets of a node, by name."""
    values = node.get("widgets_values") or []
    if isinstance(values, dict):
        return dict(values)
    left = list(values)
    found: dict[str, Any] = {}
    for given in NODE_TYPES[node["type"]].inputs:
        if given.type not in WIDGET_TYPES or not left:
            continue
        found[given.name] = left.pop(0)
        if given.name in _SEEDS and left and left[0] in _SEED_CONTROLS:
            left.pop(0)
    return found


def _linked(node: Mapping[str, Any], nodes: Mapping[str, Any], links: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the inputs of a node that are linked, by name: to an output of a node, or to a value."""
    found: dict[str, Any] = {}
    for given in node.get("inputs") or []:
        if given.get("link") is None:
            continue
        source, slot = _source(links[given["link"]], nodes, links)
        if nodes[source]["type"] == _PRIMITIVE:
            found[given["name"]] = nodes[source]["widgets_values"][0]
        else:
            found[given["name"]] = [source, slot]
    return found


def _source(link: Any, nodes: Mapping[str, Any], links: Mapping[Any, Any]) -> tuple[str, int]:
    """Return the node and the output at the beginning of a link, behind reroutes. Raises KeyError for a loop."""
    for _ in range(len(links) + 1):
        source, slot = str(link[1]), link[2]
        if nodes[source]["type"] != _REROUTE:
            return source, slot
        link = links[nodes[source]["inputs"][0]["link"]]
    raise KeyError("reroutes in a loop")
