"""One weight delta: which parameter, which part of it, what to do there and how strongly.

Knows tensors. Does not know kinds of deltas (`pool.patches.full_weights`, `pool.patches.adapters`), files, nor modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from torch import Tensor

from modelpool.pool.core.errors import PatchFailed
from modelpool.pool.ops.packed import PackedWeight

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offset:
    """A part of a weight: `length` indices of dimension `dim`, from `start` on."""

    dim: int
    start: int
    length: int

    def of(self, weight: Tensor) -> Tensor:
        """That part, as a view. Raises PatchFailed when the weight has no such part."""
        self.shape_of(tuple(weight.shape))
        return weight.narrow(self.dim, self.start, self.length)

    def shape_of(self, shape: Shape) -> Shape:
        """The part's shape in a weight of `shape`. Raises PatchFailed when there is no such part."""
        if not 0 <= self.dim < len(shape) or self.start < 0 or self.start + self.length > shape[self.dim]:
            raise PatchFailed(
                f"found a weight of shape {shape}, expected one with the indices {self.start} to "
                f"{self.start + self.length - 1} in dimension {self.dim}"
            )
        return (*shape[: self.dim], self.length, *shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class DeltaFunction:
    """Something done to a delta before it is added. `identity` stands for it in digests: equal ones mean equal
    results."""

    identity: str
    call: Callable[[Tensor], Tensor] = field(compare=False)

    def __call__(self, delta: Tensor) -> Tensor:
        """The changed delta, of the same shape."""
        return self.call(delta)


def swap_scale_shift() -> DeltaFunction:
    """The halves of the rows exchanged: adaptive norms that keep (shift, scale) where the adapter's model keeps the
    reverse."""
    return DeltaFunction("swap_scale_shift", lambda delta: delta.roll(delta.shape[0] // 2, 0))


class PatchValue(Protocol):
    """One kind of delta. A frozen value; its tensors stay on the host, in storage dtype."""

    @property
    def working_bytes(self) -> int:
        """Bytes that applying it takes on the device beside the weight itself, at most."""
        ...

    @property
    def acts_at_zero(self) -> bool:
        """Whether it changes a weight even at strength 0."""
        ...

    def patched_shape(self, shape: Shape) -> Shape:
        """The shape that a weight of `shape` has afterwards. Raises PatchFailed when it cannot be applied to one."""
        ...

    def apply(self, weight: Tensor, strength: float, function: DeltaFunction | None) -> Tensor:
        """`weight` with the delta at `strength`; `function` is done to the delta first.

        weight  float32 or float64, on the device to compute on, perhaps a strided view; it may be written into
        Returns `weight` itself unless the shape changes. Raises PatchFailed when the shapes do not fit.
        """
        ...


@dataclass(frozen=True, slots=True)
class WeightPatch:
    """One delta for one parameter, or for a part of it.

    parameter       full name in the module, "mid_block.attentions.0.proj_in.weight"
    identity        names the value for digests: the file's hash and the name inside it
    value           what to do
    strength        how strongly
    strength_model  the part of the weight is multiplied with this first
    offset          the part of the weight that all of it is about; None for the whole
    function        done to the delta before it is added
    """

    parameter: str
    identity: str
    value: PatchValue = field(compare=False)
    strength: float = 1.0
    # by name only: six positional numbers are a trap
    strength_model: float = field(default=1.0, kw_only=True)
    offset: Offset | None = field(default=None, kw_only=True)
    function: DeltaFunction | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Raises PatchFailed for a strength that is infinite or not a number: it would reach every weight after it."""
        # 1, 1.0 and numpy's 1.0 are one strength, and have one digest
        object.__setattr__(self, "strength", float(self.strength))
        object.__setattr__(self, "strength_model", float(self.strength_model))
        if not (math.isfinite(self.strength) and math.isfinite(self.strength_model)):
            raise PatchFailed(
                f"{self.name}: found strength {self.strength} and model strength {self.strength_model}, expected "
                "finite numbers"
            )

    @property
    def is_idle(self) -> bool:
        """It changes nothing: no weight has to pass through it."""
        return self.strength == 0.0 and self.strength_model == 1.0 and not self.value.acts_at_zero

    @property
    def digest_line(self) -> str:
        """Everything that the patched weight depends on, beside the weight."""
        function = None if self.function is None else self.function.identity
        part = None if self.offset is None else (self.offset.dim, self.offset.start, self.offset.length)
        return repr((self.parameter, self.identity, self.strength, self.strength_model, part, function))

    def patched_shape(self, shape: Shape) -> Shape:
        """The shape of the whole weight afterwards. Raises PatchFailed when the patch does not fit `shape`."""
        try:
            if self.offset is None:
                return self.value.patched_shape(shape)
            part = self.offset.shape_of(shape)
            found = self.value.patched_shape(part)
            if found != part:
                raise PatchFailed(f"it would make {found} of a part of shape {part}, expected the shape to stay")
        except PatchFailed as error:
            raise PatchFailed(f"{self.name}: {error}") from error
        return shape

    def working_bytes_for(self, shape: Shape) -> int:
        """Bytes that applying it to a weight of `shape` takes on the device beside the weight itself, at most.

        A function on the delta makes three float32 tensors of the part's size: the delta, which is otherwise added as
        it is made, what the function is given, and what it returns. What the function itself takes is not known.
        Raises PatchFailed when the patch does not fit `shape`.
        """
        if self.function is None:
            return self.value.working_bytes
        patched = self.patched_shape(shape)
        part = patched if self.offset is None else self.offset.shape_of(patched)
        return self.value.working_bytes + 3 * 4 * math.prod(part)

    @property
    def name(self) -> str:
        """The patch for people."""
        return f"patch {self.identity!r} of {self.parameter!r}"

    def __call__(self, weight: Tensor) -> Tensor:
        """`weight` (float32 or float64, to be written into) with the patch applied.

        Raises PatchFailed when shapes do not fit. Whatever else is raised, out of memory say, is raised as it is, with
        a note that names the patch; `weight` is in an undefined state then and nothing else is touched.
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
    """Raise PatchFailed unless the two are equal."""
    if found != expected:
        raise PatchFailed(f"{what} has shape {found}, expected {expected}")


def to_working(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` on the device and in the dtype of `like`: moved in storage dtype first. May be `tensor` itself: do not
    write."""
    there = tensor.to(device=like.device)
    return there.unpack(like.dtype) if isinstance(there, PackedWeight) else there.to(like.dtype)


def working_bytes(*tensors: Tensor | None) -> int:
    """Bytes of `tensors` on a device while they are converted: in storage dtype and in float32."""
    return sum(t.nbytes + 4 * t.numel() for t in tensors if t is not None)


def add_delta(weight: Tensor, delta: Tensor, strength: float, function: DeltaFunction | None) -> Tensor:
    """`weight += function(strength * delta)`, in place; returns `weight`. Raises PatchFailed when the shapes differ."""
    expect_shape("the delta", tuple(delta.shape), tuple(weight.shape))
    if function is None:
        return weight.add_(delta, alpha=strength)
    return weight.add_(function(delta * strength))
