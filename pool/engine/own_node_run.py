"""Runs a node of a user in a worker: of the version that the task names, with its threads, where it has the memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil
import torch

from modelpool.pool.inference.operations.own_nodes import VERSION, NodeFailed, OpenedNode
from modelpool.pool.values.core.stage_params import OperationParams, Result
from modelpool.pool.values.core.task_inputs import TaskInputs


def run_own_node(work: OperationParams, inputs: TaskInputs, own: Mapping[str, OpenedNode]) -> Result:
    """Return the result of a node of a user. Raises NodeFailed for a node or a version that this worker does not have,
    and for what the node does wrong; MemoryError on a machine with less memory than the node needs."""
    settings = dict(work.settings)
    version, node = settings.pop(VERSION, ""), own.get(work.name)
    if node is None:
        known = ", ".join(own) or "none"
        raise NodeFailed(f"{work.name}: this worker has no node of this name; it has {known} ([workflows] nodes)")
    if node.declared.version != version:
        raise NodeFailed(f"{work.name}: found version {node.declared.version} on this worker, expected {version}")
    available_bytes = psutil.virtual_memory().available
    if available_bytes < node.declared.memory_bytes:
        needs = f"needs {node.declared.memory_bytes} bytes of memory, and its machine has {available_bytes}"
        raise MemoryError(f"{work.name}: {needs}")
    with _threads(node.declared.threads):
        return node.operation(node.operation.params_of(settings), dict(inputs))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
