"""Scales without markers: what they are by name, type and shape, and refusals of files that could be two things."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from modelpool.pool.values.core.errors import BadQuantization
from modelpool.pool.weights.ops.packed import PackedWeight
from modelpool.pool.weights.quant.detect_layers import find_layers
from modelpool.pool.weights.quant.open_weights import open_weights
from modelpool.pool.weights.quant.unmarked_codec import ScaledCodec
from modelpool.pool.weights.quant.unmarked_scales import expect_scales_read
from tests.pool.files.formats.gguf_files import rounded, write_gguf

FP8 = torch.float8_e4m3fn


class Stored:
    """A tensor as a header has it."""

    def __init__(self, dtype: str, *shape: int) -> None:
        self.dtype, self.shape, self.is_ggml, self.path = dtype, shape, False, ""


def blocks_of(*shapes: tuple[tuple[int, int], tuple[int, int]], declared: tuple[int, int] | None = None) -> set[object]:
    """The sizes of blocks in a file with weights and scales of these shapes."""
    stored = {}
    for place, (weight, scale) in enumerate(shapes):
        stored |= {f"{place}.weight": Stored("F8_E4M3", *weight), f"{place}.weight_scale_inv": Stored("F32", *scale)}
    layers = find_layers(stored, lambda _: b"", block=declared)
    return {(layer.settings["block_rows"], layer.settings["block_columns"]) for layer in layers.values()}


def test_the_size_of_blocks_is_the_one_that_fits_all_weights() -> None:
    assert blocks_of(((256, 512), (2, 4))) == {(128, 128)}
    assert blocks_of(((576, 7168), (5, 56))) == {(128, 128)}  # the last block of 576 rows has 64
    assert blocks_of(((192, 192), (2, 2))) == {(128, 128)}  # not 96
    assert blocks_of(((64, 96), (2, 3))) == {(32, 32)}
    assert blocks_of(((80, 48), (3, 2)), ((32, 96), (1, 3))) == {(32, 32)}
    assert blocks_of(((64, 1536), (64, 32))) == {(1, 48)}  # groups of a row
    assert blocks_of(((64, 96), (1, 96))) == {(0, 1)}  # one factor for each column
    assert blocks_of(((256, 512), (2, 4)), ((4, 512), (1, 4))) == {(128, 128)}  # not of rows
    assert blocks_of(((96, 96), (2, 2)), declared=(48, 48)) == {(48, 48)}
    assert blocks_of(((100, 100), (3, 3)), ((102, 102), (3, 3)), ((67, 67), (2, 2)), declared=(34, 34)) == {(34, 34)}


def test_blocks_of_no_single_size_are_refused_with_both_names() -> None:
    for shapes in (
        [((64, 64), (2, 2)), ((64, 64), (4, 4))],  # of 32 and of 16
        [((100, 100), (3, 3))],  # of 34 to 49
        [((64, 64), (65, 2))],  # more factors than rows
        [((6, 64), (5, 2))],  # no size makes 5 blocks of 6 rows
        [((64, 256), (1, 64))],  # of rows, or of 4 columns
        [((64, 64), (1, 64))],  # of rows, or of columns
        [((256, 64), (64, 1))],  # of columns, or of 4 rows
    ):
        with pytest.raises(BadQuantization, match=r"'\d\.weight': .* its scale '\d\.weight_scale_inv'"):
            blocks_of(*shapes)
    with pytest.raises(BadQuantization, match="not of the declared size 64"):
        blocks_of(((96, 96), (3, 3)), declared=(64, 64))


def test_what_could_be_two_things_is_refused_by_name(tmp_path: Path) -> None:
    codes, one = torch.ones(8, 4).to(FP8), torch.tensor([0.5])
    integers = torch.ones(8, 4, dtype=torch.uint8)
    cases: dict[str, tuple[dict[str, Tensor], str]] = {
        "two scales": ({"a.weight": codes, "a.weight_scale": one, "a.scale_weight": one}, "'a.weight': found two"),
        "both": ({"a.weight": codes, "a.weight_scale": one, "a.weight_scale_inv": one}, "'a.weight': found two"),
        "columns": ({"a.weight": codes, "a.weight_scale": torch.ones(4)}, r"'a.weight_scale': found shape \(4,\)"),
        "integers": ({"a.weight": codes, "a.weight_scale": torch.ones(1).int()}, "'a.weight_scale': found type I32"),
        "unsigned": ({"a.weight": integers, "a.weight_scale": one}, "'a.weight': found type U8 with the scale"),
        "zero points": (
            {"a.weight": codes, "a.weight_scale": one, "a.weight_zero_point": one},
            "'a.weight': .* beside 'a.weight_zero_point'",
        ),
        "second scale": ({"a.weight": codes, "a.weight_scale": one, "a.weight_scale_2": one}, "'a.weight_scale_2'"),
        "of inputs alone": ({"a.weight": codes, "a.input_scale": one}, "'a.weight': .* 'a.input_scale' of its"),
        "plain": ({"a.weight": torch.ones(8, 4).half(), "a.weight_scale": one}, r"'a.weight_scale': found a scale \(0"),
        "inverse": ({"a.weight": torch.ones(8, 4), "a.weight_scale_inv": one}, "'a.weight_scale_inv': found a scale"),
        "order of mxfp8": (
            {"a.weight": torch.ones(128, 128).to(FP8), "a.weight_scale": torch.ones(128, 4).to(torch.float8_e8m0fnu)},
            "'a.weight': found the scale 'a.weight_scale' of type F8_E8M0",
        ),
        "three dimensions": (
            {"a.weight": torch.ones(2, 8, 8).to(FP8), "a.weight_scale_inv": torch.ones(2, 2, 2)},
            r"'a.weight_scale_inv': found shape \(2, 2, 2\)",
        ),
        "layout": (
            {"a.weight": codes.char(), "a.SCB": torch.ones(8), "a.weight_format": torch.ones((), dtype=torch.uint8)},
            r"'a.weight_format': found \[1\]",
        ),
        "other 8 bits": ({"a.weight": codes, "a.SCB": torch.ones(8)}, "'a.weight': found type F8_E4M3 with the scale"),
        "beside a marked one": (
            {
                "a.weight": codes, "a.weight_scale": one, "a.scale_weight": one,
                "a.comfy_quant": torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8),
            },
            "'a.weight': .* beside 'a.scale_weight'",
        ),
    }  # fmt: skip
    for name, (tensors, message) in cases.items():
        save_file({key: tensor.clone() for key, tensor in tensors.items()}, tmp_path / f"{name}.safetensors")
        with pytest.raises(BadQuantization, match=rf"{name}\.safetensors: .*{message}"):
            use_only_the_weight(tmp_path / f"{name}.safetensors")


def test_each_place_of_the_word_scale_in_a_name_is_seen() -> None:
    """In any part, before and after the name of the layer, in a module that quantizes: beside 8-bit codes only."""
    for layer in ("a", "blocks.0.attn.to_q"):
        codes = {f"{layer}.weight": Stored("F8_E4M3", 8, 4)}
        for name in (
            "{}.weight_amax", "{}.weight_quantizer._amax", "{}.weight_quantizer._scale", "scale.{}", "scales.{}.weight",
            "{}.weight_quantizer.amax", "{}.quantizer.scale", "{}.scales.0", "{}.weight.scale", "{}.weight.absmax",
            "weight_scales.{}", "{}.weight_scale.values", "{}.amax", "model.scale.{}",
        ):  # fmt: skip
            key = name.format(layer)
            model = "model." if key.startswith("model.") else ""
            stored = {model + each: entry for each, entry in codes.items()} | {key: Stored("F32", 1)}
            with pytest.raises(BadQuantization, match=re.escape(f"{layer}.weight': found codes")) as raised:
                expect_scales_read(stored, [key], "file")
            assert repr(key) in str(raised.value)
            plain = {each: Stored("F16", 8, 4) for each in stored}
            expect_scales_read(plain, [key], "file")
        for name in (
            "logit_scale", "scale_factor", "norm.scale", "{}.norm.scale", "scale.weight", "norm.scale.weight",
            "{}.input_quantizer._amax", "{}.input_amax", "scale_shift_table", "upscale.conv.weight", "scales.b.weight",
            "b.weight_amax", "b.weight_quantizer._amax",
        ):  # fmt: skip
            key = name.format(layer)
            expect_scales_read({**codes, key: Stored("F32", 1)}, [key], "file")


def test_scales_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    """Zero and negative ones are numbers."""
    codes = torch.ones(8, 4).to(FP8)
    path = tmp_path / "a.safetensors"
    for name, size in (("weight_scale", 1), ("weight_scale", 8), ("scale_weight", 1), ("weight_scale_inv", 1)):
        for value in ("nan", "inf", "-inf", "0", "-2"):
            scale = torch.ones(size)
            scale[-1] = float(value)
            save_file({"a.weight": codes, f"a.{name}": scale}, path)
            if value in ("0", "-2"):
                assert open_weights(path).values_of("a.weight")[-1, 0] == float(value)
                continue
            with pytest.raises(BadQuantization, match=rf"'a\.{name}': found {value}, expected finite"):
                open_weights(path).values_of("a.weight")


def use_only_the_weight(path: Path) -> None:
    weights = open_weights(path)
    weights.expect_scales_read(weights.shapes.keys() - {"a.weight"})


def test_scales_that_have_no_effect_are_left_out(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.ones(8, 4).half(), "a.weight_scale": torch.ones(1), "a.input_scale": torch.tensor(3.0),
        "b.weight": torch.ones(8, 4).to(FP8), "b.scale_weight": torch.tensor(0.5), "b.output_scale": torch.tensor(2.0),
        "c.weight": torch.full((8, 4), -127, dtype=torch.int8), "c.SCB": torch.full((8,), 0.5),
        "c.weight_format": torch.zeros((), dtype=torch.uint8),
        "norm.scale": torch.ones(4).to(FP8), "logit_scale": torch.ones(()).to(FP8), "d.k_scale": torch.ones(1),
    }  # fmt: skip
    save_file(tensors, tmp_path / "a.safetensors")
    weights = open_weights(tmp_path / "a.safetensors")
    assert set(weights) == {"a.weight", "b.weight", "c.weight", "norm.scale", "logit_scale", "d.k_scale"}
    weights.expect_scales_read(["d.k_scale", "logit_scale"])
    assert torch.equal(weights.values_of("b.weight"), torch.full((8, 4), 0.5))
    assert torch.allclose(weights.values_of("c.weight"), torch.full((8, 4), -0.5))


def test_rows_of_blocks_are_cut_where_blocks_end() -> None:
    codes, scale = torch.randn(80, 48).to(FP8), torch.rand(3, 2) + 0.5
    codec = ScaledCodec("float8_e4m3fn_blocks", block_rows=32, block_columns=32)
    packed = torch.ops.aten.detach(_packed(codec, codes, scale))
    expected = codes.float() * scale.repeat_interleave(32, 0)[:80].repeat_interleave(32, 1)[:, :48]
    assert torch.equal(packed.unpack(torch.float32), expected)
    rows = packed.rows(64, 16)
    assert rows is not None
    assert torch.equal(rows.unpack(torch.float32), expected[64:])
    assert packed.rows(16, 32) is None
    assert torch.equal(packed.rows_for(torch.tensor([[3, 79]]), torch.float32), expected[[3, 79]][None])
    assert torch.equal(packed[16:48].float(), expected[16:48].bfloat16().float())


def _packed(codec: ScaledCodec, codes: Tensor, scale: Tensor) -> PackedWeight:
    from modelpool.pool.weights.ops.packed import packed_weight

    return packed_weight(codec, {"weight": codes, "weight_scale": scale}, codes.shape, torch.bfloat16)


def test_scales_in_a_gguf_file_are_multiplied_with_weights_of_any_type(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(96, 64, generator=generator) / 8
    for kind in ("F32", "F16", "BF16", "Q8_0"):
        for name in ("scale_weight", "weight_scale", "weight_scale_inv"):
            for shape in ((1,), (96, 1), (3, 2)):
                rows, columns = (96 // shape[0], 64 // (*shape, 1)[1])
                size = exact.reshape(shape[0], rows, -1, columns).abs().amax((1, 3)) / 448
                full = size.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
                tensors = {"a.weight": exact / full, f"a.{name}": size.reshape(shape), "a.norm.weight": torch.ones(4)}
                write_gguf(tmp_path / "a.gguf", tensors, kind, "flux")
                weights = open_weights(tmp_path / "a.gguf")
                assert set(weights) == {"a.weight", "a.norm.weight"}
                found, codes = weights.values_of("a.weight"), rounded({"a.weight": exact / full}, kind)["a.weight"]
                is_plain = kind in ("F32", "Q8_0") or len(shape) == 1
                used = size if is_plain else rounded({"a": size}, kind)["a"]
                used = used.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
                assert torch.allclose(found, codes * used, 1e-6, 1e-9), (kind, name, shape)
                halves = torch.cat([weights["a.weight"][:32].float(), weights["a.weight"][32:].float()])
                assert torch.allclose(halves, found, 2**-7, 1e-6), (kind, name, shape)


def test_a_scale_of_unknown_name_in_a_gguf_file_is_refused_with_both_names(tmp_path: Path) -> None:
    """Of weights of any type; llama.cpp names some `scale`, which is also the name of the weights of norms."""
    for name in ("scale", "scales", "weight_zero_point"):
        tensors = {"a.weight": torch.randn(4, 32), f"a.{name}": torch.ones(1), "norm.scale": torch.ones(4)}
        write_gguf(tmp_path / "a.gguf", tensors, "Q8_0", "flux")
        weights = open_weights(tmp_path / "a.gguf")
        weights.expect_scales_read([])
        with pytest.raises(BadQuantization, match=rf"'a.weight': found codes of type Q8_0 beside 'a\.{name}'"):
            weights.expect_scales_read([f"a.{name}"])


def test_scales_of_weights_that_llama_cpp_has_changed_are_refused(tmp_path: Path) -> None:
    heads = {"llama.attention.head_count": 2, "llama.attention.head_count_kv": 2}
    weight = torch.randn(32, 32)
    tensors = {"blk.0.attn_q.weight": weight, "blk.0.attn_q.weight_scale": torch.tensor([0.5])}
    write_gguf(tmp_path / "a.gguf", tensors, "F32", "llama", entries=heads)
    found = open_weights(tmp_path / "a.gguf").values_of("model.layers.0.self_attn.q_proj.weight")
    permuted = weight.reshape(2, 8, 2, 32).transpose(1, 2).reshape(32, 32)
    assert torch.equal(found, 0.5 * permuted)
    tensors["blk.0.attn_q.weight_scale"] = torch.rand(32, 1)
    write_gguf(tmp_path / "a.gguf", tensors, "F32", "llama", entries=heads)
    with pytest.raises(BadQuantization, match=r"q_proj\.weight': found rows in llama.cpp's order beside '.*scale'"):
        open_weights(tmp_path / "a.gguf")
    norm = {"blk.0.attn_norm.weight": torch.ones(32), "blk.0.attn_norm.weight_scale": torch.tensor([0.5])}
    write_gguf(tmp_path / "a.gguf", norm, "F32", "gemma2")
    with pytest.raises(BadQuantization, match=r"input_layernorm\.weight': found an added constant beside"):
        open_weights(tmp_path / "a.gguf")
