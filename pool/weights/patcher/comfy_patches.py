"""Converts patches in ComfyUI's form, and functions applied last to a weight, to `WeightPatch` values.

Knows the notation of patches, not how they are applied (`pool.weights.patches`) nor to which module.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from modelpool.pool.values.core.errors import PatchFailed
from modelpool.pool.weights.ops.packed import PackedWeight
from modelpool.pool.weights.patches.full_weights import (
    Difference,
    ModelDifference,
    PatchedWeight,
    Replacement,
    padded_difference,
)
from modelpool.pool.weights.patches.patch_set import DeltaFunction, Offset, PatchSet, PatchValue, WeightPatch
from modelpool.pool.weights.patches.weight_patch import Shape, expect_shape

#: parameter, (parameter, (dim, start, length)) or (parameter, offset, function on the delta)
PatchKey: TypeAlias = str | tuple[Any, ...]
#: a value, or ComfyUI's form of one: (tensor,), ("diff", (tensor,)), ("set", (tensor,)), ("model_as_lora", (tensor,)),
#: [(weight, convert), *patches]
KeyedPatches: TypeAlias = Mapping[PatchKey, Any]
#: patched weight, float32, which may be modified in place -> the weight to use, of the same shape
WeightWrapper: TypeAlias = Callable[[Tensor], Tensor]

#: named kinds of values -> the expected content
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "diff": '(tensor,) or (tensor, {"pad_weight": True})',
        "set": "(tensor,)",
        "model_as_lora": "(tensor,)",
    }
)


@dataclass(frozen=True, slots=True)
class WrapperValue:
    """A weight wrapper in the form of a patch value."""

    parameter: str
    wrapper: WeightWrapper = field(compare=False)

    @property
    def working_bytes(self) -> int:
        """Unknown; a wrapper that needs more memory than the weight's copy must free it itself."""
        return 0

    @property
    def acts_at_zero(self) -> bool:
        """True: a wrapper has no strength."""
        return True

    def patched_shape(self, shape: Shape) -> Shape:
        """Return the same shape."""
        return shape

    def apply(self, weight: Tensor, strength: float, function: DeltaFunction | None) -> Tensor:
        """See `PatchValue.apply`."""
        wrapped: object = self.wrapper(weight)
        if not isinstance(wrapped, Tensor):
            found = type(wrapped).__name__
            raise PatchFailed(f"the weight wrapper of {self.parameter!r} returned {found}, expected a tensor")
        expect_shape("the wrapped weight", tuple(wrapped.shape), tuple(weight.shape))
        return wrapped.to(device=weight.device, dtype=weight.dtype)


def weight_wrapper(parameter: str, wrapper: WeightWrapper, identity: str | None = None) -> WeightPatch:
    """Return `wrapper` as a patch that a patcher keeps after all others: called with the patched weight of `parameter`.

    Equal identities mean equal results; without one, no two wrappers are equal.
    """
    return WeightPatch(parameter, f"wrapper:{identity or uuid.uuid4().hex}", WrapperValue(parameter, wrapper))


def with_wrappers_last(existing: PatchSet, added: tuple[WeightPatch, ...]) -> PatchSet:
    """Return `existing` followed by `added`, except that weight wrappers come last, in the order of their adding."""
    if not any(_is_wrapper(patch) for patch in existing.patches):
        return existing.with_patches(sorted(added, key=_is_wrapper))
    return PatchSet(tuple(sorted((*existing.patches, *added), key=_is_wrapper)))


def patches_from(
    keyed: KeyedPatches,
    weights: Mapping[str, Tensor],
    strength_patch: float = 1.0,
    strength_model: float = 1.0,
    identity: str | None = None,
) -> Iterator[WeightPatch]:
    """Yield the patches of `keyed` for parameters in `weights` (parameter -> unpatched weight, on the host), in
    order. `identity` names the values for digests, and the functions on deltas too: the same identity with the same
    keys in the same order must mean equal values and equal functions.

    Raises PatchFailed, naming the key, for a value or key of an unknown kind, for non-finite numbers, and for a
    strength that is no number.
    """
    name = identity or uuid.uuid4().hex
    strengths = _number("strength_patch", strength_patch), _number("strength_model", strength_model)
    for number, (key, value) in enumerate(keyed.items()):
        parameter, offset, function = _parts(key)
        if parameter not in weights:
            continue
        known = f"{name}/{number}"
        yield WeightPatch(
            parameter,
            known,
            _Reader(parameter, weights[parameter], known).value(value),
            strengths[0],
            strength_model=strengths[1],
            offset=offset,
            function=_delta_function(parameter, function, known),
        )


def _parts(key: PatchKey) -> tuple[str, Offset | None, Any]:
    if isinstance(key, str):
        return key, None, None
    if not isinstance(key, tuple) or not 1 <= len(key) <= 3 or not isinstance(key[0], str):
        raise PatchFailed(f"patch key {key!r}: expected a name, (name, offset) or (name, offset, function)")
    parameter, offset, function = (*key, None, None)[:3]
    return parameter, _offset(parameter, offset), function


def _offset(key: str, offset: Any) -> Offset | None:
    if offset is None or isinstance(offset, Offset):
        return offset
    if isinstance(offset, (tuple, list)) and len(offset) == 3 and all(type(part) is int for part in offset):
        return Offset(*offset)
    raise PatchFailed(f"patch of {key!r}: found the offset {offset!r}, expected (dim, start, length)")


def _number(what: str, found: Any) -> float:
    if isinstance(found, Real):
        return float(found)
    raise PatchFailed(f"{what}: found {found!r}, expected a number")


def _delta_function(key: str, function: Any, identity: str) -> DeltaFunction | None:
    """Return `function` under the `identity` of its patch, for the digest of the patch."""
    if function is None or isinstance(function, DeltaFunction):
        return function
    if not callable(function):
        raise PatchFailed(f"patch of {key!r}: found the function {function!r}, expected one on the delta")
    return DeltaFunction(identity, function)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads values for one parameter with the unpatched weight `weight`."""

    key: str
    weight: Tensor
    identity: str

    def value(self, value: Any) -> PatchValue:
        match value:
            case (Tensor() as tensor,) | ("diff", (Tensor() as tensor,)):
                return Difference(self._finite(tensor))
            case ("diff", (Tensor() as tensor, {"pad_weight": True})):
                return padded_difference(self._finite(tensor))
            case ("set", (Tensor() as tensor,)):
                return Replacement(self._finite(tensor))
            case ("model_as_lora", (Tensor() as tensor,)):
                return ModelDifference(self._finite(tensor), self.weight)
            case [(Tensor() as tensor, convert), *patches] if isinstance(value, list):
                if convert is not None and not callable(convert):
                    raise self._error(f"the conversion {convert!r}", "a function or None")
                nested = tuple(self._nested(number, patch) for number, patch in enumerate(patches))
                return PatchedWeight(self._finite(tensor), nested, convert)
            case (str() as kind, *_) if kind in _KINDS:
                raise self._error(f"something else than tensors for {kind!r}", _KINDS[kind])
            case (str() as kind, *_):
                raise self._error(f"the kind {kind!r}", f"one of {sorted(_KINDS)}, or a value of pool.patches")
        if isinstance(value, type) or not hasattr(value, "apply") or not hasattr(value, "patched_shape"):
            raise self._error(type(value).__name__, "a patch value or tensors")
        known: PatchValue = value
        return known

    def _nested(self, number: int, patch: Any) -> WeightPatch:
        """Convert one of ComfyUI's tuples (strength, value, strength_model, offset, function), or return a ready
        patch."""
        if isinstance(patch, WeightPatch):
            return patch
        if not isinstance(patch, (tuple, list)) or len(patch) != 5:
            expected = "(strength, value, strength_model, offset, function)"
            raise self._error(f"{_described(patch)} among the patches of a weight", expected)
        strength, value, strength_model, offset, function = patch
        inner = _Reader(self.key, self.weight, f"{self.identity}/{number}")
        what = f"patch of {self.key!r}: strength of a patch in it"
        return WeightPatch(
            self.key,
            inner.identity,
            inner.value(value),
            _number(what, strength),
            strength_model=_number(what, strength_model),
            offset=_offset(self.key, offset),
            function=_delta_function(self.key, function, inner.identity),
        )

    def _finite(self, tensor: Tensor) -> Tensor:
        # packed weights were checked when their file was read
        if isinstance(tensor, PackedWeight) or not tensor.is_floating_point():
            return tensor
        plain = tensor if tensor.itemsize > 1 else tensor.float()  # 8-bit formats have no isfinite
        if not bool(torch.isfinite(plain).all()):
            raise self._error("non-finite numbers", "finite ones")
        return tensor

    def _error(self, found: str, expected: str) -> PatchFailed:
        return PatchFailed(f"patch of {self.key!r}: found {found}, expected {expected}")


def _described(patch: Any) -> str:
    return f"{type(patch).__name__} of {len(patch)}" if isinstance(patch, (tuple, list)) else type(patch).__name__


def _is_wrapper(patch: WeightPatch) -> bool:
    return isinstance(patch.value, WrapperValue)
