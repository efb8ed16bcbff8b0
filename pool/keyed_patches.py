"""Patches in ComfyUI's form, and functions that have the last word on a weight, as `WeightPatch` values.

Knows how patches are said, not how they are applied (`pool.patches`) nor to which module.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from pool.errors import PatchFailed
from pool.patches.patch_set import DeltaFunction, Offset, PatchSet, PatchValue, WeightPatch
from pool.patches.values import Difference, ModelDifference, PatchedWeight, Replacement, padded_difference
from pool.patches.weight_patch import Shape, expect_shape

#: parameter, (parameter, (dim, start, length)) or (parameter, offset, function on the delta)
PatchKey: TypeAlias = str | tuple[Any, ...]
#: a value, or ComfyUI's spelling of one: (tensor,), ("diff", (tensor,)), ("set", (tensor,)),
#: ("model_as_lora", (tensor,)), [(weight, convert), *patches]
KeyedPatches: TypeAlias = Mapping[PatchKey, Any]
#: patched weight, float32, to be written into or not -> the weight that is used, of the same shape
WeightWrapper: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class WrapperValue:
    """A weight wrapper in the form of a patch value."""

    wrapper: WeightWrapper = field(compare=False)

    @property
    def working_bytes(self) -> int:
        """Not known; a wrapper that needs more than the weight's own copy must make room itself."""
        return 0

    @property
    def acts_at_zero(self) -> bool:
        """It has no strength."""
        return True

    def patched_shape(self, shape: Shape) -> Shape:
        """The same shape."""
        return shape

    def apply(self, weight: Tensor, strength: float, function: DeltaFunction | None) -> Tensor:
        """See `PatchValue.apply`."""
        wrapped = self.wrapper(weight)
        expect_shape("the wrapped weight", tuple(wrapped.shape), tuple(weight.shape))
        return wrapped.to(device=weight.device, dtype=weight.dtype)


def weight_wrapper(parameter: str, wrapper: WeightWrapper, identity: str | None = None) -> WeightPatch:
    """`wrapper` as a patch that a patcher keeps behind all others: called with the patched weight of `parameter`.

    Equal identities mean equal results; without one, no two wrappers are ever taken for equal.
    """
    return WeightPatch(parameter, f"wrapper:{identity or uuid.uuid4().hex}", WrapperValue(wrapper))


def with_wrappers_last(there: PatchSet, added: tuple[WeightPatch, ...]) -> PatchSet:
    """`there` with `added` after it, but for weight wrappers: these come last, in the order of their adding."""
    if not any(_is_wrapper(patch) for patch in there.patches):
        return there.with_patches(sorted(added, key=_is_wrapper))
    return PatchSet(tuple(sorted((*there.patches, *added), key=_is_wrapper)))


def patches_from(
    keyed: KeyedPatches,
    weights: Mapping[str, Tensor],
    strength_patch: float = 1.0,
    strength_model: float = 1.0,
    identity: str | None = None,
) -> Iterator[WeightPatch]:
    """The patches of `keyed` whose key is one of `weights`, in order: parameter -> unpatched weight, on the host.
    `identity` names the values for digests.

    Raises PatchFailed, naming the key, for a value or key of no known kind.
    """
    name = identity or uuid.uuid4().hex
    for number, (key, value) in enumerate(keyed.items()):
        parameter, offset, function = _parts(key)
        if parameter not in weights:
            continue
        called = None if function is None else _delta_function(function)
        yield WeightPatch(
            parameter,
            f"{name}/{number}",
            _value(parameter, value, weights[parameter]),
            strength_patch,
            strength_model=strength_model,
            offset=offset,
            function=called,
        )


def _parts(key: PatchKey) -> tuple[str, Offset | None, Any]:
    if isinstance(key, str):
        return key, None, None
    if not isinstance(key, tuple) or not 1 <= len(key) <= 3 or not isinstance(key[0], str):
        raise PatchFailed(f"patch key {key!r}: expected a name, (name, offset) or (name, offset, function)")
    parameter, offset, function = (*key, None, None)[:3]
    if offset is None or isinstance(offset, Offset):
        return parameter, offset, function
    return parameter, Offset(*offset), function


def _delta_function(function: Any) -> DeltaFunction:
    return function if isinstance(function, DeltaFunction) else DeltaFunction(uuid.uuid4().hex, function)


def _value(key: str, value: Any, weight: Tensor) -> PatchValue:
    match value:
        case (Tensor() as tensor,) | ("diff", (Tensor() as tensor,)):
            return Difference(tensor)
        case ("diff", (Tensor() as tensor, {"pad_weight": True})):
            return padded_difference(tensor)
        case ("set", (Tensor() as tensor,)):
            return Replacement(tensor)
        case ("model_as_lora", (Tensor() as tensor,)):
            return ModelDifference(tensor, weight)
        case [(Tensor() as tensor, convert), *patches] if isinstance(value, list):
            return PatchedWeight(tensor, tuple(_nested(key, p, weight) for p in patches), convert)
        case str() | list() | tuple() | dict():
            raise PatchFailed(f"patch of {key!r}: found {type(value).__name__}, expected a patch value or tensors")
    if not hasattr(value, "apply") or not hasattr(value, "patched_shape"):
        raise PatchFailed(f"patch of {key!r}: found {type(value).__name__}, expected a patch value or tensors")
    known: PatchValue = value
    return known


def _nested(key: str, patch: Any, weight: Tensor) -> WeightPatch:
    """One of ComfyUI's tuples (strength, value, strength_model, offset, function), or a ready patch."""
    if isinstance(patch, WeightPatch):
        return patch
    strength, value, strength_model, offset, function = patch
    return WeightPatch(
        key,
        uuid.uuid4().hex,
        _value(key, value, weight),
        strength,
        strength_model=strength_model,
        offset=None if offset is None else Offset(*offset),
        function=None if function is None else _delta_function(function),
    )


def _is_wrapper(patch: WeightPatch) -> bool:
    return isinstance(patch.value, WrapperValue)
