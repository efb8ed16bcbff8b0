"""Errors of the nodes of a ComfyUI workflow, and its rejection as ComfyUI's clients expect it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.service.shown_messages import shown_message
from modelpool.pool.values.core.errors import UserError


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts of a node with an error, for its clients.

    dependent_outputs  the nodes that save or show something and depend on it
    described          its inputs as /object_info has them, by name
    received           its written values, by name
    """

    dependent_outputs: tuple[str, ...] = ()
    described: Mapping[str, list[Any]] = field(default_factory=dict)
    received: Mapping[str, Any] = field(default_factory=dict)


NO_FACTS: Mapping[str, NodeFacts] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class NodeError:
    """An error of one node. `kind` is the name of the error in ComfyUI's API."""

    node_id: str
    class_type: str
    kind: str
    message: str
    details: str
    input_name: str = ""


class WorkflowRejected(UserError):
    """A workflow that cannot be run. `errors` are of its nodes; `is_over_bound`: it has too much of something."""

    def __init__(self, kind: str, message: str, errors: Sequence[NodeError] = (), is_over_bound: bool = False) -> None:
        named = "; ".join(f"node {e.node_id} ({e.class_type}): {e.message}: {e.details}" for e in errors[:3])
        super().__init__(f"{message}: {named}" if named else message)
        self.kind = kind
        self.headline = message
        self.errors = tuple(errors)
        self.is_over_bound = is_over_bound

    def as_json(self, about: Mapping[str, NodeFacts] = NO_FACTS) -> dict[str, Any]:
        """Return the answer that ComfyUI's clients expect. `about` has further facts of the nodes with errors."""
        nodes: dict[str, Any] = {}
        for error in self.errors:
            facts = about.get(error.node_id, NodeFacts())
            found = nodes.setdefault(
                error.node_id,
                {
                    "errors": [],
                    "dependent_outputs": list(facts.dependent_outputs),
                    "class_type": error.class_type,
                },
            )
            extra: dict[str, Any] = {"input_name": error.input_name} if error.input_name else {}
            if error.input_name in facts.described:
                extra["input_config"] = facts.described[error.input_name]
            if error.input_name in facts.received:
                extra["received_value"] = facts.received[error.input_name]
            found["errors"].append(
                {
                    "type": error.kind,
                    "message": error.message,
                    "details": shown_message(error.details),
                    "extra_info": extra,
                }
            )
        extra_info = {}
        if self.kind == "missing_node_type" and self.errors:
            extra_info = {"node_id": self.errors[0].node_id, "class_type": self.errors[0].class_type}
        error_json = {
            "type": self.kind,
            "message": self.headline,
            "details": shown_message(str(self)),
            "extra_info": extra_info,
        }
        return {"error": error_json, "node_errors": nodes}


def link_of(node: Mapping[str, Any], name: str) -> tuple[str, int] | None:
    """Return the node and the place of the output that an input is linked to; None if it is not linked."""
    value = node.get("inputs", {}).get(name)
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str | int) and type(value[1]) is int:
        return str(value[0]), value[1]
    return None
