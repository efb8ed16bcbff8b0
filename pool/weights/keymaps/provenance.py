"""Tensors without data that record the origin of each of their rows.

Passed to a function that renames, splits, joins and reshapes the tensors of a checkpoint, they show in its outputs
which rows went where. Knows torch's operators; no checkpoint.

Only moves of complete rows (along dimension 0) and changes of shape can be traced. A function that computes with values
is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from modelpool.pool.files.formats.safetensors_file import Shape

aten = torch.ops.aten


class UntraceableOperationError(NotImplementedError):
    """A converter did something other than moving rows and changing shapes."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`rows` rows of the tensor `source`, from row `start`. A tensor without dimensions has one row."""

    source: str
    start: int
    rows: int


@dataclass(frozen=True, slots=True)
class Reshape:
    """The same numbers in the same order, in another shape."""

    before: Shape
    after: Shape


@dataclass(frozen=True, slots=True)
class Permute:
    """Dimensions in another order: dimension i of the result is dimension `order[i]` of the input."""

    order: tuple[int, ...]


ShapeOperation: TypeAlias = Reshape | Permute


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a tensor: its rows, in order, and the shape operations applied to them."""

    segments: tuple[Segment, ...]
    operations: tuple[ShapeOperation, ...]
    shape: Shape


def rows_of(shape: Sequence[int]) -> int:
    """The number of rows of a tensor of `shape`."""
    return shape[0] if shape else 1


def trace(
    shapes: Mapping[str, Shape], convert: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
) -> dict[str, Origin]:
    """Return the origin of everything that `convert` returns for a checkpoint of `shapes`.

    `convert` gets zero-byte tensors on the meta device. Raises UntraceableOperationError when `convert` computes, or
    returns a tensor that does not come from its inputs.
    """
    inputs: dict[str, Tensor] = {
        key: Traced(shape, (Segment(key, 0, rows_of(shape)),)) for key, shape in shapes.items()
    }
    origins = {}
    for key, value in convert(inputs).items():
        if not isinstance(value, Traced):
            raise UntraceableOperationError(f"{key}: the converter created this tensor, it has no source")
        origins[key] = Origin(_merged(value.segments), value.operations, tuple(value.shape))
    return origins


class Traced(Tensor):
    """A zero-byte tensor with its origin."""

    segments: tuple[Segment, ...]
    operations: tuple[ShapeOperation, ...]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], segments: tuple[Segment, ...], operations: tuple[ShapeOperation, ...] = ()
    ) -> Traced:
        device = torch.device("meta")
        tensor = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=torch.float32, device=device)
        tensor.segments, tensor.operations = segments, operations
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Traced({tuple(self.shape)}, {self.segments}, {self.operations})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = _RULES.get(func)
        if rule is None:
            raise UntraceableOperationError(f"{func} is neither a move of rows nor a change of shape")
        metas = [_untraced(argument, func) for argument in args]
        meta_kwargs = {key: _untraced(argument, func) for key, argument in (kwargs or {}).items()}
        return rule(func(*metas, **meta_kwargs), *args, **(kwargs or {}))


def _untraced(argument: Any, func: Any) -> Any:
    """Return an argument of `func` with meta tensors in place of traced ones."""
    if isinstance(argument, Traced):
        return torch.empty(argument.shape, dtype=argument.dtype, device="meta")
    if isinstance(argument, Tensor):
        raise UntraceableOperationError(f"{func} with a tensor that the converter created")
    return [_untraced(part, func) for part in argument] if isinstance(argument, list | tuple) else argument


def _same(result: Tensor, x: Traced, *_: Any, **__: Any) -> Traced:
    return Traced(x.shape, x.segments, x.operations)


def _slice(
    result: Tensor, x: Traced, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Traced:
    if result.shape == x.shape and step == 1:
        return _same(result, x)
    _require_rows(x, dim % x.dim() == 0 and step == 1, "slice")
    first, _, _ = slice(start, end).indices(x.shape[0])
    return Traced(result.shape, _cut(x.segments, first, result.shape[0]))


def _split(result: Sequence[Tensor], x: Traced, sizes: Any, dim: int = 0) -> list[Traced]:
    _require_rows(x, dim % x.dim() == 0, "split")
    parts, row = [], 0
    for part in result:
        parts.append(Traced(part.shape, _cut(x.segments, row, part.shape[0])))
        row += part.shape[0]
    return parts


def _cat(result: Tensor, tensors: Sequence[Traced], dim: int = 0) -> Traced:
    if len(tensors) == 1:
        return _same(result, tensors[0])
    for x in tensors:
        _require_rows(x, dim % x.dim() == 0, "cat")
    return Traced(result.shape, tuple(segment for x in tensors for segment in x.segments))


def _select(result: Tensor, x: Traced, dim: int, index: int) -> Traced:
    if x.shape[dim] != 1:
        raise UntraceableOperationError(f"select of one of {x.shape[dim]} entries of dimension {dim}")
    return _reshape(result, x)


def _reshape(result: Tensor, x: Traced, *_: Any, **__: Any) -> Traced:
    return Traced(result.shape, x.segments, (*x.operations, Reshape(tuple(x.shape), tuple(result.shape))))


def _permute(result: Tensor, x: Traced, order: Sequence[int]) -> Traced:
    positive = tuple(d % x.dim() for d in order)
    if positive[:1] != (0,) and len(_merged(x.segments)) > 1:
        raise UntraceableOperationError("rows of several pieces turned into columns")
    return Traced(result.shape, x.segments, (*x.operations, Permute(positive)))


def _transpose(result: Tensor, x: Traced, first: int = 0, second: int = 1) -> Traced:
    order = list(range(x.dim()))
    if order:
        order[first], order[second] = order[second], order[first]
    return _permute(result, x, order)


def _require_rows(x: Traced, along_rows: bool, what: str) -> None:
    if not along_rows or x.operations:
        raise UntraceableOperationError(f"{what} of {tuple(x.shape)} along another dimension than that of its rows")


def _cut(segments: Sequence[Segment], start: int, rows: int) -> tuple[Segment, ...]:
    """Return `rows` rows of the rows of `segments`, from row `start`."""
    cut, offset = [], 0
    for segment in segments:
        first, last = max(start, offset), min(start + rows, offset + segment.rows)
        if first < last:
            cut.append(Segment(segment.source, segment.start + first - offset, last - first))
        offset += segment.rows
    return tuple(cut)


def _merged(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Return `segments` with contiguous neighbours merged."""
    joined: list[Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        if last is not None and last.source == segment.source and last.start + last.rows == segment.start:
            joined[-1] = Segment(last.source, last.start, last.rows + segment.rows)
        else:
            joined.append(segment)
    return tuple(joined)


_RULES: Mapping[Any, Callable[..., Any]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten._to_copy.default: _same,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.cat.default: _cat,
    aten.select.int: _select,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.squeeze.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.unsqueeze.default: _reshape,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
}
