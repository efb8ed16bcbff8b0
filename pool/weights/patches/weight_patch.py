"""One weight patch: its parameter, the part of it, the delta and the strength.

Knows tensors; no kinds of deltas (the other modules of `pool.weights.patches`), files, nor modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from torch import Tensor

from modelpool.pool.values.core.errors import PatchFailed
from modelpool.pool.weights.ops.cast import moved_factor
from modelpool.pool.weights.ops.packed import PackedWeight

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offset:
    """A part of a weight: `length` indices of dimension `dim`, from `start` on."""

    dim: int
    start: int
    length: int

    def of(self, weight: Tensor) -> Tensor:
        """Return that part, as a view. Raises PatchFailed when the weight has no such part."""
        self.shape_of(tuple(weight.shape))
        return weight.narrow(self.dim, self.start, self.length)

    def shape_of(self, shape: Shape) -> Shape:
        """Return the part's shape in a weight of `shape`. Raises PatchFailed when there is no such part."""
        if not 0 <= self.dim < len(shape) or self.start < 0 or self.start + self.length > shape[self.dim]:
            raise PatchFailed(
                f"found a weight of shape {shape}, expected one with the indices {self.start} to "
                f"{self.start + self.length - 1} in dimension {self.dim}"
            )
        return (*shape[: self.dim], self.length, *shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class DeltaFunction:
    """A function applied to a delta before it is added. `identity` represents it in digests: equal identities mean
    equal results."""

    identity: str
    call: Callable[[Tensor], Tensor] = field(compare=False)

    def __call__(self, delta: Tensor) -> Tensor:
        """Return the changed delta, of the same shape."""
        return self.call(delta)


def swap_scale_shift() -> DeltaFunction:
    """Return a function that swaps the halves of the rows: for adaptive norms that store (shift, scale) where the
    adapter's model stores the reverse."""
    return DeltaFunction("swap_scale_shift", lambda delta: delta.roll(delta.shape[0] // 2, 0))


class PatchValue(Protocol):
    """One kind of delta. An immutable value; its tensors stay on the host, in storage dtype."""

    @property
    def working_bytes(self) -> int:
        """Upper bound of the device bytes that applying it needs besides the weight itself."""
        ...

    @property
    def acts_at_zero(self) -> bool:
        """Whether it changes a weight even at strength 0."""
        ...

    def patched_shape(self, shape: Shape) -> Shape:
        """Return the shape of a weight of `shape` after patching. Raises PatchFailed when it cannot be applied to
        one."""
        ...

    def apply(self, weight: Tensor, strength: float, function: DeltaFunction | None) -> Tensor:
        """Return `weight` with the delta at `strength`, after applying `function` to the delta.

        weight  float32 or float64, on the device of the computation, perhaps a strided view; it may be modified
        Returns `weight` itself unless the shape changes. Raises PatchFailed when the shapes do not fit.
        """
        ...


@dataclass(frozen=True, slots=True)
class WeightPatch:
    """One delta for one parameter, or for a part of it.

    parameter       full name in the module, "mid_block.attentions.0.proj_in.weight"
    identity        identifies the value in digests: the file's hash and the name inside it
    value           the delta
    strength        factor of the delta
    strength_model  factor of the part of the weight, applied first
    offset          the part of the weight to patch; None for all of it
    function        applied to the delta before it is added
    """

    parameter: str
    identity: str
    value: PatchValue = field(compare=False)
    strength: float = 1.0
    # keyword only: six positional numbers are error-prone
    strength_model: float = field(default=1.0, kw_only=True)
    offset: Offset | None = field(default=None, kw_only=True)
    function: DeltaFunction | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Raises PatchFailed for a strength that is infinite or NaN: it would spread to every later weight."""
        # 1, 1.0 and numpy's 1.0 are the same strength and must have the same digest
        object.__setattr__(self, "strength", float(self.strength))
        object.__setattr__(self, "strength_model", float(self.strength_model))
        if not (math.isfinite(self.strength) and math.isfinite(self.strength_model)):
            raise PatchFailed(
                f"{self.name}: found strength {self.strength} and model strength {self.strength_model}, expected "
                "finite numbers"
            )

    @property
    def is_noop(self) -> bool:
        """Whether it changes nothing, so that no weight needs it applied."""
        return self.strength == 0.0 and self.strength_model == 1.0 and not self.value.acts_at_zero

    @property
    def digest_line(self) -> str:
        """Everything that the patched weight depends on, except the weight."""
        function = None if self.function is None else self.function.identity
        part = None if self.offset is None else (self.offset.dim, self.offset.start, self.offset.length)
        return repr((self.parameter, self.identity, self.strength, self.strength_model, part, function))

    def patched_shape(self, shape: Shape) -> Shape:
        """Return the shape of the complete weight after patching. Raises PatchFailed when the patch does not fit
        `shape`."""
        try:
            if self.offset is None:
                return self.value.patched_shape(shape)
            part = self.offset.shape_of(shape)
            found = self.value.patched_shape(part)
            if found != part:
                raise PatchFailed(f"it would change a part of shape {part} to {found}, expected the shape to stay")
        except PatchFailed as error:
            raise PatchFailed(f"{self.name}: {error}") from error
        return shape

    def working_bytes_for(self, shape: Shape) -> int:
        """Upper bound of the device bytes that applying it to a weight of `shape` needs besides the weight itself.

        A function adds three float32 tensors of the part's size: the delta (otherwise added while it is computed), the
        function's argument, and its result. The function's scratch memory is unknown. Raises PatchFailed when the patch
        does not fit `shape`.
        """
        if self.function is None:
            return self.value.working_bytes
        patched = self.patched_shape(shape)
        part = patched if self.offset is None else self.offset.shape_of(patched)
        return self.value.working_bytes + 3 * 4 * math.prod(part)

    @property
    def name(self) -> str:
        """Text for messages."""
        return f"patch {self.identity!r} of {self.parameter!r}"

    def __call__(self, weight: Tensor) -> Tensor:
        """Return `weight` (float32 or float64, may be modified) with the patch applied.

        Raises PatchFailed when shapes do not fit. Other errors, such as out of memory, propagate with a note that names
        the patch; `weight` is then in an undefined state and nothing else is changed.
        """
        try:
            part = weight if self.offset is None else self.offset.of(weight)
            if self.strength_model != 1.0:
                part.mul_(self.strength_model)
            if self.strength == 0.0 and not self.value.acts_at_zero:
                return weight
            patched = self.value.apply(part, self.strength, self.function)
            if self.offset is None:
                return patched
            if patched.shape != part.shape:
                raise PatchFailed(f"found a result of shape {tuple(patched.shape)}, expected {tuple(part.shape)}")
        except PatchFailed as error:
            raise PatchFailed(f"{self.name}: {error}") from error
        except Exception as error:
            error.add_note(f"while applying {self.name}")
            raise
        return weight


def expect_shape(what: str, found: Shape, expected: Shape) -> None:
    """Raise PatchFailed unless the two shapes are equal."""
    if found != expected:
        raise PatchFailed(f"{what} has shape {found}, expected {expected}")


def to_working(tensor: Tensor, like: Tensor) -> Tensor:
    """Return `tensor` on the device and in the dtype of `like`, moved in storage dtype first. May be `tensor` itself:
    do not write to it."""
    there = moved_factor(tensor, like.device)
    return there.unpack(like.dtype) if isinstance(there, PackedWeight) else there.to(like.dtype)


def working_bytes(*tensors: Tensor | None) -> int:
    """Device bytes of `tensors` during conversion: in storage dtype and in float32."""
    return sum(t.nbytes + 4 * t.numel() for t in tensors if t is not None)


def add_delta(weight: Tensor, delta: Tensor, strength: float, function: DeltaFunction | None) -> Tensor:
    """`weight += function(strength * delta)`, in place; returns `weight`. Raises PatchFailed when the shapes differ."""
    expect_shape("the delta", tuple(delta.shape), tuple(weight.shape))
    if function is None:
        return weight.add_(delta, alpha=strength)
    return weight.add_(function(delta * strength))
