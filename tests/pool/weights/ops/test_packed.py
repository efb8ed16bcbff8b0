"""A packed weight is one tensor from outside: it moves, clones and is cut by rows packed, and gives values elsewhere.

Proven for a small format of its own, without any published one: a factor for each row, whole numbers as codes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.transfers import TransferLedger
from modelpool.pool.weights.ops.casting_classes import swap_to_casting
from modelpool.pool.weights.ops.context import compute
from modelpool.pool.weights.ops.packed import PackedWeight, packed_weight, stored_bytes
from modelpool.pool.weights.quant.quantize import quantize

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Scaled:
    """Codes times the factor of their row."""

    name: str = "scaled"
    row_step: int = 1

    def row_entries(self, name: str, rows: int) -> int:
        return rows

    def row_dims(self, parts: Mapping[str, Tensor]) -> Mapping[str, int]:
        return {"codes": 0, "factors": 1}

    def reshaped(
        self, parts: Mapping[str, Tensor], before: Sequence[int], after: Sequence[int]
    ) -> Mapping[str, Tensor] | None:
        if before[0] != after[0]:
            return None
        return {**parts, "codes": parts["codes"].view(tuple(after))}

    def unpack(self, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        codes = parts["codes"].float()
        values = codes * parts["factors"].reshape(-1, *(1,) * (codes.dim() - 1))
        return values[tuple(slice(size) for size in shape)].to(dtype)

    def scratch_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return elements * 4


def weight(rows: int = 6, columns: int = 4, step: int = 1, padding: int = 0) -> PackedWeight:
    """A weight of small numbers; `padding` rows more are stored."""
    codes = torch.arange((rows + padding) * columns, dtype=torch.int8).reshape(-1, columns)
    factors = torch.arange(1.0, rows + padding + 1).reshape(1, -1)
    return packed_weight(Scaled(row_step=step), {"codes": codes, "factors": factors}, (rows, columns), torch.float32)


def test_from_outside_it_is_the_weight() -> None:
    packed = weight()
    assert (tuple(packed.shape), packed.dtype, packed.device.type) == ((6, 4), torch.float32, "cpu")
    assert packed.is_floating_point()
    assert stored_bytes(packed) == 6 * 4 + 6 * 4
    assert stored_bytes(torch.zeros(3)) == 12
    assert packed.scratch_bytes(torch.float32) == 6 * 4 * 4
    assert "scaled" in repr(packed)


def test_operations_get_its_values() -> None:
    packed, x = weight(), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    values = packed.unpack(torch.float32)
    assert torch.equal(nn.functional.linear(x, packed), nn.functional.linear(x, values))
    assert torch.equal(packed + 1, values + 1)
    assert torch.equal(packed.t(), values.t())
    assert torch.equal(torch.cat([packed, packed]), torch.cat([values, values]))
    assert torch.equal(packed.reshape(4, 6), values.reshape(4, 6))
    assert type(packed.half()) is Tensor
    assert torch.equal(packed.to(torch.float64), values.double())


@pytest.mark.parametrize("change", [lambda p: p.add_(1), lambda p: p.zero_(), lambda p: p.copy_(torch.zeros(6, 4))])
def test_it_is_not_written_to(change: object) -> None:
    packed = weight()
    with pytest.raises(RuntimeError, match="would write to a packed weight"):
        change(packed)  # type: ignore[operator]
    assert torch.equal(packed.unpack(torch.float32), weight().unpack(torch.float32))


def test_what_stays_packed() -> None:
    packed = weight()
    for kept in (packed.detach(), packed.view(6, 4), packed.reshape(6, 4), packed[:], packed.narrow(0, 0, 6)):
        assert isinstance(kept, PackedWeight)
        assert kept.parts["codes"].data_ptr() == packed.parts["codes"].data_ptr()
    cloned = packed.clone()
    assert isinstance(cloned, PackedWeight)
    assert cloned.parts["codes"].data_ptr() != packed.parts["codes"].data_ptr()
    assert torch.equal(cloned, packed)


@pytest.mark.parametrize(("start", "count"), [(0, 2), (2, 3), (5, 1), (0, 6), (3, 0)])
def test_rows_stay_packed_as_views(start: int, count: int) -> None:
    packed = weight()
    rows = packed.narrow(0, start, count)
    assert isinstance(rows, PackedWeight)
    assert rows.shape == (count, 4)
    assert torch.equal(rows.unpack(torch.float32), packed.unpack(torch.float32)[start : start + count])
    if count:
        assert (
            rows.parts["factors"].untyped_storage().data_ptr() == packed.parts["factors"].untyped_storage().data_ptr()
        )


def test_rows_are_cut_where_the_format_allows_it_and_else_unpacked() -> None:
    packed = weight(rows=6, step=4, padding=2)
    values = packed.unpack(torch.float32)
    for start, count, stays in ((0, 4, True), (4, 2, True), (0, 2, False), (2, 4, False), (3, 2, False)):
        rows = packed.narrow(0, start, count)
        assert isinstance(rows, PackedWeight) == stays
        assert torch.equal(rows.clone() if not stays else rows.unpack(torch.float32), values[start : start + count])
    last = packed.rows(4, 2)
    assert last is not None
    assert last.parts["codes"].shape[0] == 4  # with the padding of the last rows
    assert weight(step=0).rows(0, 3) is None
    assert torch.equal(packed[::2], values[::2])
    assert torch.equal(packed[:, 1:3], values[:, 1:3])


def test_rows_are_looked_up_without_the_others() -> None:
    packed, ids = weight(), torch.tensor([[5, 0], [2, 2]])
    values = packed.unpack(torch.float32)
    assert torch.equal(packed.rows_for(ids, torch.float32), values[ids])
    assert torch.equal(nn.functional.embedding(ids, packed), values[ids])
    assert packed.rows_for(ids, torch.float16).dtype == torch.float16
    assert torch.equal(weight(step=0).rows_for(ids, torch.float32), values[ids])
    assert packed.rows_for(torch.empty(0, dtype=torch.long), torch.float32).shape == (0, 4)


def test_a_module_holds_it_as_a_parameter() -> None:
    with torch.device("meta"):
        layer = nn.Linear(4, 6, bias=False)
    packed = weight()
    layer.load_state_dict({"weight": packed}, assign=True)
    layer.requires_grad_(False)
    assert isinstance(layer.weight, PackedWeight)
    assert isinstance(layer.weight, nn.Parameter)
    assert isinstance(layer.weight.data, PackedWeight)
    assert isinstance(layer.state_dict()["weight"], PackedWeight)
    twin = copy.deepcopy(layer)
    assert isinstance(twin.weight, PackedWeight)
    assert torch.equal(twin.weight, layer.weight)
    x = torch.ones(1, 4)
    swap_to_casting(layer)
    with torch.no_grad(), compute(CPU, torch.float32):
        assert torch.equal(layer(x), nn.functional.linear(x, packed.unpack(torch.float32)))


def test_it_crosses_the_bus_packed() -> None:
    sim.install()
    sim.configure(0, 1 << 20)
    device, packed = torch.device("sim:0"), weight()
    sim.reset_counters(0)
    there = packed.to(device)
    assert isinstance(there, PackedWeight)
    assert there.device == device
    assert sim.memory_stats(0).h2d_bytes == stored_bytes(packed)
    assert torch.equal(there.unpack(torch.float32).cpu(), packed.unpack(torch.float32))
    back = there.to("cpu")
    assert isinstance(back, PackedWeight)
    assert torch.equal(back, packed)
    assert there.moved(device, lambda part: part) is there
    with pytest.raises(RuntimeError):
        nn.functional.linear(torch.ones(1, 4), there)


def test_a_streamed_layer_tells_what_it_moves() -> None:
    sim.install()
    sim.configure(0, 1 << 20)
    device, ledger = torch.device("sim:0"), TransferLedger()
    layer = nn.Linear(4, 6, bias=False)
    layer.weight = nn.Parameter(weight(), requires_grad=False)
    swap_to_casting(layer)
    x = torch.ones(1, 4)
    with torch.no_grad(), compute(device, torch.float32, ledger=ledger):
        there = layer(x.to(device))
    assert torch.equal(there.cpu(), nn.functional.linear(x, weight().unpack(torch.float32)))
    assert ledger.counters().h2d_bytes == stored_bytes(weight())


def test_an_embedding_moves_rows_only() -> None:
    sim.install()
    sim.configure(0, 1 << 20)
    device = torch.device("sim:0")
    table = nn.Embedding(6, 4)
    table.weight = nn.Parameter(weight(), requires_grad=False)
    swap_to_casting(table)
    ids = torch.tensor([1, 5]).to(device)
    sim.reset_counters(0)
    with torch.no_grad(), compute(device, torch.float32):
        rows = table(ids)
    assert torch.equal(rows.cpu(), weight().unpack(torch.float32)[[1, 5]])
    assert sim.memory_stats(0).h2d_bytes == 2 * 4 * 4


def test_another_shape_stays_packed_where_the_format_has_it() -> None:
    packed = weight()
    values = packed.unpack(torch.float32)
    for shape in ((6, 4, 1, 1), (6, 2, 2), (6, -1, 1)):
        seen = packed.reshape(shape)
        assert isinstance(seen, PackedWeight)
        assert seen.parts["codes"].data_ptr() == packed.parts["codes"].data_ptr()
        assert torch.equal(seen.unpack(torch.float32), values.reshape(shape))
        back = seen.reshape(6, 4)
        assert isinstance(back, PackedWeight)
        assert torch.equal(back.unpack(torch.float32), values)
    assert type(packed.reshape(24)) is Tensor
    for wrong in ((6, 5), (5, -1), (-1, -1)):
        with pytest.raises(RuntimeError):
            packed.view(wrong)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "int8_tensorwise"])
def test_a_module_with_a_published_weight_is_copied_deeply(name: str) -> None:
    layer, large = nn.Linear(4, 6, bias=False), torch.zeros(1 << 16, dtype=torch.uint8)
    made = quantize(layer.weight.detach(), name)
    codes = large[:24].view(made.parts["weight"].dtype).view(6, 4).copy_(made.parts["weight"])
    packed = packed_weight(made.codec, {**made.parts, "weight": codes}, made.shape, made.dtype)
    layer.weight = nn.Parameter(packed, requires_grad=False)
    both = copy.deepcopy(nn.ModuleList([layer, nn.Linear(1, 1)]).append(layer))
    twin = both[0].weight
    assert both[2].weight is twin
    assert isinstance(twin, PackedWeight)
    assert isinstance(twin, nn.Parameter)
    assert not twin.requires_grad
    assert twin.codec is made.codec
    assert twin.parts["weight"].untyped_storage().nbytes() == 24  # not the whole file
    assert torch.equal(twin.unpack(torch.float32), packed.unpack(torch.float32))
    assert list(both.state_dict()) == ["0.weight", "1.weight", "1.bias", "2.weight"]
