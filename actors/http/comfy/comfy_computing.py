"""`ComputingWork`: the work of all nodes of a workflow that compute texts and numbers, counted before it is done.

Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelpool.actors.http.comfy.comfy_value_nodes import COMPUTED_NODES, SEARCH_STEPS
from modelpool.actors.http.comfy.node_errors import NodeError, WorkflowRejected

#: steps of all nodes that compute, together: characters that are read, and steps of searches; about a second
MAX_COMPUTED_STEPS = 40_000_000


class ComputingWork:
    """Counts what the nodes of one workflow read and search, also of nodes that fail afterwards, and of nodes that are
    computed more than once."""

    def __init__(self) -> None:
        self._done = 0

    def take(self, node_id: str, kind: str, settings: Mapping[str, Any]) -> None:
        """Count the work of a node that is computed next. Raises WorkflowRejected naming the first node for which there
        is no room."""
        if kind not in COMPUTED_NODES:
            return
        self._done += sum(len(value) for value in settings.values() if isinstance(value, str))
        if (steps := SEARCH_STEPS.get(kind)) is not None:
            self._done += steps(settings)
        if self._done > MAX_COMPUTED_STEPS:
            details = (
                f"found more than {MAX_COMPUTED_STEPS} steps in the nodes that compute texts and numbers, up to this "
                "one; expected shorter texts, or fewer nodes that search them"
            )
            error = NodeError(node_id, kind, "value_bigger_than_max", "too much is computed", details)
            raise WorkflowRejected("invalid_prompt", "prompt: too much is computed", [error], is_over_bound=True)
