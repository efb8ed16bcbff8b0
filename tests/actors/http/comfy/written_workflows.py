"""Reads workflows that are written one node a line, in either of ComfyUI's formats (`public_kinds/*.txt`).

    === NAME [refused]
    ID TYPE INPUT=ID[:OUTPUT] ... {"widget": value}     API format
    ID TYPE INPUT=ID[:OUTPUT] ... [values of widgets]   as the editor saves it; ~INPUT=: a widget that became an input

Behind the values of an editor's node, mode=4 is bypassed and mode=2 is muted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelpool.actors.http.comfy.comfy_nodes import NODE_TYPES

FOLDER = Path(__file__).parent / "public_kinds"
_NODE = re.compile(r"(\S+) (.*?)((?: ~?[\w.]+=\S+)*) ([\[{].*[\]}])(.*)")


@dataclass(frozen=True, slots=True)
class Written:
    """A workflow, and whether it has what the pool does not have."""

    name: str
    prompt: dict[str, Any]
    is_refused: bool


def written_workflows() -> Iterator[Written]:
    """Yield all workflows of the folder."""
    for path in sorted(FOLDER.glob("*.txt")):
        for part in path.read_text().split("=== ")[1:]:
            head, *lines = part.strip().split("\n")
            name, *marks = head.split()
            nodes = [_NODE.fullmatch(line) for line in lines]
            assert all(nodes), (name, [line for line, node in zip(lines, nodes, strict=True) if node is None])
            found = [node.groups() for node in nodes if node is not None]
            prompt = _editor(found) if found[0][3].startswith("[") else _api(found)
            yield Written(name, prompt, "refused" in marks)


def _api(lines: list[tuple[str, ...]]) -> dict[str, Any]:
    prompt: dict[str, Any] = {}
    for node_id, kind, links, values, _ in lines:
        linked = {name.lstrip("~"): [source, slot] for name, source, slot in _links(links)}
        prompt[node_id] = {"class_type": kind, "inputs": {**json.loads(values), **linked}}
    return prompt


def _links(links: str) -> Iterator[tuple[str, str, int]]:
    for link in links.split():
        name, source = link.split("=")
        source, _, slot = source.partition(":")
        yield name, source, int(slot or 0)


def _editor(lines: list[tuple[str, ...]]) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = []
    links: list[list[Any]] = []
    kinds = {line[0]: line[1] for line in lines}
    for node_id, kind, linked, values, options in lines:
        inputs: list[dict[str, Any]] = []
        for name, source, slot in _links(linked):
            known = NODE_TYPES.get(kinds[source])
            outputs = known.outputs if known else ()
            made = outputs[slot] if slot < len(outputs) else "*"
            links.append([len(links) + 1, int(source), slot, int(node_id), len(inputs), made])
            given = {"name": name.lstrip("~"), "type": made, "link": len(links)}
            inputs.append({**given, "widget": {"name": given["name"]}} if name.startswith("~") else given)
        known = NODE_TYPES.get(kind)
        made_here = [{"name": made, "type": made} for made in (known.outputs if known else ())]
        mode = re.search(r"mode=(\d)", options)
        nodes.append(
            {
                "id": int(node_id), "type": kind, "inputs": inputs, "outputs": made_here,
                "widgets_values": json.loads(values), "mode": int(mode[1]) if mode else 0,
            }
        )  # fmt: skip
    return {"nodes": nodes, "links": links}
