"""`AttentionKernels`: makes the calls of attention of an engine's runs, each by the kernel for its shape.

diffusers and transformers call `torch.nn.functional.scaled_dot_product_attention` by that name. Inside `routed` it
names a function that lets the kernels of the current context make the call; compiled code contains torch's function,
and the kernels that came first when it was traced. A function that the program has put there itself stays there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch import Tensor

from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.weights.ops.attention import AttentionBackend, reordered
from modelpool.pool.weights.ops.attention_choices import CallShape, KernelChoices, shape_of

#: maximum number of refused shapes that are remembered
REFUSALS_KEPT = 1024

#: what cuDNN's attention raises for shapes that it has no kernel for although torch chose it. Source: cudnn-frontend,
#: graph_interface.h, as reported to pytorch
_CUDNN_REFUSALS = ("No execution plans support the graph", "No valid execution plans built")

#: torch's function, or one with its arguments
Attend: TypeAlias = Callable[..., Tensor]

_LOG = logging.getLogger(__name__)


class AttentionKernels:
    """The order of attention kernels of one engine, and its exceptions: shapes that cuDNN's kernel refused and, with
    `choices`, shapes with a measured fastest kernel.

    A shape that cuDNN refuses is computed at once by the next kernel, then and from then on; other shapes are not
    affected. cuDNN's kernel is not used with a mask, nor with fewer heads of keys than of queries: it reads a mask of
    another type as the query's, and is wrong for few heads of keys on some cards.
    """

    def __init__(self, order: Sequence[AttentionBackend] = (), choices: KernelChoices | None = None) -> None:
        self.order = tuple(order)
        self.choices = choices
        #: shapes that cuDNN's kernel refused
        self.refused: LruCache[CallShape, bool] = LruCache(REFUSALS_KEPT)

    @property
    def is_needed(self) -> bool:
        """Whether calls have to be routed here."""
        return bool(self.order)

    @property
    def undivided(self) -> AttentionKernels | None:
        """What makes the calls that read nothing of the other members of a gang; None: torch's function does."""
        return self

    def drop_refused(self, error: BaseException) -> bool:
        """Leave out cuDNN's kernel from now on if `error` is its refusal of a shape in a call that was not routed.
        Returns whether it did: the run that raised `error` is worth another try."""
        if not is_refusal(error) or AttentionBackend.CUDNN not in self.order:
            return False
        self.order = _without_cudnn(self.order)
        return True

    def call(
        self,
        attend: Attend,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return the result of `attend`, torch's function, by the kernel for the shape. Queries without any visible key
        have a result of zeros."""
        if attn_mask is None:
            return self._by_kernel(attend, query, key, value, None, *args, **kwargs)
        mask, blind = with_visible_keys(attn_mask)
        return self._by_kernel(attend, query, key, value, mask, *args, **kwargs).masked_fill(blind, 0)

    def _by_kernel(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """The result of `attend`; each query has a visible key."""
        suits_cudnn = args[0] is None and query.shape[-3:-2] == key.shape[-3:-2]
        own = self.order if suits_cudnn else _without_cudnn(self.order)
        if self.choices is None and not len(self.refused) and len(own) == len(self.order):  # the usual case: a check
            try:
                return attend(query, key, value, *args, **kwargs)
            except RuntimeError as error:
                if not self._notes(error, shape_of(query, key, value, *args, **kwargs)):
                    raise
        shape = shape_of(query, key, value, *args, **kwargs)
        for _ in range(2):
            usual = _without_cudnn(own) if shape in self.refused else own
            order = usual
            if self.choices is not None:
                order = self.choices.order(shape, usual, lambda: attend(query, key, value, *args, **kwargs))
            try:
                with reordered(order, self.order):
                    return attend(query, key, value, *args, **kwargs)
            except RuntimeError as error:
                if not self._notes(error, shape):
                    raise
        raise AssertionError("a refusal is raised the second time")

    def _notes(self, error: RuntimeError, shape: CallShape) -> bool:
        """Remember that cuDNN's kernel refuses `shape`, if that is `error`. Returns whether it is, for the first time.

        Does not raise it: it would be held by a frame of its own traceback, with the tensors of the call.
        """
        if not is_refusal(error) or shape in self.refused:
            return False
        self.refused.put(shape, True)
        _LOG.warning("cuDNN's attention refused a shape, which another kernel computes: %s", shape)
        return True


def with_visible_keys(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return `mask` with all keys visible to queries that see none, and which queries these are (bool, with a last
    dimension of 1). Pure; does not wait for the device.

    Kernels divide zero by zero for such queries, and only some replace the result.
    """
    if mask.dtype is torch.bool:
        blind = ~mask.any(-1, keepdim=True)
        return mask | blind, blind
    blind = torch.isneginf(mask).all(-1, keepdim=True)
    return mask.masked_fill(blind, 0), blind


def is_refusal(error: BaseException) -> bool:
    """Whether `error` is the refusal of a shape by cuDNN's attention, which torch had chosen for it."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CUDNN_REFUSALS)


def current_kernels() -> AttentionKernels | None:
    """Return the kernels that make the calls of attention here; None: torch's function does."""
    return _KERNELS.get()


@contextmanager
def routed(kernels: AttentionKernels) -> Iterator[None]:
    """Let `kernels` make the calls of attention of this thread inside the block. No effect without an order.

    Blocks nest, and blocks of several threads may overlap: torch's function is back when the last one ends.
    """
    if not kernels.is_needed:
        yield
        return
    _HOOK.enter()
    token = _KERNELS.set(kernels)
    try:
        yield
    finally:
        _KERNELS.reset(token)
        _HOOK.leave()


@contextmanager
def complete_keys() -> Iterator[None]:
    """Have the attention of this thread inside the block read the keys that it is given and no others: each member of a
    gang has all of them, also where it has a share of the queries."""
    kernels = _KERNELS.get()
    token = _KERNELS.set(None if kernels is None else kernels.undivided)
    try:
        yield
    finally:
        _KERNELS.reset(token)


_KERNELS: ContextVar[AttentionKernels | None] = ContextVar("attention_kernels", default=None)
#: torch's function, without this module
torch_attention: Attend = torch.nn.functional.scaled_dot_product_attention


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """In place of torch's function while a block of `routed` is entered."""
    if torch.compiler.is_compiling():
        if attn_mask is None:
            return torch_attention(query, key, value, None, *args, **kwargs)
        mask, blind = with_visible_keys(attn_mask)
        return torch_attention(query, key, value, mask, *args, **kwargs).masked_fill(blind, 0)
    kernels = _KERNELS.get()
    if kernels is None:
        return torch_attention(query, key, value, attn_mask, *args, **kwargs)
    return kernels.call(torch_attention, query, key, value, attn_mask, *args, **kwargs)


class _Hook:
    """Puts `_attention` in the place of torch's function while a block is entered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._is_in_place = False

    def enter(self) -> None:
        """Count a block in."""
        with self._lock:
            self._blocks += 1
            if self._blocks == 1 and torch.nn.functional.scaled_dot_product_attention is torch_attention:
                torch.nn.functional.scaled_dot_product_attention = _attention
                self._is_in_place = True

    def leave(self) -> None:
        """Count a block out."""
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0 and self._is_in_place:
                self._is_in_place = False
                if torch.nn.functional.scaled_dot_product_attention is _attention:
                    torch.nn.functional.scaled_dot_product_attention = torch_attention


_HOOK = _Hook()


def _without_cudnn(order: Sequence[AttentionBackend]) -> tuple[AttentionBackend, ...]:
    return tuple(kernel for kernel in order if kernel is not AttentionBackend.CUDNN)
