"""Links that the nodes "Anything Everywhere" of the editor stand for: they are none of the file's own links. Pure.

Newer files list them. In others, such a node is linked to each input of the type that nothing is linked to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from modelpool.actors.http.comfy.node_errors import NodeError, WorkflowRejected

_NODES = ("Anything Everywhere", "Anything Everywhere?", "Anything Everywhere3", "Prompts Everywhere")
_PROMPTS = "Prompts Everywhere"
#: properties, and widgets of "Anything Everywhere?", that say which nodes are meant
_PATTERNS = ("title_regex", "input_regex", "group_regex")
#: properties with which it sends to its own group or colour alone, or to what a pattern does not match
_LIMITS = ("group_restricted", "color_restricted", *(f"{name}_invert" for name in _PATTERNS))
_EVERY = ("", ".*", None)
#: links that are added to a file
_MOST_ADDED = 2000
#: modes of nodes that are switched off
_NEVER, _BYPASS = 2, 4


def with_everywhere(workflow: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a workflow of the editor with the links that its nodes stand for. Raises WorkflowRejected for a choice of
    inputs by patterns that the file does not list, and for too many links."""
    extra = workflow.get("extra")
    listed = extra.get("ue_links") if isinstance(extra, dict) else None
    senders = [node for node in workflow["nodes"] if node.get("type") in _NODES and _is_active(node)]
    if isinstance(listed, list):
        added = [
            (str(each["upstream"]), int(each["upstream_slot"]), str(each["downstream"]), int(each["downstream_slot"]))
            for each in listed
            if isinstance(each, dict)
        ]
    elif senders:
        added = list(_by_type(workflow, senders))
    else:
        return workflow
    if len(added) > _MOST_ADDED:
        message = f"found more than {_MOST_ADDED} links of nodes that are linked to everything"
        raise WorkflowRejected("invalid_prompt", message, is_over_bound=True)
    return _with_links(workflow, added) if added else workflow


def _is_active(node: Mapping[str, Any]) -> bool:
    return node.get("mode") not in (_NEVER, _BYPASS)


def _with_links(workflow: Mapping[str, Any], added: Sequence[tuple[str, int, str, int]]) -> Mapping[str, Any]:
    """Return a workflow with links from an output to an input that nothing is linked to; others stay as they are."""
    nodes = {str(node["id"]): node for node in workflow["nodes"]}
    links = list(workflow["links"])
    ids = [link["id"] if isinstance(link, dict) else link[0] for link in links if link is not None]
    following = max((each for each in ids if isinstance(each, int)), default=0) + 1
    for source, source_slot, target, slot in added:
        inputs = (nodes.get(target) or {}).get("inputs") or ()
        if source not in nodes or not 0 <= slot < len(inputs) or inputs[slot].get("link") is not None:
            continue
        changed = list(inputs)
        changed[slot] = {**inputs[slot], "link": following}
        nodes[target] = {**nodes[target], "inputs": changed}
        links.append([following, source, source_slot, target, slot, inputs[slot].get("type")])
        following += 1
    return {**workflow, "nodes": list(nodes.values()), "links": links}


def _by_type(workflow: Mapping[str, Any], senders: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int, str, int]]:
    """Yield a link to each unlinked input with the type of an output that is linked to the nodes. Raises
    WorkflowRejected for patterns, and for two nodes with one type."""
    links = {each[0]: each for each in workflow["links"] if isinstance(each, list)}
    nodes = {str(node["id"]): node for node in workflow["nodes"]}
    sent: dict[tuple[str, str], tuple[str, int]] = {}
    for sender in senders:
        values = sender.get("widgets_values")
        patterns = [((sender.get("properties") or {}).get("ue_properties") or {}).get(name) for name in _PATTERNS]
        patterns += list(values) if isinstance(values, list) and sender["type"] != _PROMPTS else []
        settings = sender.get("properties") or {}
        limits = [each.get(name) for each in (settings, settings.get("ue_properties") or {}) for name in _LIMITS]
        if any(pattern not in _EVERY for pattern in patterns) or any(limits):
            _refuse(
                sender,
                "it chooses inputs by patterns, groups or colours; save it with its links shown, or for the API",
            )
        for place, given in enumerate(sender.get("inputs") or ()):
            link = links.get(given.get("link"))
            if link is None or str(link[1]) not in nodes:
                continue
            outputs = nodes[str(link[1])].get("outputs") or ()
            kind = str(outputs[link[2]].get("type")) if link[2] < len(outputs) else str(given.get("type"))
            side = ("positive", "negative")[place % 2] if sender["type"] == _PROMPTS else ""
            if (kind, side) in sent:
                _refuse(sender, f"a second node is linked to each input of type {kind}; expected one")
            sent[kind, side] = str(link[1]), link[2]
    for node in nodes.values():
        if node.get("type") in _NODES or not _is_active(node):
            continue
        for slot, given in enumerate(node.get("inputs") or ()):
            if given.get("link") is not None or given.get("widget"):
                continue
            kind, name = str(given.get("type")), str(given.get("name"))
            side = next((each for each in ("positive", "negative") if each in name), "")
            source = sent.get((kind, side)) or sent.get((kind, ""))
            if source is not None and source[0] != str(node["id"]):
                yield (*source, str(node["id"]), slot)


def _refuse(node: Mapping[str, Any], reason: str) -> None:
    """Raise WorkflowRejected naming a node."""
    error = NodeError(str(node["id"])[:100], node["type"], "invalid_prompt", "its links are not known", reason)
    raise WorkflowRejected("invalid_prompt", "the workflow cannot be converted", [error])
