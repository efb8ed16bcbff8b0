"""State dictionaries of quantized models load, save and convert as published, and bad ones are refused by name.

Proves that `save(load(x))` is x tensor for tensor for every format, that older files convert as upstream's do, and that
whatever is not stored as it says raises an error with the file, the key, what was found and what was expected.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelpool.pool.values.core.errors import BadQuantization
from modelpool.pool.weights.ops.packed import PackedWeight
from modelpool.pool.weights.quant.detect_layers import METADATA_KEY
from modelpool.pool.weights.quant.formats import FORMATS
from modelpool.pool.weights.quant.quantize import PER_ROW, quantize, requantize
from modelpool.pool.weights.quant.state_dict import (
    bytes_of,
    convert_old_quants,
    detect_layer_quantization,
    load,
    marker_tensor,
    save,
)
from tests.each_case import each_case
from tests.pool.weights.quant.golden_cases import NEWEST, OLDER, document, draw

PREFIX = "model.diffusion_model."
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("float8_e4m3fn", {}),
    "fp8 e5m2": ("float8_e5m2", {}),
    "fp8 full": ("float8_e4m3fn", {"full_precision_matrix_mult": True}),
    "mxfp8": ("mxfp8", {}),
    "nvfp4": ("nvfp4", {}),
    "int8": ("int8_tensorwise", {}),
    "int8 rows": ("int8_tensorwise", {PER_ROW: True}),
    "int8 rotated": ("int8_tensorwise", {"convrot": True, "convrot_groupsize": 64}),
    "w4a4": ("convrot_w4a4", {"convrot_groupsize": 256}),
    "w4a8": ("asym_w4a8_int8", {}),
    "w6a8": ("asym_w4a8_int8", {"bits": 6}),
    "w4a8 asymmetric": ("asym_w4a8_int8", {"symmetric": False}),
}


def published(form: str) -> dict[str, Tensor]:
    """A state dictionary with one quantized layer and one that is not."""
    weight = draw([64, 256], 5, 0.05, torch.float32)
    name, settings = FORMS[form]
    return save({"a.weight": quantize(weight, name, settings), "a.bias": torch.ones(64), "norm.weight": torch.ones(3)})


def awq() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randint(-128, 128, (8, 64), dtype=torch.int8, generator=generator),
        "a.weight_scale": torch.rand(2, 8, generator=generator),
        "a.weight_zeros": torch.rand(2, 8, generator=generator),
        "a.comfy_quant": marker_tensor('{"format": "awq_w4a16", "group_size": 64}'),
    }


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[k].dtype == theirs[k].dtype
        and ours[k].shape == theirs[k].shape
        and bytes_of(ours[k]) == bytes_of(theirs[k])
        for k in ours
    )


@pytest.mark.parametrize("form", FORMS)
def test_what_is_loaded_and_saved_is_the_same(form: str) -> None:
    tensors = published(form)
    loaded = load(tensors)
    assert loaded.keys() == {"a.weight", "a.bias", "norm.weight"}
    weight = loaded["a.weight"]
    assert isinstance(weight, PackedWeight)
    assert weight.shape == (64, 256)
    assert all(weight.parts[name] is tensors["a." + name] for name in weight.parts)
    assert same(save(loaded), tensors)


def test_markers_are_kept_letter_for_letter_and_what_is_not_known_is_told(caplog: pytest.LogCaptureFixture) -> None:
    tensors = published("int8 rows")
    assert not caplog.records
    tensors["a.comfy_quant"] = marker_tensor('{ "note":"by hand",\n"format":"int8_tensorwise" }')
    assert same(save(load(tensors, file="flux.safetensors")), tensors)
    assert "flux.safetensors: unknown settings of quantized layers, ignored: 'note' (1 layer)" in caplog.text


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([*FORMATS, "format", ""]) | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["format", "convrot", "convrot_groupsize", "group_size", "x"]), inner)
        ),
        max_leaves=8,
    ),
    st.sampled_from(["fp8", "nvfp4", "w4a8"]),
)
def test_whatever_a_marker_says_it_loads_or_is_refused_by_name(said: object, form: str) -> None:
    tensors = broken(form, comfy_quant=marker_tensor(json.dumps(said)))
    try:
        weight = load(tensors)["a.weight"]
    except BadQuantization:
        return
    assert isinstance(weight, PackedWeight)
    weight.unpack(torch.float32)


def test_the_weights_of_other_quantizers_load() -> None:
    tensors = awq()
    weight = load(tensors)["a.weight"]
    assert isinstance(weight, PackedWeight)
    values, codes = weight.unpack(torch.float32), tensors["a.weight"].view(torch.uint8).int()
    for row, column in ((0, 0), (3, 1), (7, 127), (2, 64)):
        code = int(codes[row, column // 2]) >> (4 * (column % 2)) & 15
        group = column // 64
        expected = (code - 8) * tensors["a.weight_scale"][group, row] + tensors["a.weight_zeros"][group, row]
        assert values[row, column] == pytest.approx(float(expected), rel=1e-6)
    assert same(save({"a.weight": weight}), tensors)


def test_padded_weights_get_the_shape_that_is_asked_for() -> None:
    weight = draw([20, 40], 5, 0.05, torch.float32)
    tensors = save({"a.weight": quantize(weight, "nvfp4")})
    assert load(tensors)["a.weight"].shape == (32, 48)
    own = load(tensors, shapes={"a.weight": (20, 40)})["a.weight"]
    assert own.shape == (20, 40)
    assert torch.equal(own.clone(), own)
    with pytest.raises(
        BadQuantization, match=r"'a.weight': found a nvfp4 weight of shape \(32, 48\), expected \(10, 40\)"
    ):
        load(tensors, shapes={"a.weight": (10, 40)})


def old_file(marker_shape: list[int], marker_dtype: torch.dtype) -> dict[str, Tensor]:
    """The input of the golden conversion: the input factor of `a` is 1 and says nothing."""
    fp8 = torch.arange(16.0).reshape(4, 4).to(torch.float8_e4m3fn)
    return {
        PREFIX + "a.scale_input": torch.tensor(1.0),
        PREFIX + "a.scale_weight": torch.tensor(0.5),
        PREFIX + "a.weight": fp8,
        PREFIX + "b.scale_input": torch.tensor(2.0),
        PREFIX + "b.scale_weight": torch.tensor(0.25),
        PREFIX + "b.weight": fp8,
        PREFIX + "norm.weight": torch.ones(4),
        PREFIX + "scaled_fp8": torch.zeros(marker_shape, dtype=marker_dtype),
        "vae.x": torch.ones(1),
    }


def described(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {
        k: bytes_of(t).decode() if k.endswith("comfy_quant") else [list(t.shape), str(t.dtype)]
        for k, t in tensors.items()
    }


@pytest.mark.parametrize("file", [NEWEST, OLDER])
@pytest.mark.parametrize("name", ["one", "two_full_precision", "fp32_marker"])
def test_older_files_convert_as_upstream_does(file: str, name: str) -> None:
    """The 2025 snapshot leaves the mark of the whole file in; later ones, and this project, take it out."""
    golden = document(file)["convert_old_quants"][name]
    shape, dtype = golden["input"][PREFIX + "scaled_fp8"]
    tensors = old_file(shape, getattr(torch, dtype.removeprefix("torch.")))
    assert described(tensors) == golden["input"]
    assert not detect_layer_quantization(tensors, PREFIX)
    converted = convert_old_quants(tensors)
    golden["output"].pop(PREFIX + "scaled_fp8", None)
    assert described(converted) == golden["output"]
    assert detect_layer_quantization(converted, PREFIX) == golden["detected"]


def test_what_a_header_says_converts_as_upstream_does() -> None:
    golden = document(NEWEST)["convert_old_quants"]["metadata_form"]
    metadata = {METADATA_KEY: json.dumps({"layers": {PREFIX + "a": {"format": "float8_e4m3fn"}}})}
    converted = convert_old_quants({PREFIX + "a.weight": torch.zeros(4, 4)}, metadata)
    assert described(converted) == golden["output"]
    assert detect_layer_quantization(converted, PREFIX) == golden["detected"]


def test_older_files_load_to_what_they_convert_to() -> None:
    tensors = old_file([2], torch.float8_e4m3fn)
    loaded = load(tensors)
    assert same(save(loaded), convert_old_quants(tensors))
    weight = loaded[PREFIX + "b.weight"]
    assert isinstance(weight, PackedWeight)
    assert weight.codec.full_precision  # type: ignore[attr-defined]
    assert torch.equal(weight.unpack(torch.float32), torch.arange(16.0).reshape(4, 4) * 0.25)


def test_the_type_of_an_older_weight_says_what_it_is() -> None:
    """Upstream calls all of them e4m3; the numbers of e5m2 would then be wrong."""
    tensors = {"a.weight": torch.ones(4, 4).to(torch.float8_e5m2), "a.scale_weight": torch.tensor(1.0)}
    assert described(convert_old_quants(tensors))["a.comfy_quant"] == '{"format": "float8_e5m2"}'
    weight = load(tensors)["a.weight"]
    assert isinstance(weight, PackedWeight)
    assert weight.codec.name == "float8_e5m2"


def test_what_a_header_says_is_how_the_layer_loads() -> None:
    tensors = published("int8 rows")
    marker = json.loads(bytes_of(tensors.pop("a.comfy_quant")))
    loaded = load(tensors, {METADATA_KEY: json.dumps({"layers": {"a": marker}})})
    assert isinstance(loaded["a.weight"], PackedWeight)
    assert same(save(loaded), published("int8 rows"))


def broken(form: str, **changes: Tensor | None) -> dict[str, Tensor]:
    tensors = published(form)
    for name, tensor in changes.items():
        key = "a." + name
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    return tensors


def marked(text: str) -> dict[str, Tensor]:
    return broken("int8", comfy_quant=marker_tensor(text))


#: built by the test: quantizing takes time, which collection would spend in every run
BAD: dict[str, tuple[Callable[[], dict[str, Tensor]], str]] = {
    "no scale": (
        lambda: broken("fp8", weight_scale=None),
        r"'a.weight_scale': found nothing, expected the weight_scale of",
    ),
    "scale shape": (
        lambda: broken("fp8", weight_scale=torch.ones(7)),
        r"_scale': found shape \(7,\), expected .*\(64, 1\)",
    ),
    "scale type": (
        lambda: broken("int8", weight_scale=torch.ones(1, dtype=torch.int32)),
        "found type I32, expected",
    ),
    "weight type": (
        lambda: broken("fp8", weight=torch.zeros(64, 256)),
        "'a.weight': found type F32, expected",
    ),
    "weight rank": (lambda: broken("nvfp4", weight=torch.zeros(4, dtype=torch.uint8)), "two dimensions"),
    "padding": (lambda: broken("nvfp4", weight=torch.zeros(60, 128, dtype=torch.uint8)), "padded to 16"),
    "block scales": (
        lambda: broken("nvfp4", weight_scale=torch.zeros(64, 16).to(torch.float8_e4m3fn)),
        r"'a.weight_scale': found shape \(64, 16\), expected the shape \(128, 16\)",
    ),
    "no second scale": (lambda: broken("nvfp4", weight_scale_2=None), "'a.weight_scale_2': found nothing"),
    "no channel scale": (lambda: broken("w4a8", weight_s_channel=None), "'a.weight_s_channel': found nothing"),
    "a part of another format": (
        lambda: broken("fp8", weight_scale_2=torch.ones(())),
        "'a.weight_scale_2': found a part",
    ),
    "not JSON": (lambda: marked("{format"), "'a.comfy_quant': .*expected JSON"),
    "not an object": (lambda: marked("[1]"), "found a JSON list, expected an object"),
    "no format": (lambda: marked("{}"), "found format None, expected one of float8_e4m3fn"),
    "unknown format": (lambda: marked('{"format": "int8_tensorwize"}'), "did you mean 'int8_tensorwise'"),
    "setting": (
        lambda: marked('{"format": "int8_tensorwise", "convrot": "yes"}'),
        "found convrot 'yes', expected .*false",
    ),
    "rotation": (
        lambda: marked('{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 8}'),
        "'a.weight': found convrot_groupsize 8, expected a power of 4",
    ),
    "group": (
        lambda: broken("w4a8", comfy_quant=marker_tensor('{"format": "asym_w4a8_int8", "group_size": 6}')),
        "found group_size 6",
    ),
    "rotated columns": (
        lambda: broken("w4a4", comfy_quant=marker_tensor('{"format": "convrot_w4a4", "convrot_groupsize": 1024}')),
        "found 256 columns, expected a multiple of convrot_groupsize",
    ),
    "setting below one": (
        lambda: marked('{"format": "convrot_w4a4", "convrot_groupsize": 0}'),
        "found convrot_groupsize 0",
    ),
    "not text": (
        lambda: broken("int8", comfy_quant=torch.tensor([255, 254], dtype=torch.uint8)),
        "expected JSON as UTF-8",
    ),
    "no weight": (
        lambda: broken("int8", weight=None),
        "'a.comfy_quant': marks a layer without a weight, expected 'a.weight'",
    ),
    "old without weight": (lambda: {"a.scale_weight": torch.ones(())}, "a scale without a weight, expected 'a.weight'"),
}


@each_case("name", BAD)
def test_what_is_not_stored_as_it_says_is_refused(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(BadQuantization, match=rf"^flux\.safetensors: .*{message}"):
        load(make(), file="flux.safetensors")


@pytest.mark.parametrize("text", ["[", '{"layers": [1]}', '{"layers": {"a": {"format": "float9"}}}', "[1]"])
def test_a_damaged_header_is_refused(text: str) -> None:
    with pytest.raises(BadQuantization, match=r"^flux\.safetensors: "):
        load({"a.weight": torch.zeros(4, 4)}, {METADATA_KEY: text}, file="flux.safetensors")


def test_only_weights_can_be_saved_packed() -> None:
    packed = quantize(torch.ones(4, 4), "float8_e4m3fn")
    with pytest.raises(BadQuantization, match=r"'a.table': found a weight packed as float8_e4m3fn, expected a name"):
        save({"a.table": packed})


def half_scaled_file(*scaled: str) -> dict[str, torch.Tensor]:
    """A file of two layers under an old marker, with scales for those that are `scaled`."""
    tensors = {PREFIX + "scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for layer in ("a", "b"):
        tensors[f"{PREFIX}{layer}.weight"] = torch.ones(4, 4).to(torch.float8_e4m3fn)
        if layer in scaled:
            tensors[f"{PREFIX}{layer}.scale_weight"] = torch.ones(())
    return tensors


def test_an_old_scaled_file_without_scales_is_refused() -> None:
    with pytest.raises(BadQuantization, match=r"2 weights .* without scales"):
        load(half_scaled_file())


def test_a_missing_scale_of_an_old_file_is_told_with_counts(caplog: pytest.LogCaptureFixture) -> None:
    loaded = load(half_scaled_file("a"))
    assert isinstance(loaded[PREFIX + "a.weight"], PackedWeight)
    assert not isinstance(loaded[PREFIX + "b.weight"], PackedWeight)
    assert "1 of 2 weights" in caplog.text
    assert f"{PREFIX}b.weight" in caplog.text
    caplog.clear()
    load(half_scaled_file("a", "b"))
    assert caplog.text == ""


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
def test_block_scales_in_one_dimension_are_cut_by_rows_and_saved_as_they_were(form: str) -> None:
    name, options = FORMS[form]
    tensors = save({"a.weight": quantize(draw([256, 256], 5, 0.05, torch.float32), name, options)})
    flat = {**tensors, "a.weight_scale": tensors["a.weight_scale"].reshape(-1)}
    expected, weight = load(tensors)["a.weight"], load(flat)["a.weight"]
    assert isinstance(weight, PackedWeight)
    assert isinstance(expected, PackedWeight)
    assert weight.parts["weight_scale"].data_ptr() == flat["a.weight_scale"].data_ptr()
    rows = weight[128:256]
    assert isinstance(rows, PackedWeight)
    assert torch.equal(rows.unpack(torch.float32), expected.unpack(torch.float32)[128:256])
    assert same(save({"a.weight": weight}), flat)
    back = requantize(weight.unpack(torch.float32), weight)
    assert save({"a.weight": back})["a.weight_scale"].shape == flat["a.weight_scale"].shape


def plain_with_a_scale(factor: Tensor) -> dict[str, Tensor]:
    """An old file in which a layer that is not quantized has a scale too."""
    beside = {
        PREFIX + "c.weight": torch.ones(4, 4, dtype=torch.float16),
        PREFIX + "c.scale_weight": factor,
        PREFIX + "c.scale_input": torch.tensor(3.0),
    }
    return {**half_scaled_file("a", "b"), **beside}


def test_a_scale_of_one_beside_a_plain_weight_says_nothing() -> None:
    loaded = load(plain_with_a_scale(torch.ones(1)))
    assert loaded.keys() == {PREFIX + name for name in ("a.weight", "b.weight", "c.weight")}
    assert type(loaded[PREFIX + "c.weight"]) is Tensor


@pytest.mark.parametrize(("factor", "said"), [(torch.tensor(0.5), "0.5"), (torch.ones(4, 1), r"shape \(4, 1\)")])
def test_another_scale_beside_a_plain_weight_is_refused_for_what_it_is(factor: Tensor, said: str) -> None:
    message = (
        rf"^old\.safetensors: '{PREFIX}c\.scale_weight': found a scale \({said}\) of a weight of type F16, expected 1"
    )
    with pytest.raises(BadQuantization, match=message):
        load(plain_with_a_scale(factor), file="old.safetensors")
