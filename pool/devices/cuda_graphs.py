"""`CudaGraphs`: captures calls on a CUDA device, each with a private pool of memory.

Not measured on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from modelpool.pool.devices.device_waits import FirstWait, WaitsForDevice
from modelpool.pool.devices.torch_api.torch_private import leave_pool

#: operations that copy from the host
_COPIES = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default})


class CudaGraph:
    """A captured call; see `pool.weights.patcher.graphed_calls.CapturedGraph`."""

    def __init__(self, graph: Any, output: Any, held_bytes: int, read: tuple[Tensor, ...]) -> None:
        self._graph = graph
        self.output = output
        self.held_bytes = held_bytes
        #: what a replay reads besides its inputs: tables that a module computes once and keeps, and memory of the host
        self._read = read

    def replay(self) -> None:
        """Make the call again on the current stream."""
        self._graph.replay()


class CudaGraphs:
    """Captures calls on one device. The calling thread must use no other stream meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    def capture(self, run: Callable[[], Any]) -> CudaGraph:
        """Run `run` once on a stream of its own, where libraries get their workspaces, and capture it there.

        Raises WaitsForDevice if that first run waits for the device: nothing is captured then. Raises anything that
        the device refuses, or `run` raises, in the capture: the current stream and the allocator are as before.
        """
        cuda: Any = torch.cuda
        self._stream = self._stream or cuda.Stream(self._device)
        current = cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        first_wait = FirstWait(self._device.type)
        try:
            with cuda.stream(self._stream), first_wait:
                run()
        finally:
            current.wait_stream(self._stream)  # also after an error: what the run read may be freed then
        if first_wait.operation:
            raise WaitsForDevice(f"it waits for the device in {first_wait.operation}")
        cuda.synchronize(self._device)
        cuda.empty_cache()
        before_bytes = cuda.memory_reserved(self._device)
        graph, reads = cuda.CUDAGraph(), ReadTensors()
        with self._capturing(graph), reads:
            output = run()
        current.wait_stream(self._stream)
        held_bytes = max(0, cuda.memory_reserved(self._device) - before_bytes)
        return CudaGraph(graph, output, held_bytes, reads.found())

    @contextmanager
    def _capturing(self, graph: Any) -> Iterator[None]:
        """Capture the block into `graph`, with a private pool of memory.

        `torch.cuda.graph` leaves the thread on the capture stream, and the allocator in the pool of the capture, when
        the device refuses an operation: the driver then refuses to end the capture too, and torch gets no further.
        """
        cuda: Any = torch.cuda
        pool = cuda.graph_pool_handle()
        with cuda.stream(self._stream):
            try:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                yield
                graph.capture_end()
            except BaseException:
                self._abandon(graph, pool)
                raise

    def _abandon(self, graph: Any, pool: Any) -> None:
        """End a capture that failed, and take the allocator out of its pool."""
        with suppress(RuntimeError):  # the capture was refused, was ended before, or never began
            graph.capture_end()
        leave_pool(self._device, pool)
        with suppress(RuntimeError):
            graph.reset()


class ReadTensors(TorchDispatchMode):
    """Notes the tensors that a replay reads: those that operations read and none of them made, and all on the host, as
    a copy to the device that the host does not wait for (`pool.devices.pinned_memory.sent`). torch's cache of pinned
    memory would hand them out again.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's modes are not typed
        self._sent: dict[int, Tensor] = {}
        self._made: set[int] = set()
        self._read: dict[int, Tensor] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run inside: its inputs are noted where others make or read them."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and (storage := _storage_of(leaf)) not in self._made:
                self._read.setdefault(storage, leaf)
        results = func(*args, **kwargs)
        if func in _COPIES:
            for leaf in args:
                if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                    self._sent.setdefault(_storage_of(leaf), leaf)
        for leaf in pytree.tree_leaves(results):
            if isinstance(leaf, Tensor) and (storage := _storage_of(leaf)) not in self._read:
                self._made.add(storage)
        return results

    def found(self) -> tuple[Tensor, ...]:
        """The tensors, one for each storage."""
        return tuple({**self._sent, **self._read}.values())


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
