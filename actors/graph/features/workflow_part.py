"""`RecipeWorkflow`: the workflow of an output in its recipe, and its lines of `modelpool inspect`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from modelpool.actors.graph.features.feature import Feature, Line, Section
from modelpool.actors.graph.features.recorded import INFORMATIVE

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import Recipe


@dataclass(frozen=True, slots=True)
class RecipeWorkflow:
    """The nodes of a workflow that its output depends on.

    nodes   by id, as in a request, with the defaults of their models; images as {"sha256": of the pixels as used}
    output  the node with the result
    files   kind, name and SHA-256 of each file that they use
    images  the file names of images, by hash
    """

    nodes: Mapping[str, Any]
    output: str
    files: tuple[tuple[str, str, str], ...]
    images: Mapping[str, str] = field(default_factory=dict, metadata=INFORMATIVE)


def _lines(recipe: Recipe) -> Iterator[Line]:
    if (workflow := recipe.workflow) is None:
        return
    for node_id, node in workflow.nodes.items():
        read = ", ".join(f"{name} of {source}" for name, source in node.get("inputs", {}).items())
        yield f"node {node_id}", f"{node['kind']} {_what(node)}{f' ({read})' if read else ''}"
    for kind, name, sha256 in workflow.files:
        yield kind, f"{name}  (sha256 {sha256})"


def _what(node: Mapping[str, Any]) -> str:
    """Return what a node does besides its kind."""
    if node["kind"] == "sample":
        request = node["request"]
        return f"{request['model']}, {request.get('sampler', 'euler')}, {request.get('steps', 20)} steps"
    if node["kind"] == "upscale":
        return str(node["upscale"]["model"])
    return str(node.get("model") or node.get("name") or "")


WORKFLOW = Feature(recipe=Section(lines=_lines))
