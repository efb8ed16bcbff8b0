"""Maps the tensors of a checkpoint to the parameters of a module, and back.

A `KeyMap` is discovered by tracing a converter (`pool.weights.keymaps.provenance`), never written by hand. It loads (as
views), saves (the inverse), and maps a change of a checkpoint's tensor to rows of parameters, as LoRAs need. Knows no
architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.weights.keymaps.provenance import Origin, Permute, Reshape, ShapeOperation, rows_of, trace


@dataclass(frozen=True, slots=True)
class RowRange:
    """A range of rows of a source tensor and the parameter rows that they become.

    key           the parameter
    source_shape  shape of the complete source tensor; a delta for this range has that shape
    source_start  first row of the source
    rows          number of rows
    start         first row of the parameter
    operations    shape operations applied to the rows
    """

    key: str
    source_shape: Shape
    source_start: int
    rows: int
    start: int
    operations: tuple[ShapeOperation, ...] = ()

    def place(self, delta: Tensor) -> Tensor:
        """Return the part of `delta` for this range, in the parameter's form: a view where that is possible.

        `delta` has `source_shape`. Add the result to `parameter.narrow(0, start, result.shape[0])`.
        """
        assert tuple(delta.shape) == self.source_shape, f"{self.key}: {tuple(delta.shape)} for {self.source_shape}"
        return _forward(_narrow(delta, self.source_start, self.rows), self.operations)


@dataclass(frozen=True, slots=True)
class KeyMap:
    """The map from a checkpoint's tensors to a module's parameters.

    sources  shape of each checkpoint tensor passed to the converter, used or not
    origins  for each parameter, the source rows that it consists of
    """

    sources: Mapping[str, Shape]
    origins: Mapping[str, Origin]
    _targets: Mapping[str, tuple[RowRange, ...]]

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of each parameter."""
        return {key: origin.shape for key, origin in self.origins.items()}

    @property
    def unused(self) -> tuple[str, ...]:
        """Source tensors that no parameter uses. `save` leaves them out."""
        return tuple(key for key in self.sources if key not in self._targets)

    def targets(self, source_key: str) -> tuple[RowRange, ...]:
        """Return the parameter rows that `source_key` becomes, in the order of its rows; () when it is unused."""
        return self._targets.get(source_key, ())

    def parameter_range(self, key: str) -> RowRange:
        """Return the complete parameter `key` as the target of a delta of the parameter's shape."""
        shape = self.origins[key].shape
        return RowRange(key, shape, 0, rows_of(shape), 0)

    def full_source(self, source_key: str) -> tuple[RowRange, ...]:
        """Return all rows of the checkpoint's tensor `source_key`, as the target of a delta of its shape."""
        shape = self.sources[source_key]
        return (RowRange(source_key, shape, 0, rows_of(shape), 0),)

    def source_ranges(self, key: str) -> tuple[RowRange, ...]:
        """Return the checkpoint rows that the parameter `key` consists of, as targets of a delta of its shape."""
        origin = self.origins[key]
        back = _inverse(origin.operations)
        if len(origin.segments) == 1:
            segment = origin.segments[0]
            return (RowRange(segment.source, origin.shape, 0, rows_of(origin.shape), segment.start, back),)
        ranges, row = [], 0
        for segment in origin.segments:
            ranges.append(RowRange(segment.source, origin.shape, row, segment.rows, segment.start, back))
            row += segment.rows
        return tuple(ranges)

    def compose(self, ranges: tuple[RowRange, ...]) -> tuple[RowRange, ...]:
        """Map `ranges` of the checkpoint's tensors to parameter rows, in the order of the delta's rows.

        Leaves out rows that no parameter uses.
        """
        followed = [row_range for first in ranges for row_range in self._follow(first)]
        return _merged(sorted(followed, key=lambda r: (r.source_start, r.key)))

    def _follow(self, first: RowRange) -> Iterator[RowRange]:
        for then in self.targets(first.key):
            operations = _simplified((*first.operations, *then.operations))
            if not _keeps_rows(first.operations):  # rows became columns: only all of them can be mapped
                assert then.rows == rows_of(then.source_shape), f"{first.key} is split after its rows became columns"
                yield replace(first, key=then.key, start=then.start, operations=operations)
                continue
            low = max(first.start, then.source_start)
            high = min(first.start + first.rows, then.source_start + then.rows)
            if low < high:
                start = first.source_start + low - first.start
                into = then.start + low - then.source_start
                yield RowRange(then.key, first.source_shape, start, high - low, into, operations)

    def load(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters from the checkpoint `tensors`: a view wherever the rows of one are contiguous."""
        return {key: _load(origin, tensors) for key, origin in self.origins.items()}

    def save(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the checkpoint's tensors from a module's `parameters`: `save(load(x))` is x without unused tensors."""
        return {key: self.source(key, parameters) for key in self.sources if key in self._targets}

    def source(self, key: str, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the checkpoint's tensor `key` from a module's `parameters`, of which only those it becomes are read.

        `key` must not be unused.
        """
        return self._save(self.sources[key], self._targets[key], parameters)

    def _save(self, shape: Shape, ranges: tuple[RowRange, ...], parameters: Mapping[str, Tensor]) -> Tensor:
        parts, row = [], 0
        for r in ranges:
            if r.source_start != row:  # the same rows again, for a parameter that shares them
                continue
            parts.append(_narrow(_forward(parameters[r.key], _inverse(r.operations)), r.start, r.rows))
            row += r.rows
        assert row == rows_of(shape), f"rows {row} and up of {ranges[0].key}'s source belong to no parameter"
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(shape)


def discover(shapes: Mapping[str, Shape], convert: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> KeyMap:
    """Discover the key map of `convert` on a checkpoint with tensors of `shapes`.

    Calls `convert` once, with zero-byte tensors; it may remove entries from its dictionary. Raises
    UntraceableOperationError when `convert` does more than move rows and change shapes.
    """
    return key_map_of(shapes, trace(shapes, convert))


def key_map_of(shapes: Mapping[str, Shape], origins: Mapping[str, Origin]) -> KeyMap:
    """Return the key map of a checkpoint with tensors of `shapes` from the known `origins` of its parameters."""
    targets: dict[str, list[RowRange]] = {}
    for key, origin in origins.items():
        row = 0
        for segment in origin.segments:
            targets.setdefault(segment.source, []).append(
                RowRange(key, tuple(shapes[segment.source]), segment.start, segment.rows, row, origin.operations)
            )
            row += segment.rows
    ordered = {key: tuple(sorted(ranges, key=lambda r: (r.source_start, r.key))) for key, ranges in targets.items()}
    return KeyMap({key: tuple(shape) for key, shape in shapes.items()}, origins, ordered)


def _load(origin: Origin, tensors: Mapping[str, Tensor]) -> Tensor:
    parts = [_narrow(tensors[s.source], s.start, s.rows) for s in origin.segments]
    return _forward(parts[0] if len(parts) == 1 else torch.cat(parts), origin.operations)


def _narrow(x: Tensor, start: int, rows: int) -> Tensor:
    return x if rows == rows_of(x.shape) else x.narrow(0, start, rows)


def _forward(x: Tensor, operations: tuple[ShapeOperation, ...]) -> Tensor:
    """Apply `operations` to `x`, which may be some of the rows that they were recorded for."""
    for operation in operations:
        match operation:
            case Reshape(before, after):
                x = x.reshape(_with_rows(x, before, after))
            case Permute(order):
                x = x.permute(order)
    return x


def _inverse(operations: tuple[ShapeOperation, ...]) -> tuple[ShapeOperation, ...]:
    """Return the operations that undo `operations`."""
    return tuple(_inverse_of(operation) for operation in reversed(operations))


def _inverse_of(operation: ShapeOperation) -> ShapeOperation:
    match operation:
        case Reshape(before, after):
            return Reshape(after, before)
        case Permute(order):
            return Permute(tuple(order.index(i) for i in range(len(order))))


def _simplified(operations: tuple[ShapeOperation, ...]) -> tuple[ShapeOperation, ...]:
    """Return `operations` without neighbours that undo each other."""
    left: list[ShapeOperation] = []
    for operation in operations:
        if left and left[-1] == _inverse_of(operation):
            left.pop()
        else:
            left.append(operation)
    return tuple(left)


def _keeps_rows(operations: tuple[ShapeOperation, ...]) -> bool:
    """Whether each row is still a separate row after `operations`."""
    return all(
        operation.before[:1] == operation.after[:1] if isinstance(operation, Reshape) else operation.order[:1] == (0,)
        for operation in operations
    )


def _merged(ranges: list[RowRange]) -> tuple[RowRange, ...]:
    """Return `ranges` with contiguous neighbours (in the delta and in the parameter) merged."""
    merged: list[RowRange] = []
    for this in ranges:
        last = merged[-1] if merged else None
        if last is not None and replace(last, source_start=this.source_start, start=this.start, rows=this.rows) == this:
            delta_continues = last.source_start + last.rows == this.source_start
            if delta_continues and last.start + last.rows == this.start and _keeps_rows(this.operations):
                merged[-1] = replace(last, rows=last.rows + this.rows)
                continue
        merged.append(this)
    return tuple(merged)


def _with_rows(x: Tensor, before: Shape, after: Shape) -> Shape:
    """Return `after` adapted to `x`, which has the shape `before` or fewer rows of it."""
    if tuple(x.shape) == before:
        return after
    assert (before[0], before[1:]) == (after[0], tuple(x.shape[1:])), f"{tuple(x.shape)} is no part of {before}"
    return (x.shape[0], *after[1:])
