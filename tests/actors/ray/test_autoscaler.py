"""Demand as pending actors, on Ray's real autoscaler: nodes come, images are rendered, nodes leave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from modelpool.scheduler.tables.messages import LossCause
from modelpool.scheduler.tables.node_groups import NodeGroup
from tests.actors.ray.local_autoscaler import LocalAutoscaler, NodeType, eventually, local_autoscaler

pytestmark = pytest.mark.ray

LABEL = "modelpool-group"
GROUPS = (
    NodeGroup(name="small", labels=((LABEL, "small"),), max_nodes=2),
    NodeGroup(name="large", labels=((LABEL, "large"),), gpus_per_node=2, max_nodes=1),
    NodeGroup(name="empty", labels=((LABEL, "empty"),)),
    NodeGroup(name="unknown", labels=((LABEL, "unknown"),)),
)
NODE_TYPES = {
    "small": NodeType(labels={LABEL: "small"}, most=2),
    "large": NodeType(gpus=2, labels={LABEL: "large"}, most=1),
    "empty": NodeType(labels={LABEL: "empty"}, node_config={"stock_out": "no capacity for this type in zone a"}),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalAutoscaler]:
    with local_autoscaler({name: node_type.config for name, node_type in NODE_TYPES.items()}) as started:
        yield started
