"""Calls of a whole model as CUDA graphs, for runs in which it is frozen: captured at the second use of a shape.

A component is frozen if all its weights are on the device in compute dtype, none has a patch that is computed at each
use, and the run has no option that acts inside the model. A graph reads the addresses that it was captured with: it is
dropped when one of the component's tensors on the device is replaced, and stays valid when a switch of LoRAs writes
into them. Everything else runs as usual. `GraphStore` bounds the graphs of an engine and counts their memory.

How calls are captured is behind `GraphMaker` (`pool.devices.cuda_graphs`). Interrupts are checked before each call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from modelpool.pool.devices.device_waits import WaitsForDevice
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.specs.spec import ComponentKey
from modelpool.pool.weights.ops.context import check_interrupt, without_interrupt
from modelpool.pool.weights.patcher.out_of_memory import exhausted_memory, release_frames

#: graphs of one engine: each holds the activations of a call
MOST_GRAPHS = 4
#: shapes of calls that are remembered as used once, or as impossible to capture
SHAPES_KEPT = 256

_LOG = logging.getLogger(__name__)


class CapturedGraph(Protocol):
    """A captured call."""

    @property
    def output(self) -> Any:
        """The result of the call; each `replay` writes its tensors."""
        ...

    @property
    def held_bytes(self) -> int:
        """Device memory that it holds."""
        ...

    def replay(self) -> None:
        """Make the call again, with what its input tensors contain now."""
        ...


class GraphMaker(Protocol):
    """Captures calls on one device."""

    def capture(self, run: Callable[[], Any]) -> CapturedGraph:
        """Capture `run`, which was run before. May raise anything that the device refuses, and leaves it usable;
        WaitsForDevice if `run` reads values of the device, so that no call like it can be captured."""
        ...


@dataclass(frozen=True, slots=True)
class _Entry:
    """A graph, the tensors that it reads its inputs from, and the version of the weights that it reads."""

    graph: CapturedGraph
    inputs: tuple[Tensor, ...]
    version: int


class GraphStore:
    """The graphs of an engine, least recently used first. Not thread-safe.

    Their memory is not available for weights and runs: plans count `held_bytes`, and drop all graphs before anything
    is evicted or streamed.
    """

    def __init__(self, maker: GraphMaker, most: int = MOST_GRAPHS) -> None:
        self.maker = maker
        #: whether the plan has room for another graph now; set by the owner of the device's memory
        self.has_room: Callable[[], bool] = lambda: True
        #: calls that were captured or replayed
        self.calls = 0
        self._most = most
        self._entries: dict[tuple[ComponentKey, Hashable], _Entry] = {}
        self._seen: LruCache[tuple[ComponentKey, Hashable], bool] = LruCache(SHAPES_KEPT)
        self._refused: LruCache[tuple[ComponentKey, Hashable], bool] = LruCache(SHAPES_KEPT)
        #: components that read values of the device in each call
        self._reading: LruCache[ComponentKey, bool] = LruCache(SHAPES_KEPT)
        #: why the device refused a capture; empty if it has not. Nothing is captured after that: parts of torch's
        #: state (of its generators, of its host allocator) stay as in a capture
        self.refusal = ""

    @property
    def held_bytes(self) -> int:
        """Device memory of all graphs."""
        return sum(entry.graph.held_bytes for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def drop(self, component: ComponentKey) -> None:
        """Drop the graphs of a component before its tensors are replaced or freed."""
        for key in [key for key in self._entries if key[0] == component]:
            del self._entries[key]

    def drop_all(self) -> int:
        """Drop all graphs. Returns the bytes that they held."""
        held_bytes = self.held_bytes
        self._entries.clear()
        return held_bytes

    def call(
        self, component: ComponentKey, version: int, run: Callable[..., Any], args: Any, kwargs: Any, device: Any
    ) -> Any:
        """Return `run(*args, **kwargs)`: replayed if it was captured with these shapes, captured if it is the second
        such call, and made as usual otherwise. `version` changes when an address of the component's weights does."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        shape = _shape_of(leaves, tree, device)
        if shape is None:
            return run(*args, **kwargs)
        key = (component, shape)
        entry = self._entries.pop(key, None)
        if entry is not None and entry.version != version:
            self.drop(component)
            entry = None
        if entry is None:
            if not self._may_capture(key):
                self._seen.put(key, True)
                return run(*args, **kwargs)
            entry = self._captured(key, version, run, leaves, tree)
            if entry is None:
                return run(*args, **kwargs)
        self._entries[key] = entry  # most recently used
        for held, given in zip(entry.inputs, (leaf for leaf in leaves if isinstance(leaf, Tensor)), strict=True):
            held.copy_(given)
        entry.graph.replay()
        self.calls += 1
        # the next replay writes into the output of this one
        return pytree.tree_map_only(Tensor, torch.clone, entry.graph.output)

    def _may_capture(self, key: tuple[ComponentKey, Hashable]) -> bool:
        """Whether a call is to be captured now."""
        if self.refusal or key in self._refused or key[0] in self._reading:
            return False
        return key in self._seen and self.has_room()

    def _captured(
        self, key: tuple[ComponentKey, Hashable], version: int, run: Callable[..., Any], leaves: Any, tree: Any
    ) -> _Entry | None:
        """A new graph; None if the call cannot be captured, or memory ran out."""
        held = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(held, tree)
        while len(self._entries) >= self._most:
            del self._entries[next(iter(self._entries))]
        try:
            with without_interrupt():  # an interrupt would end the capture, not the run
                graph = self.maker.capture(lambda: run(*args, **kwargs))
        except Exception as error:
            release_frames(error)
            self._refused.put(key, True)
            if exhausted_memory(error) is not None:
                self.drop_all()
            elif isinstance(error, WaitsForDevice):
                self._reading.put(key[0], True)
                _LOG.warning("calls of %s are not captured as graphs: %s", key[0], error)
            else:
                self.refusal = str(error)
                _LOG.warning("a call of %s is not captured as a graph, nor is any other from now on: %s", key[0], error)
            return None
        if not all(_is_known(leaf) or isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(graph.output)):
            self._refused.put(key, True)  # a tensor inside of an unknown object would be overwritten
            return None
        return _Entry(graph, tuple(leaf for leaf in held if isinstance(leaf, Tensor)), version)


class GraphedCalls:
    """Lets calls of one component's module go through the store, while it is frozen."""

    def __init__(self, key: ComponentKey, module: nn.Module, device: torch.device, store: GraphStore) -> None:
        self._key, self._module, self._device, self.store = key, module, device, store
        self._version: Callable[[], int | None] = lambda: None

    @contextmanager
    def running(self, version: Callable[[], int | None]) -> Iterator[None]:
        """Inside the block, calls of the module may be graphs. `version` returns the version of the addresses of its
        weights; None if it is not frozen now. Nests: the innermost block applies. A forward that others have put in
        the place of the module's stays there, and no call is a graph.
        """
        before, is_first = self._version, "forward" not in self._module.__dict__
        self._version = version
        if is_first:
            self._module.__dict__["forward"] = self._call
        try:
            yield
        finally:
            self._version = before
            if is_first:
                del self._module.__dict__["forward"]

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside the block no call is a graph."""
        before, self._version = self._version, lambda: None
        try:
            yield
        finally:
            self._version = before

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        version = self._version()
        run = type(self._module).forward.__get__(self._module)
        if version is None:
            return run(*args, **kwargs)
        check_interrupt()
        return self.store.call(self._key, version, run, args, kwargs, self._device)


def _shape_of(leaves: list[Any], tree: Any, device: torch.device) -> Hashable | None:
    """The arguments of a call but for the values of tensors; None if a tensor is on another device (its values would
    become part of a graph), or if an argument cannot be compared."""
    found: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.device != device or type(leaf) is not torch.Tensor:
                return None
            found.append((tuple(leaf.shape), leaf.dtype, leaf.stride()))
        elif _is_known(leaf):
            found.append((type(leaf), leaf))
        else:
            return None
    return str(tree), tuple(found)


def _is_known(leaf: Any) -> bool:
    """Whether a value can be compared, and contains no tensor."""
    return leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype | torch.device)
