"""Graphs of calls on the CPU with the semantics of CUDA graphs: a replay repeats operations on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class RecordedGraph:
    """The operations of a call, with the tensors that they read and wrote."""

    def __init__(self, held_bytes: int) -> None:
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.output: Any = None
        self.held_bytes = held_bytes
        self.replays = 0

    def replay(self) -> None:
        """Repeat the operations in order; results go where they went."""
        self.replays += 1
        for func, args, kwargs, results in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(pytree.tree_leaves(results), pytree.tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class RecordedGraphs:
    """Captures calls as `RecordedGraph`s of `held_bytes` each; `refuses` is raised in place of a capture."""

    def __init__(self, held_bytes: int = 100) -> None:
        self.held_bytes = held_bytes
        self.made: list[RecordedGraph] = []
        self.refuses: Exception | None = None
        #: calls of `capture`
        self.tries = 0

    def capture(self, run: Callable[[], Any]) -> RecordedGraph:
        """As `GraphMaker.capture`."""
        self.tries += 1
        if self.refuses is not None:
            raise self.refuses
        graph = RecordedGraph(self.held_bytes)
        with torch.no_grad(), _Recording(graph):
            graph.output = run()
        self.made.append(graph)
        return graph


class _Recording(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs inside."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self._graph.operations.append((func, args, kwargs or {}, results))
        return results
