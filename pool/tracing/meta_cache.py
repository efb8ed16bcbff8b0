"""`MetaAnswers`: what operations make on the meta device, found once for inputs of the same sizes.

torch finds the outputs of many operations there in Python (norms, products with a bias, softmax, activations), which
is most of the time of a dry run; the blocks of a model ask for the same ones over and over. Knows operations only as
torch describes them: one that writes to an input, or answers with a part of one, is always run.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_META = torch.device("meta")
#: some MiB of them: those of all stages of several large models
ANSWERS_KEPT = 1 << 13


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor with a storage of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def again(self) -> Tensor:
        """One more of it."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)


#: what an operation answers: a tensor, or several
_Answer: TypeAlias = _Made | tuple[_Made, ...]


class MetaAnswers(TorchDispatchMode):
    """Inside the block, answers of operations are made from those to the same question, of earlier blocks too.

    Enter it before other modes: they see every operation, as they would without it, with an output of its own.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answers: dict[Hashable, _Answer] = {}
        self._is_fresh: dict[Any, bool] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer, or run the operation and keep what it made."""
        kwargs = kwargs or {}
        is_fresh = self._is_fresh.get(func)
        if is_fresh is None:
            is_fresh = self._is_fresh[func] = _answers_afresh(func)
        if not is_fresh:
            return func(*args, **kwargs)
        try:
            question = (func, _asked(args), _asked(tuple(kwargs.items())) if kwargs else ())
        except _NotOfSizes:
            return func(*args, **kwargs)
        known = self._answers.get(question)
        if known is not None:
            return known.again() if isinstance(known, _Made) else tuple(made.again() for made in known)
        out = func(*args, **kwargs)
        answer = _answer_of(out)
        if len(self._answers) >= ANSWERS_KEPT:
            self._answers.clear()
        if answer is not None and not _storages(out) & _storages((args, kwargs)):
            self._answers[question] = answer
        return out


def tensors_in(value: object) -> list[Tensor]:
    """The tensors among what an operation is given or answers, from left to right: a tensor, or tuples, lists and
    dictionaries of such. Faster than torch's walk over trees of any kind, which is asked for every operation."""
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


class _NotOfSizes(Exception):
    """The answer may follow from more than sizes."""


def _answers_afresh(func: Any) -> bool:
    """Whether an operation takes tensors, writes to none of them and answers with no part of them."""
    schema = func._schema
    aliased = any(part.alias_info is not None for part in (*schema.arguments, *schema.returns))
    return not aliased and any("Tensor" in str(argument.type) for argument in schema.arguments)


def _asked(value: Any) -> Hashable:
    """`value` as far as outputs follow from it. Numbers of different kinds are different: `1` and `1.0` promote
    otherwise. Raises _NotOfSizes for tensors with values or with signs that wait to be turned."""
    if isinstance(value, Tensor):
        if type(value) not in _PLAIN or not value.is_meta or value.is_complex():
            raise _NotOfSizes
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple([_asked(item) for item in value])
    return type(value), value


_PLAIN = (Tensor, nn.Parameter)


def _answer_of(out: Any) -> _Answer | None:
    """`out` as it can be made again; None for numbers, and for tensors that hold more than their own elements."""
    if isinstance(out, Tensor):
        return _made_of(out)
    if not isinstance(out, tuple) or len(_storages(out)) < len(out):
        return None
    found = [_made_of(one) for one in out if isinstance(one, Tensor)]
    whole = tuple(made for made in found if made is not None)
    return whole if whole and len(whole) == len(out) else None


def _storages(value: object) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors_in(value)}


def _made_of(tensor: Tensor) -> _Made | None:
    if type(tensor) is not Tensor or not tensor.is_meta or tensor.is_complex() or tensor.storage_offset():
        return None
    made = _Made(tuple(tensor.shape), tensor.stride(), tensor.dtype)
    is_whole = made.again().untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
    return made if is_whole else None
