"""`MetaCache`: caches the outputs of operations on the meta device by the sizes of their inputs.

torch computes the outputs of many operations there in Python (norms, products with a bias, softmax, activations), which
is most of the time of a dry run; the blocks of a model repeat the same ones. Operations that write to an input, or
return a view of one, are always run.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_META = torch.device("meta")
#: a few MiB: the entries of all stages of several large models
MAX_ENTRIES = 1 << 13


@dataclass(frozen=True, slots=True)
class _Output:
    """A tensor with its own storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def again(self) -> Tensor:
        """Create another such tensor."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)


#: output of an operation: a tensor, or several
_Entry: TypeAlias = _Output | tuple[_Output, ...]


class MetaCache(TorchDispatchMode):
    """Inside the block, outputs of operations are created from cached ones with equal inputs, of earlier blocks too.

    Enter it before other modes: they still receive every operation, with an output of its own.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answers: dict[Hashable, _Entry] = {}
        self._is_fresh: dict[Any, bool] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing is compiled here; torch's guard against that costs time in every operation
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return a cached output, or run the operation and cache its output."""
        kwargs = kwargs or {}
        is_fresh = self._is_fresh.get(func)
        if is_fresh is None:
            is_fresh = self._is_fresh[func] = _is_cacheable(func)
        if not is_fresh:
            return func(*args, **kwargs)
        try:
            question = (func, _key_of(args), _key_of(tuple(kwargs.items())) if kwargs else ())
        except _NotCacheable:
            return func(*args, **kwargs)
        known = self._answers.get(question)
        if known is not None:
            return known.again() if isinstance(known, _Output) else tuple(made.again() for made in known)
        out = func(*args, **kwargs)
        answer = _answer_of(out)
        if len(self._answers) >= MAX_ENTRIES:
            self._answers.clear()
        if answer is not None and not _storages(out) & _storages((args, kwargs)):
            self._answers[question] = answer
        return out


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in the arguments or outputs of an operation, from left to right: a tensor, or tuples, lists
    and dictionaries of tensors. Faster than the general tree walk of torch; called for every operation."""
    found: list[Tensor] = []
    _gather(value, found)
    return found


def _gather(value: object, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, tuple | list):
        for item in value:
            _gather(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _gather(item, found)


class _NotCacheable(Exception):
    """The output may depend on more than sizes."""


def _is_cacheable(func: Any) -> bool:
    """Whether an operation takes tensors, writes to none of them and returns no view of them."""
    schema = func._schema
    aliased = any(part.alias_info is not None for part in (*schema.arguments, *schema.returns))
    return not aliased and any("Tensor" in str(argument.type) for argument in schema.arguments)


def _key_of(value: Any) -> Hashable:
    """The cache key of `value`. Numbers of different types differ: `1` and `1.0` promote differently. Raises
    _NotCacheable for tensors with values or with a lazy conjugate or negative bit."""
    if isinstance(value, Tensor):
        if type(value) not in _PLAIN or not value.is_meta or value.is_complex():
            raise _NotCacheable
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple([_key_of(item) for item in value])
    return type(value), value


_PLAIN = (Tensor, nn.Parameter)


def _answer_of(out: Any) -> _Entry | None:
    """`out` as a cache entry; None for numbers, and for tensors that are part of a larger storage."""
    if isinstance(out, Tensor):
        return _made_of(out)
    if not isinstance(out, tuple) or len(_storages(out)) < len(out):
        return None
    found = [_made_of(one) for one in out if isinstance(one, Tensor)]
    whole = tuple(made for made in found if made is not None)
    return whole if whole and len(whole) == len(out) else None


def _storages(value: object) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors_in(value)}


def _made_of(tensor: Tensor) -> _Output | None:
    if type(tensor) is not Tensor or not tensor.is_meta or tensor.is_complex() or tensor.storage_offset():
        return None
    made = _Output(tuple(tensor.shape), tensor.stride(), tensor.dtype)
    is_whole = made.again().untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
    return made if is_whole else None
