"""The content of a LoRA file: every spelling and kind, and nothing that is wrong passes for something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from modelpool.pool.values.core.errors import BadQuantization, CorruptFile
from modelpool.pool.weights.patches.adapter_entries import AdapterKind, UnmatchedEntry, read_adapters
from modelpool.pool.weights.quant.quantize import quantize
from modelpool.pool.weights.quant.state_dict import save
from tests.each_case import each_case
from tests.pool.weights.patches.golden_adapters import GOLDEN

LOADED = json.loads((GOLDEN / "lora_formats.json").read_text())["load_lora"]
KIND_NAMES = {
    AdapterKind.LORA: "lora",
    AdapterKind.LOHA: "loha",
    AdapterKind.LOKR: "lokr",
    AdapterKind.GLORA: "glora",
    AdapterKind.OFT: "oft",
    AdapterKind.BOFT: "boft",
    AdapterKind.NORM: "diff",
    AdapterKind.DIFFERENCE: "diff",
    AdapterKind.REPLACEMENT: "set",
}
#: files that are refused here. One is no LoRA; the other has a core that shares no rank with its factors, which fails
#: upstream when it is computed.
REFUSED = {"unknown": "no LoRA keys", "lokr_dec": "factors of shapes"}
#: the order of the tensors in the golden results
ORDERS = {
    "lora": ("up", "down", "alpha", "mid", "dora_scale", "reshape"),
    "loha": ("hada_w1_a", "hada_w1_b", "alpha", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2", "dora_scale"),
    "lokr": (
        *("lokr_w1", "lokr_w2", "alpha", "lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
        "dora_scale",
    ),
    "glora": ("a1", "a2", "b1", "b2", "alpha", "dora_scale"),
    "oft": ("oft_blocks", "rescale", "alpha", "dora_scale"),
    "boft": ("oft_blocks", "rescale", "alpha", "dora_scale"),
}


def write(path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, path)
    return path


def golden_tensors(case: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors of the case's shapes; its scalars and the new shape hold what the result says."""
    numbers = {"reshape_weight": torch.tensor([8, 12])}
    alphas = [w for r in case["result"].values() for w in r.get("weights", ()) if isinstance(w, float)]
    tensors = {}
    for key, shape in case["input"].items():
        name, part = key.replace("KEY", "m"), key.rsplit(".", 1)[1]
        tensors[name] = numbers.get(part, torch.tensor(alphas[0]) if part == "alpha" else torch.ones(shape))
    return tensors


@each_case("name", LOADED)
def test_golden_spelling(tmp_path: Path, name: str) -> None:
    case = LOADED[name]
    path = write(tmp_path / "lora.safetensors", golden_tensors(case))
    if name in REFUSED:
        with pytest.raises(CorruptFile, match=REFUSED[name]):
            read_adapters(path)
        return
    found = {}
    for entry in read_adapters(path).entries:
        kind = KIND_NAMES[entry.kind]
        own: dict[str, Any] = {part: list(t.shape) for part, t in entry.parts.items()}
        own |= {"alpha": entry.alpha, "reshape": list(entry.reshaped) if entry.reshaped else None}
        result: dict[str, Any] = {"type": kind}
        if kind in ORDERS:
            result["weights"] = [own.get(part) for part in ORDERS[kind]]
        else:
            result["tensors"] = [list(t.shape) for t in entry.parts.values()]
        found["m.bias" if entry.is_bias else "m.weight"] = result
    assert found == case["result"]


@pytest.mark.parametrize(
    ("name", "loser"),
    [("lora_and_diff", "LoRA is superseded by the difference"), ("lora_and_loha", "LoRA is superseded")],
)
def test_what_counts_less_is_told(tmp_path: Path, name: str, loser: str) -> None:
    (unmatched,) = read_adapters(write(tmp_path / "x.safetensors", golden_tensors(LOADED[name]))).unmatched
    assert loser in unmatched.reason


def test_a_file_that_is_a_whole_has_nothing_strange(tmp_path: Path) -> None:
    for name in set(LOADED) - {*REFUSED, "lora_and_diff", "lora_and_loha"}:
        assert read_adapters(write(tmp_path / "x.safetensors", golden_tensors(LOADED[name]))).unmatched == (), name


UP, DOWN = torch.ones(8, 2), torch.ones(2, 8)
BROKEN: dict[str, tuple[dict[str, Tensor], str]] = {
    "no down": ({"a.lora_up.weight": UP}, "'a' has no 'down' factor"),
    "no up": ({"a.lora_A.weight": DOWN}, "'a' has no 'up' factor"),
    "half a LoHa": ({"a.hada_w1_a": UP, "a.hada_w1_b": DOWN, "a.hada_w2_a": UP}, "no 'hada_w2_b' factor"),
    "half a LoKr": ({"a.lokr_w1": UP, "a.lokr_w2_a": UP}, "no 'lokr_w2_b' factor"),
    "other rank": (
        {"a.lora_up.weight": UP, "a.lora_down.weight": torch.ones(3, 8)},
        r"up \(8, 2\), down \(3, 8\)|down \(3, 8\), up \(8, 2\)",
    ),
    "flat factor": ({"a.lora_up.weight": UP, "a.lora_down.weight": torch.ones(2)}, r"expected \(O, R\)"),
    "LoHa of other ranks": (
        {"a.hada_w1_a": UP, "a.hada_w1_b": DOWN, "a.hada_w2_a": UP, "a.hada_w2_b": torch.ones(3, 8)},
        "the LoHa of 'a'",
    ),
    "one core": (
        {f"a.hada_w{n}_{s}": DOWN for n in (1, 2) for s in "ab"} | {"a.hada_t1": torch.ones(2, 2, 3, 3)},
        "the LoHa of 'a'",
    ),
    "square blocks": ({"a.oft_blocks": torch.ones(2, 4, 3)}, "expected blocks"),
    "two alphas": ({"a.lora_up.weight": UP, "a.lora_down.weight": DOWN, "a.alpha": torch.ones(2)}, "alpha of 'a'"),
    "endless alpha": (
        {"a.lora_up.weight": UP, "a.lora_down.weight": DOWN, "a.alpha": torch.tensor(torch.inf)},
        "expected one finite number",
    ),
    "the same factor twice": (
        {"a.lora_up.weight": UP, "a.lora_B.weight": UP, "a.lora_down.weight": DOWN},
        "are both the 'up' factor of 'a'",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused(tmp_path: Path, name: str) -> None:
    tensors, message = BROKEN[name]
    path = write(tmp_path / "lora.safetensors", tensors)
    with pytest.raises(CorruptFile, match=message) as caught:
        read_adapters(path)
    assert str(path) in str(caught.value)


def test_what_belongs_to_nothing_is_named(tmp_path: Path) -> None:
    tensors = {
        "a.lora_up.weight": UP,
        "a.lora_down.weight": DOWN,
        "b.alpha": torch.tensor(1.0),
        "c.a1.weight": UP,
        "d.new_kind": UP,
    }
    file = read_adapters(write(tmp_path / "lora.safetensors", tensors))
    assert [entry.name for entry in file.entries] == ["a"]
    assert [s.name for s in file.unmatched] == ["b", "c", "d.new_kind"]
    assert str(UnmatchedEntry("b", "why")) == "b (why)"


INTEGERS = {"int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool, "complex64": torch.complex64}


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(
    ("key", "tensors"),
    [
        ("a.lora_up.weight", {"a.lora_up.weight": UP, "a.lora_down.weight": DOWN}),
        ("a.dora_scale", {"a.lora_up.weight": UP, "a.lora_down.weight": DOWN, "a.dora_scale": torch.ones(8, 1)}),
        ("a.diff", {"a.diff": UP}),
        ("a.lokr_w2", {"a.lokr_w1": UP, "a.lokr_w2": DOWN}),
    ],
)
def test_factors_that_are_no_floating_point_numbers_are_refused(
    tmp_path: Path, key: str, tensors: dict[str, Tensor], dtype: str
) -> None:
    path = write(tmp_path / "lora.safetensors", tensors | {key: tensors[key].to(INTEGERS[dtype])})
    refused = rf"lora.safetensors: .*'{key}'(: found codes of type \w8 without a scale or marker| has type {dtype}), "
    with pytest.raises((CorruptFile, BadQuantization), match=refused + "expected floating"):
        read_adapters(path)


def test_factors_of_8_bit_floats_are_factors(tmp_path: Path) -> None:
    tensors = {"a.lora_up.weight": UP.to(torch.float8_e4m3fn), "a.lora_down.weight": DOWN.to(torch.float8_e5m2)}
    file = read_adapters(write(tmp_path / "lora.safetensors", tensors))
    assert ([e.name for e in file.entries], file.unmatched) == (["a"], ())


SCALES = ["scale_weight", "weight_scale", "weight.scale_weight", "weight_scale_inv"]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_factors_are_multiplied_with_the_scale_beside_them(tmp_path: Path, dtype: torch.dtype) -> None:
    for scale in SCALES:
        tensors = {"a.lora_up.weight": UP.to(dtype), "a.lora_down.weight": DOWN}
        path = write(tmp_path / "lora.safetensors", {**tensors, f"a.lora_up.{scale}": torch.tensor([0.25])})
        file = read_adapters(path)
        (entry,) = file.entries
        assert torch.equal(entry.parts["up"], 0.25 * UP.to(dtype).float()), scale
        assert torch.equal(entry.parts["down"], DOWN)
        assert file.unmatched == ()
        bare = {"a.hada_w1_a": UP.to(dtype), "a.hada_w1_b": DOWN, "a.hada_w2_a": UP, "a.hada_w2_b": DOWN}
        path = write(tmp_path / "loha.safetensors", {**bare, f"a.hada_w1_a.{scale}": torch.tensor(0.25)})
        if not scale.startswith("weight."):
            (entry,) = read_adapters(path).entries
            assert torch.equal(entry.parts["hada_w1_a"], 0.25 * UP.to(dtype).float()), scale


def test_factors_in_a_format_that_pads_them_are_refused(tmp_path: Path) -> None:
    """Their rank, which an alpha is divided by, would be larger."""
    tensors = {"a.lora_up.weight": UP, "a.lora_down.weight": DOWN}
    quantized = {key: quantize(tensor.float(), "mxfp8") for key, tensor in tensors.items()}
    with pytest.raises(BadQuantization, match=r"'a\.lora_\w+\.weight': found mxfp8, which is stored padded"):
        read_adapters(write(tmp_path / "lora.safetensors", save(quantized)))


def test_factors_with_a_scale_under_no_known_name_are_refused(tmp_path: Path) -> None:
    for scale in ("a.lora_up.zero_point", "a.lora_up.scales", "a.lora_up.weight.scale", "a.lora_up.weight_absmax"):
        tensors = {"a.lora_up.weight": UP.to(torch.float8_e4m3fn), "a.lora_down.weight": DOWN, scale: torch.ones(1)}
        with pytest.raises(BadQuantization, match=f"'a.lora_up.weight': .* beside '{scale}'"):
            read_adapters(write(tmp_path / "lora.safetensors", tensors))


SHAPES_THAT_ARE_NONE = {
    "a scalar": torch.tensor(64),
    "a matrix": torch.tensor([[64, 64]]),
    "no number": torch.tensor([torch.nan, 48.0]),
    "endless": torch.tensor([torch.inf, 48.0]),
    "not whole": torch.tensor([64.5, 48.0]),
    "nothing": torch.tensor([0, 48]),
    "negative": torch.tensor([-8, -12]),
    "truths": torch.tensor([True, True]),
    "empty": torch.ones(0),
    "too many": torch.ones(9),
    "far too many": torch.ones(1 << 20),
    "complex": torch.ones(2, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", SHAPES_THAT_ARE_NONE)
def test_a_new_shape_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    key = "a.reshape_weight"
    tensors = {"a.lora_up.weight": UP, "a.lora_down.weight": DOWN, key: SHAPES_THAT_ARE_NONE[name]}
    path = write(tmp_path / "lora.safetensors", tensors)
    with pytest.raises(CorruptFile, match="expected 1 to 8 integers above 0") as caught:
        read_adapters(path)
    assert f"{path}: {key!r} is " in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(path))


def test_a_new_shape_may_be_kept_as_floats(tmp_path: Path) -> None:
    tensors = {"a.lora_up.weight": UP, "a.lora_down.weight": DOWN, "a.reshape_weight": torch.tensor([8.0, 12.0])}
    (entry,) = read_adapters(write(tmp_path / "lora.safetensors", tensors)).entries
    assert entry.reshaped == (8, 12)
