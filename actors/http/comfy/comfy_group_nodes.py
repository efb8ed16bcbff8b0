"""Converts group nodes of ComfyUI's editor, the form before subgraphs, to subgraphs. Pure.

A workflow lists its groups in `extra.groupNodes`; a node of type "workflow>NAME" stands for one. Its inputs are the
inputs of the nodes in it that no link of the group leads to, in the order of these nodes; its outputs are the outputs
that no link begins at, or that are listed as external. Its widgets are the widgets of its nodes, one node after the
other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from modelpool.actors.http.comfy.comfy_graph import MAX_NODES
from modelpool.actors.http.comfy.node_errors import NodeError, WorkflowRejected
from modelpool.pool.values.core.errors import counted

_PREFIXES = ("workflow>", "workflow/")
#: the nodes at which the links of a subgraph begin and end
SUBGRAPH_INPUT, SUBGRAPH_OUTPUT = -10, -20
#: nodes and links of all group nodes together: some links for each node that a workflow may have
_MOST_PARTS = 10 * MAX_NODES


def with_subgraphs(workflow: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a workflow of the editor in which group nodes are subgraphs, one for each node. Raises WorkflowRejected
    for a group node with other widgets or inputs than its group, and KeyError, IndexError and TypeError for damaged
    ones."""
    groups = (workflow.get("extra") or {}).get("groupNodes") or {}
    if not groups:
        return workflow
    nodes: list[Any] = []
    subgraphs, parts = list((workflow.get("definitions") or {}).get("subgraphs") or ()), 0
    for node in workflow["nodes"]:
        name = _group_of(node)
        if name is None or name not in groups:
            nodes.append(node)
            continue
        parts += len(groups[name]["nodes"]) + len(groups[name]["links"])
        if parts > _MOST_PARTS:  # each group node has nodes and links of its own
            message = f"found group nodes of more than {_MOST_PARTS} nodes and links together"
            raise WorkflowRejected("invalid_prompt", message, is_over_bound=True)
        subgraph = f"{node['type']} {node['id']}"
        subgraphs.append({"id": subgraph, **_subgraph(node, groups[name])})
        # the nodes in it have its values
        nodes.append({**node, "type": subgraph, "widgets_values": []})
    return {**workflow, "nodes": nodes, "definitions": {"subgraphs": subgraphs}}


def _group_of(node: Any) -> str | None:
    kind = node.get("type") if isinstance(node, Mapping) else None
    if not isinstance(kind, str):
        return None
    return next((kind.removeprefix(each) for each in _PREFIXES if kind.startswith(each)), None)


def _subgraph(host: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the subgraph that a group node stands for."""
    inner = [dict(node, id=place) for place, node in enumerate(group["nodes"])]
    within = [row for row in group["links"] if row[0] is not None and row[2] is not None]
    links: list[dict[str, Any]] = []

    def add(source: tuple[int, int], target: tuple[int, int]) -> int:
        keys = ("origin_id", "origin_slot", "target_id", "target_slot")
        links.append({"id": len(links) + 1, **dict(zip(keys, (*source, *target), strict=True))})
        return len(links)

    linked = {(row[2], row[3]): add((row[0], row[1]), (row[2], row[3])) for row in within}
    free = [place for place in _inputs_of(inner) if place not in linked]
    plain = [each for each in host.get("inputs") or () if not each.get("widget")]
    if len(free) != len(plain):
        raise _refused(host, f"found {counted(len(plain), 'input')}, expected {len(free)} as its group has")
    for slot, place in enumerate(free):
        linked[place] = add((SUBGRAPH_INPUT, slot), place)
    names = [each["name"] for each in plain]
    for each in host.get("inputs") or ():
        if each.get("widget") and each.get("link") is not None:
            place = _widget_place(host, group, inner, each["widget"]["name"])
            linked[place] = add((SUBGRAPH_INPUT, len(names)), place)
            names.append(each["name"])
    for slot, place in enumerate(_outputs_of(inner, within, group.get("external") or ())):
        add(place, (SUBGRAPH_OUTPUT, slot))
    for node, values in zip(inner, _values_of(host, inner), strict=True):
        node["widgets_values"] = values
        node["inputs"] = [
            {**each, "link": linked.get((node["id"], slot))} for slot, each in enumerate(node.get("inputs") or ())
        ]
    return {"nodes": inner, "links": links, "inputs": [{"name": name} for name in names]}


def _inputs_of(inner: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int]]:
    """Yield the node and the slot of each input that is no widget."""
    for node in inner:
        for slot, each in enumerate(node.get("inputs") or ()):
            if not each.get("widget"):
                yield node["id"], slot


def _outputs_of(
    inner: Sequence[Mapping[str, Any]], within: Sequence[Sequence[Any]], external: Sequence[Sequence[Any]]
) -> Iterator[tuple[int, int]]:
    """Yield the node and the slot of each output of a group, in order."""
    hidden = {(row[0], row[1]) for row in within}
    # an external output names its node by its place, or has all of it
    shown = {(row[0] if isinstance(row[0], int) else row[0]["index"], row[1]) for row in external}
    for node in inner:
        for slot, _ in enumerate(node.get("outputs") or ()):
            place = node["id"], slot
            if place not in hidden or place in shown:
                yield place


def _values_of(host: Mapping[str, Any], inner: Sequence[Mapping[str, Any]]) -> Iterator[list[Any]]:
    """Yield the values of the widgets of each node, which the group node has one behind the other."""
    values = list(host.get("widgets_values") or ())
    counts = [len(node.get("widgets_values") or ()) for node in inner]
    if sum(counts) != len(values):
        raise _refused(host, f"found {counted(len(values), 'value')}, expected {sum(counts)} as its nodes have")
    for count in counts:
        yield values[:count]
        del values[:count]


def _widget_place(
    host: Mapping[str, Any], group: Mapping[str, Any], inner: Sequence[Mapping[str, Any]], name: str
) -> tuple[int, int]:
    """Return the node and the slot of a widget that became an input, by its name in the group."""
    found = []
    for node in inner:
        renamed = ((group.get("config") or {}).get(str(node["id"])) or {}).get("input") or {}
        for slot, each in enumerate(node.get("inputs") or ()):
            if each.get("widget") and (renamed.get(each["name"]) or {}).get("name", each["name"]) == name:
                found.append((node["id"], slot))
    if len(found) != 1:
        raise _refused(host, f"{name}: found {counted(len(found), 'widget')} of this name in its group, expected one")
    return found[0]


def _refused(host: Mapping[str, Any], details: str) -> WorkflowRejected:
    message = "the group node and its group differ"
    error = NodeError(str(host["id"]), str(host["type"])[:100], "invalid_prompt", message, details)
    return WorkflowRejected("invalid_prompt", "the workflow cannot be converted", [error])
