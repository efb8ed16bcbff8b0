"""Tokens of texts: names in brackets that nodes of a workflow give values, and one node puts in their place. Pure.

In ComfyUI the nodes share a file of the server. Here the node that replaces tokens reads those that the nodes of its
own workflow define, as if they were linked to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from modelpool.actors.http.comfy.comfy_node_types import ANY, NodeType, NodeUnsupported, link, text
from modelpool.actors.http.comfy.comfy_searches import replaced
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.pool.values.core.errors import counted

_ADD, _ADD_LINES, _PARSE = "Text Add Token by Input", "Text Add Tokens", "Text Parse Tokens"
#: tokens that a node replaces, nodes that do so, and tokens of a workflow that are looked at
_MOST_TOKENS, _MOST_READERS, _MOST_DEFINED = 100, 50, 2000
#: tokens that say something of a server
_OF_SERVERS = re.compile(r"\[(?:time(?:\([^\[\]()]{0,100}\))?|hostname|cuda_device|cuda_name|user)\]")


def with_tokens(nodes: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    """Return a workflow in which each node that replaces tokens is linked to what defines them, but for what depends
    on itself."""
    readers = [node_id for node_id, node in nodes.items() if node["class_type"] == _PARSE]
    if len(readers) > _MOST_READERS:
        found_here = counted(len(readers), "node")
        problem = f"{_PARSE}: found {found_here} in a workflow, expected up to {_MOST_READERS}"
        raise WorkflowRejected("invalid_prompt", problem, is_over_bound=True)
    tokens = list(islice(_tokens(nodes), _MOST_DEFINED)) if readers else []
    found = dict(nodes)
    links = _readers(nodes) if readers else {}
    for reader in readers:
        own: dict[str, Any] = {}
        known = _depending_on(links, reader)
        for name, value in tokens:
            if len(own) == 2 * _MOST_TOKENS:
                break
            sources = {str(each[0]) for each in (name, value) if isinstance(each, list) and each}
            if not sources & known:
                place = len(own) // 2 + 1
                own |= {f"name_{place}": name, f"value_{place}": value}
        found[reader] = {**nodes[reader], "inputs": {**nodes[reader]["inputs"], **own}}
    return found


def _tokens(nodes: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield the names and values that nodes define, written or linked."""
    for node in nodes.values():
        inputs = node["inputs"]
        if node["class_type"] == _ADD and {"token_name", "token_value"} <= set(inputs):
            yield inputs["token_name"], inputs["token_value"]
        elif node["class_type"] == _ADD_LINES and isinstance(inputs.get("tokens"), str):
            for line in inputs["tokens"].split("\n")[:_MOST_TOKENS]:
                name, colon, value = line.partition(":")
                if colon and name.strip():
                    yield name.strip(), value.strip()


def _readers(nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the nodes that are linked to each."""
    readers: dict[str, list[str]] = {}
    for node_id, node in nodes.items():
        for value in node["inputs"].values():
            if isinstance(value, list) and len(value) == 2:
                readers.setdefault(str(value[0]), []).append(node_id)
    return readers


def _depending_on(readers: Mapping[str, list[str]], start: str) -> set[str]:
    """Return the nodes that read what a node makes, with itself."""
    found, waiting = {start}, [start]
    while waiting:
        for each in readers.get(waiting.pop(), ()):
            if each not in found:
                found.add(each)
                waiting.append(each)
    return found


def _parsed(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A text with values for tokens. Raises NodeUnsupported for tokens that a server has, and for values that are no
    texts."""
    found = given["text"]
    for place in range(1, _MOST_TOKENS + 1):
        name, value = given.get(f"name_{place}"), given.get(f"value_{place}")
        if name is None or value is None:
            break
        if not isinstance(name, str) or not isinstance(value, str | int | float):
            raise NodeUnsupported(f"token {str(name)[:40]}: found {str(value)[:40]!r}, expected a text")
        found = replaced(found, f"[{name.strip().removeprefix('[').removesuffix(']')}]", str(value))
    if (wrong := _OF_SERVERS.search(found)) is not None:
        raise NodeUnsupported(f"text: found {wrong[0][:40]}, which depends on a server; write what it stands for")
    return (found,)


def _nothing(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return ()


TOKEN_NODES = (
    NodeType(
        _PARSE,
        "values",
        (
            text("text"),
            *(
                link(f"{name}_{place}", ANY, is_required=False)
                for place in range(1, _MOST_TOKENS + 1)
                for name in ("name", "value")
            ),
        ),
        ("STRING",),
        _parsed,
    ),
)
#: nodes that define tokens, and make nothing
TOKEN_DEFINITIONS = (
    NodeType(_ADD, "values", (text("token_name"), text("token_value")), (), _nothing),
    NodeType(_ADD_LINES, "values", (text("tokens"), text("print_current_tokens", "false", False)), (), _nothing),
)
