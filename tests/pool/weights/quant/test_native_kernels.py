"""Products with packed weights give upstream's numbers, leave their inputs alone, and step back where they cannot."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.weights.ops.attention import AttentionBackend
from modelpool.pool.weights.ops.attention_choices import KernelChoices
from modelpool.pool.weights.ops.casting_classes import swap_to_casting
from modelpool.pool.weights.ops.context import compute
from modelpool.pool.weights.ops.packed import packed_weight
from modelpool.pool.weights.quant import native_kernels as native
from modelpool.pool.weights.quant.formats import FORMATS
from modelpool.pool.weights.quant.kitchen import package
from modelpool.pool.weights.quant.kitchen_linear import LINEARS
from modelpool.pool.weights.quant.marked_codec import codec
from modelpool.pool.weights.quant.native_kernels import (
    generations,
    linear_kernel,
    native_fp8_linear,
    native_linear,
    runs_natively,
)
from modelpool.pool.weights.quant.quantize import PER_ROW, quantize
from tests.pool.weights.quant.golden_cases import NEWEST, OLDER, Case, cases, draw

QUANTIZED_INPUT = [c for c in cases(OLDER) if c.seed is None]
KERNEL = [c for c in cases(NEWEST) if c.weight_only]


def weight_and_input(columns: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return draw([48, columns], 1, 0.05, torch.float32), draw([2, 5, columns], 2, 3.0, torch.float32)


@pytest.mark.parametrize("case", QUANTIZED_INPUT, ids=str)
def test_eight_bit_floats_multiply_as_upstream_does(case: Case) -> None:
    packed = quantize(case.weight, case.format, scale=case.parts["weight_scale"])
    product = native_linear(case.x, packed, case.bias)
    assert product is not None
    assert product.dtype == case.x.dtype
    torch.testing.assert_close(product.float(), case.expected["linear_qq"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", KERNEL, ids=str)
def test_integers_multiply_as_upstream_does(case: Case) -> None:
    packed = quantize(case.weight, case.format, case.settings)
    product = native_linear(case.x, packed, case.bias)
    assert product is not None
    assert torch.equal(product.float(), case.expected["linear"])


@pytest.mark.parametrize("case", [c for c in cases(NEWEST) if "nvfp4" in c.name and c.seed is None], ids=str)
def test_quantized_inputs_of_nvfp4_are_upstreams(case: Case) -> None:
    """There is no kernel on a CPU: what upstream computed there is the product of both, unpacked."""
    x, weight = (quantize(t, "nvfp4").unpack(t.dtype) for t in (case.x, case.weight))
    product = torch.nn.functional.linear(x, weight, case.bias)
    torch.testing.assert_close(product.float(), case.expected["linear_qq"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "int8_tensorwise"])
def test_inputs_are_not_written_and_any_leading_shape_will_do(name: str) -> None:
    weight, x = weight_and_input()
    x[0, 0, 0] = 1e4
    before, packed = x.clone(), quantize(weight, name)
    product = native_linear(x, packed, None)
    assert product is not None
    assert torch.equal(x, before)
    flat = native_linear(x.reshape(10, 64), packed, None)
    assert flat is not None
    assert torch.equal(product, flat.reshape(2, 5, 48))


def test_a_scale_for_each_row_multiplies_each_column_of_the_product() -> None:
    weight, x = weight_and_input()
    scale = weight.abs().amax(1) / 448.0
    bias = draw([48], 3, 0.1, torch.float32)
    packed = quantize(weight, "float8_e4m3fn", scale=scale)
    product = native_linear(x, packed, bias)
    assert product is not None
    rounded = x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(product, torch.nn.functional.linear(rounded, packed.unpack(torch.float32), bias))


def test_the_input_factor_of_a_file_is_used() -> None:
    weight, x = weight_and_input()
    packed = quantize(weight, "float8_e4m3fn")
    with_factor = packed_weight(
        packed.codec, {**packed.parts, "input_scale": torch.tensor(100.0)}, packed.shape, packed.dtype
    )
    huge = x * 1000.0
    product = native_linear(huge, with_factor, None)
    clamped = native_linear(huge, packed, None)
    assert product is not None
    assert clamped is not None
    exact = torch.nn.functional.linear(huge, packed.unpack(torch.float32))
    assert (product - exact).norm() < 0.05 * exact.norm() < (clamped - exact).norm()


def test_a_plain_fp8_weight_counts_as_one_with_a_factor_of_one() -> None:
    weight, x = weight_and_input()
    plain = weight.to(torch.float8_e4m3fn)
    product = native_fp8_linear(x, plain, None)
    assert product is not None
    expected = torch.nn.functional.linear(x.clamp(-448, 448).to(torch.float8_e4m3fn).float(), plain.float())
    torch.testing.assert_close(product, expected)
    assert native_fp8_linear(x, weight, None) is None
    assert native_fp8_linear(x[None], plain, None) is None


def test_what_cannot_run_gives_none() -> None:
    weight, x = weight_and_input()
    assert native_linear(x, quantize(weight, "nvfp4"), None) is None
    assert native_linear(x.double(), quantize(weight, "float8_e4m3fn"), None) is None
    asked_for_full = codec("float8_e4m3fn", {"full_precision_matrix_mult": True})
    packed = quantize(weight, "float8_e4m3fn")
    assert native_linear(x, packed_weight(asked_for_full, packed.parts, packed.shape, packed.dtype), None) is None


def test_a_kernel_that_fails_is_told_once_and_gives_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel for this test")

    monkeypatch.setattr(torch, "_scaled_mm", fails)
    native._log_once.cache_clear()
    weight, x = weight_and_input()
    packed = quantize(weight, "float8_e4m3fn")
    with caplog.at_level(logging.WARNING):
        assert native_linear(x, packed, None) is None
        assert native_linear(x, packed, None) is None
    assert len(caplog.records) == 1
    assert "no kernel for this test" in caplog.text


def test_running_out_of_memory_is_no_reason_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "_scaled_mm", fails)
    weight, x = weight_and_input()
    with pytest.raises(torch.OutOfMemoryError):
        native_linear(x, quantize(weight, "float8_e4m3fn"), None)


@pytest.mark.parametrize(
    ("name", "from_"), [(name, kind.native_from) for name, kind in FORMATS.items() if kind.native_from]
)
def test_cards_run_what_they_have_kernels_for(name: str, from_: tuple[int, int]) -> None:
    before = (from_[0], from_[1] - 1) if from_[1] else (from_[0] - 1, 9)
    assert runs_natively(name, "cuda", from_)
    assert runs_natively(name, "cuda", (12, 0))
    assert not runs_natively(name, "cuda", before)
    assert not runs_natively(name, "cuda", None)


def test_rows_have_better_scales_than_the_whole() -> None:
    weight, x = weight_and_input()
    exact = torch.nn.functional.linear(x, weight)
    errors = []
    for settings in ({}, {PER_ROW: True}):
        product = native_linear(x, quantize(weight, "int8_tensorwise", settings), None)
        assert product is not None
        errors.append(float((product - exact).norm() / exact.norm()))
    assert errors[1] < errors[0] < 0.02


@pytest.mark.parametrize("name", ["float8_e4m3fn", "int8_tensorwise"])
def test_layers_multiply_packed_only_when_they_are_told_to(name: str) -> None:
    weight, x = weight_and_input()
    layer = torch.nn.Linear(64, 48)
    packed = quantize(weight, name)
    layer.weight = torch.nn.Parameter(packed, requires_grad=False)
    swap_to_casting(layer)
    cpu = torch.device("cpu")
    with torch.no_grad(), compute(cpu, torch.float32):
        unpacked = layer(x)
    with torch.no_grad(), compute(cpu, torch.float32, linear=linear_kernel({name})):
        native_product = layer(x)
    with torch.no_grad(), compute(cpu, torch.float32, linear=linear_kernel({"nvfp4"})):
        declined = layer(x)
    assert torch.equal(unpacked, torch.nn.functional.linear(x, packed.unpack(torch.float32), layer.bias))
    assert torch.equal(declined, unpacked)
    wanted = native_linear(x, packed, layer.bias)
    assert wanted is not None
    assert torch.equal(native_product, wanted)
    assert not torch.equal(native_product, unpacked)


def test_streamed_layers_of_a_simulated_device_multiply_packed() -> None:
    sim.install()
    sim.configure(0, 1 << 28)
    weight, x = weight_and_input()
    kernel = linear_kernel({"float8_e4m3fn", "nvfp4"})
    for rest in (quantize(weight, "float8_e4m3fn"), weight.to(torch.float8_e4m3fn)):
        here, there = kernel(x, rest, None), kernel(x.to("sim:0"), rest, None)
        assert here is not None
        assert there is not None
        assert there.device.type == "sim"
        assert torch.equal(there.cpu(), here)
    before = sim.memory_stats(0).h2d_bytes
    there_x = x.to("sim:0")
    moved_bytes = sim.memory_stats(0).h2d_bytes - before
    assert kernel(there_x, quantize(weight, "nvfp4"), None) is None
    assert sim.memory_stats(0).h2d_bytes - before == moved_bytes  # declined before the weight was moved


def test_the_generations_are_those_of_the_table() -> None:
    assert generations(["nvfp4", "awq_w4a16", "Q8_0"]) == {"nvfp4": (10, 0), "awq_w4a16": None, "Q8_0": None}


@pytest.mark.parametrize(
    ("name", "options", "worst"),
    [
        ("int8_tensorwise", {"convrot": True, "convrot_groupsize": 64}, 0.02),
        ("convrot_w4a4", {}, 0.2),
        ("asym_w4a8_int8", {}, 0.03),
    ],
)
def test_rotated_weights_multiply_as_they_are(name: str, options: dict[str, object], worst: float) -> None:
    weight, x = weight_and_input(256)
    bias, packed = draw([48], 3, 0.1, torch.float32), quantize(weight, name, options)
    product = native_linear(x, packed, bias)
    assert product is not None
    unpacked = torch.nn.functional.linear(x, packed.unpack(torch.float32), bias)
    assert 0 < float((product - unpacked).norm() / unpacked.norm()) < worst


@pytest.mark.parametrize("rows", [48, 20])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_block_kernels_get_what_they_read(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No CPU has these kernels: one that unpacks both operands stands in for them."""

    def multiply(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        if name == "mxfp8":
            left, right = (package().dequantize_mxfp8(c, s, torch.float32) for c, s in zip((a, b), scales, strict=True))
        else:
            left, right = (
                package().dequantize_nvfp4(c, named[f"tensor_scale_{k}"], named[f"block_scale_{k}"], torch.float32)
                for c, k in ((a, "a"), (b, "b"))
            )
        return (left @ right.t()).to(named["out_dtype"])

    monkeypatch.setattr(package(), f"scaled_mm_{name}", multiply)
    weight, x = draw([rows, 40], 1, 0.05, torch.float32), draw([2, 5, 40], 2, 3.0, torch.float32)
    bias, packed = draw([rows], 3, 0.1, torch.float32), quantize(weight, name)
    product = LINEARS[name](x, packed.parts, packed.codec.settings, bias, rows)  # type: ignore[attr-defined]
    rounded = quantize(x.reshape(10, 40), name).unpack(torch.float32).reshape(x.shape)
    expected = torch.nn.functional.linear(rounded, packed.unpack(torch.float32), bias)
    torch.testing.assert_close(product, expected, rtol=0, atol=1e-5)
    smoothed = {**packed.parts, "pre_quant_scale": torch.full((40,), 2.0)}
    if name == "nvfp4":
        twice = LINEARS[name](x, smoothed, packed.codec.settings, None, rows)  # type: ignore[attr-defined]
        torch.testing.assert_close(twice, 2 * (expected - bias), rtol=0, atol=1e-4)
        assert torch.equal(
            packed_weight(packed.codec, smoothed, (rows, 40), packed.dtype).unpack(torch.float32),
            packed.unpack(torch.float32) * 2,
        )


def test_a_lost_device_is_no_refusal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Found in a review: the error that names the cause was logged as a kernel that does not support the call, and the
    exact product that followed failed with another one."""
    weight, x = weight_and_input()
    packed, plain = quantize(weight, "float8_e4m3fn"), weight.to(torch.float8_e4m3fn)
    for error, is_raised in (
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"), False),
        (torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"), False),
        (RuntimeError("not supported"), False),
    ):

        def failing(*args: object, error: Exception = error, **kwargs: object) -> None:
            raise error

        monkeypatch.setattr(native, "fp8_linear", failing)
        calls = {
            "packed": lambda: native_linear(x, packed, None),
            "plain": lambda: native_fp8_linear(x, plain, None),
            "measured attention": lambda failing=failing: KernelChoices(tmp_path / "none")._measured(
                (AttentionBackend.FLASH,), failing
            ),
        }
        for name, call in calls.items():
            if is_raised and not (name == "measured attention" and isinstance(error, torch.OutOfMemoryError)):
                with pytest.raises(type(error), match="CUDA"):
                    call()
            else:
                assert call() is None, (name, error)
