"""`on_node`: places an actor or a task on a chosen node.

Imports Ray at once: import this module after a session is open.
"""

from __future__ import annotations

from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from modelpool.pool.values.specs.spec import NodeId


def on_node(node: NodeId) -> dict[str, Any]:
    """Return the options of an actor or task without CPU slots that runs on `node` or nowhere."""
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
