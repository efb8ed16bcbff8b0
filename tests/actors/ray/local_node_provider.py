"""A node provider for Ray's autoscaler with instances that are raylets of this machine; imported by the autoscaler.

Node types may have in their `node_config`: "boot_seconds" (the instance takes that long to boot) and "stock_out" (no
instance can be launched; the text is the reason).
"""

from __future__ import annotations

import time
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider
from ray.autoscaler.node_launch_exception import NodeLaunchException


class LocalNodeProvider(FakeMultiNodeProvider):
    """As Ray's provider for its own tests, with slow and failing launches."""

    def _create_node_with_resources_and_labels(
        self, node_config: dict[str, Any], tags: Any, count: int, resources: Any, labels: Any
    ) -> None:
        if reason := node_config.get("stock_out"):
            raise NodeLaunchException("InsufficientInstanceCapacity", reason, None)
        time.sleep(node_config.get("boot_seconds", 0.0))
        super()._create_node_with_resources_and_labels(node_config, tags, count, resources, labels)
