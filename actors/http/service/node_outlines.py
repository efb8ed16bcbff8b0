"""`NodeOutline`: a node of the workflow of a job as people see it, without its values and images. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.graph.pass_workflow import workflow_of_passes
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.workflow_fields import OperationNode, SampleNode, UpscaleNode

#: kinds of nodes that are images of the user
GIVEN = ("image", "mask")


@dataclass(frozen=True, slots=True)
class NodeOutline:
    """A node of a workflow.

    kind    as in a request
    what    the model or the operation, and the sampler; "" for an image of the user
    inputs  the nodes that it reads, by name
    """

    node_id: str
    kind: str
    what: str
    inputs: Mapping[str, str]


def outlines_of(request: GenerateRequest) -> tuple[NodeOutline, ...]:
    """Return the nodes that the output of a request depends on, each after the nodes that it reads; () for a request
    without a workflow and without passes."""
    if request.workflow is None and not request.passes:
        return ()
    workflow = workflow_of_passes(request) if request.workflow is None else request.workflow
    return tuple(NodeOutline(node_id, node.kind, _what(node), dict(node.inputs)) for node_id, node in workflow.in_order)


def outlines_of_recipe(recipe: Recipe) -> tuple[NodeOutline, ...]:
    """Return the same of the recipe of an output."""
    if recipe.workflow is None:
        return ()
    return tuple(
        NodeOutline(node_id, str(node["kind"]), _what_recorded(node), dict(node.get("inputs", {})))
        for node_id, node in recipe.workflow.nodes.items()
    )


def _what(node: Any) -> str:
    match node:
        case SampleNode():
            return ", ".join(filter(None, (node.request.model, _name(node.request.sampler))))
        case UpscaleNode():
            return node.upscale.model
        case OperationNode():
            return node.name
    return str(getattr(node, "model", "") or "")


def _what_recorded(node: Mapping[str, Any]) -> str:
    if node["kind"] == "sample":
        return ", ".join(filter(None, (str(node["request"].get("model", "")), _name(node["request"].get("sampler")))))
    if node["kind"] == "upscale":
        return str(node["upscale"].get("model", ""))
    return str(node.get("model") or node.get("name") or "")


def _name(value: Any) -> str:
    """Return the name of a sampler; "" for the default of the model."""
    return "" if value is None else str(value)
