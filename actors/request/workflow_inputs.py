"""Sets inputs of the nodes of a workflow by name, as in "sampler.steps": of a workflow of the pool, and of one in
ComfyUI's API format. Torch-free, ray-free."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from modelpool.actors.request.bounds import MAX_ENTRIES, check_entries
from modelpool.pool.values.core.errors import UserError, unusable_field

#: where a node of the pool has fields that belong to what it runs
_PARTS = ("request", "settings")
#: the tables of a node that are changed
_TABLES = (*_PARTS, "inputs")
_LISTED = 20
#: the seed beside a workflow of the pool, of nodes that set none
SEED = "seed"


def is_own_workflow(graph: Any) -> bool:
    """Whether a value is a workflow of the pool, and not one of ComfyUI."""
    return (
        isinstance(graph, Mapping) and isinstance(graph.get("nodes"), Mapping) and isinstance(graph.get("output"), str)
    )


def value_of_text(text: str) -> Any:
    """Return the value that a text means: a number, true, false or a list as in JSON, else the text itself."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if found is None or isinstance(found, str | dict) else found


def inputs_of_texts(texts: tuple[str, ...], option: str = "--set") -> dict[str, Any]:
    """Return inputs by name from texts such as "sampler.steps=8". Raises UserError."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or ("." not in name and name.strip() != SEED):
            raise unusable_field(option, text, "NODE.INPUT=VALUE, such as 3.seed=7")
        found[name.strip()] = value_of_text(value)
    return found


def with_inputs(graph: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a workflow with other inputs of its nodes. A name is the id of a node, a dot, and the name of an input; of
    a node of the pool also of a field of its request, or of a setting; "seed" is that of nodes without one. Raises
    UserError for a node or an input that the workflow does not have."""
    check_entries("inputs", inputs, MAX_ENTRIES)
    changed, is_own = dict(graph), is_own_workflow(graph)
    nodes = changed
    if is_own:
        nodes = changed["nodes"] = dict(graph["nodes"])
    for name, value in inputs.items():
        if name == SEED and is_own_workflow(graph):
            changed[SEED] = value
            continue
        node_id = next((name[:place] for place in _dots(name) if name[:place] in nodes), None)
        node = None if node_id is None else nodes[node_id]
        if node_id is None or not isinstance(node, dict):
            listed, near = ", ".join(list(map(str, nodes))[:_LISTED]), _near(name.partition(".")[0], map(str, nodes))
            raise UserError(f"inputs: found {name[:200]!r}, expected NODE.INPUT with one of the nodes {listed}{near}")
        # of the caller's tables, only those that change are copied: a graph may be large, and its values deep
        tables = {key: dict(node[key]) for key in _TABLES if isinstance(node.get(key), dict)}
        nodes[node_id] = node = {**node, **tables}
        _set(node, node_id, name[len(node_id) + 1 :], value, is_own)
    return changed


def _near(name: str, known: Iterable[str]) -> str:
    """Return the nearest of some names as the end of a message; "" if none is near."""
    near = difflib.get_close_matches(name[:200], list(known)[:MAX_ENTRIES], n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _dots(name: str) -> list[int]:
    """Return the places of the dots in a name, the last one first: an id may have some."""
    return [place for place in range(len(name) - 1, 0, -1) if name[place] == "."]


def _set(node: dict[str, Any], node_id: str, name: str, value: Any, is_own: bool) -> None:
    """Set an input of a node. Raises UserError if it has none of this name."""
    if not is_own:
        known = node.get("inputs")
        if not isinstance(known, dict) or name not in known:
            names = list(map(str, known)) if isinstance(known, dict) else []
            listed = ", ".join(names[:_LISTED]) or "none"
            raise UserError(f"inputs: node {node_id} has no input {name[:200]!r}; it has {listed}{_near(name, names)}")
        known[name] = value
        return
    if name in node or name in ("prompt", "image", "mask", "strength", "first_step", "last_step"):
        if name not in node and node.get("kind") == "sample" and name == "prompt":
            node.setdefault("request", {})[name] = value
        else:
            node[name] = value
        return
    part = next((part for part in _PARTS if isinstance(node.get(part), dict)), None)
    if part is None:
        raise UserError(f"inputs: node {node_id} has no field {name[:200]!r}; it has {', '.join(node)}")
    node[part][name.removeprefix(f"{part}.")] = value
