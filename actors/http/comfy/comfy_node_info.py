"""Describes nodes as ComfyUI's /object_info does, and what an error of a node is about. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelpool.actors.http.comfy.comfy_graph import MAX_NODES, PoolNames
from modelpool.actors.http.comfy.comfy_node_types import NodeInput, NodeType
from modelpool.actors.http.comfy.node_errors import NodeError, NodeFacts, link_of
from modelpool.actors.http.service.shown_messages import shown_message

#: characters of a value, and choices of an input, in the facts of an error
_MOST_SHOWN, _MOST_CHOICES = 1000, 100
#: nodes with errors of which facts are told
_MOST_TOLD = 100


def described(kind: NodeType, names: PoolNames) -> dict[str, Any]:
    """Return a node as /object_info has it."""
    required = {given.name: described_input(given, names) for given in kind.inputs if given.is_required}
    optional = {given.name: described_input(given, names) for given in kind.inputs if not given.is_required}
    return {
        "input": {"required": required, "optional": optional},
        "input_order": {"required": list(required), "optional": list(optional)},
        "output": list(kind.outputs),
        "output_is_list": [False] * len(kind.outputs),
        "output_name": list(kind.outputs),
        "name": kind.name,
        "display_name": kind.name,
        "description": "",
        "python_module": "modelpool",
        "category": kind.category,
        "output_node": kind.is_output,
    }


def described_input(given: NodeInput, names: PoolNames) -> list[Any]:
    """Return an input as /object_info has it: its type, or its choices, and its bounds."""
    if given.choices:
        found = names.choices(given)
        return [list(found), {} if given.default not in found else {"default": given.default}]
    if given.type in ("INT", "FLOAT"):
        kinds = f"{given.type},{given.also}" if given.also else given.type
        return [kinds, {"default": given.default, "min": given.least, "max": given.most}]
    if given.type in ("STRING", "BOOLEAN"):
        return [given.type, {"default": given.default}]
    return [given.type]


def facts_of(graph: Any, errors: Sequence[NodeError], names: PoolNames) -> dict[str, NodeFacts]:
    """Return the facts of the nodes with errors of a workflow, which may be damaged."""
    if not isinstance(graph, dict) or len(graph) > MAX_NODES:
        return {}
    nodes = {node_id: node for node_id, node in graph.items() if isinstance(node, dict)}
    sources: dict[str, list[str]] = {}
    outputs: list[str] = []
    for node_id, node in nodes.items():
        inputs = node.get("inputs")
        links = [link_of(node, name) for name in inputs] if isinstance(inputs, dict) else []
        sources[node_id] = [link[0] for link in links if link is not None]
        kind = names.kinds.get(node["class_type"]) if isinstance(node.get("class_type"), str) else None
        outputs += [node_id] if kind is not None and kind.is_output else []
    dependent: dict[str, list[str]] = {}
    wrong = {error.node_id for error in errors[:_MOST_TOLD]}
    for output in outputs:
        for node_id in wrong.intersection(_reached(sources, output)):
            dependent.setdefault(node_id, []).append(output)
    return {
        node_id: _facts(nodes[node_id], tuple(dependent.get(node_id, ())), names) if node_id in nodes else NodeFacts()
        for node_id in wrong
    }


def _facts(node: Mapping[str, Any], dependent: tuple[str, ...], names: PoolNames) -> NodeFacts:
    name, inputs = node.get("class_type"), node.get("inputs")
    kind = names.kinds.get(name) if isinstance(name, str) else None
    shown = {} if kind is None else {given.name: _short(described_input(given, names)) for given in kind.inputs}
    received = {
        name: shown_message(str(value)[:_MOST_SHOWN]) if isinstance(value, str) else value
        for name, value in (inputs.items() if isinstance(inputs, dict) else ())
        if isinstance(value, str | int | float | bool) and link_of(node, name) is None
    }
    return NodeFacts(dependent, shown, received)


def _short(shown: list[Any]) -> list[Any]:
    """Return the description of an input with its first choices."""
    return [shown[0][:_MOST_CHOICES], *shown[1:]] if isinstance(shown[0], list) else shown


def _reached(sources: Mapping[str, Sequence[str]], output: str) -> set[str]:
    waiting, seen = [output], {output}
    for node_id in waiting:
        for source in sources.get(node_id, ()):
            if source not in seen:
                seen.add(source)
                waiting.append(source)
    return seen
