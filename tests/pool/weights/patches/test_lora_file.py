"""Every kind of adapter reaches its rows, also where a weight of the file is several of the model's, or the reverse."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from modelpool.pool.values.core.errors import AdapterMismatch, CorruptFile
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.keymaps.key_map import KeyMap, RowRange, discover
from modelpool.pool.weights.patches.lora_file import LoraMatch, match_lora, require_match
from modelpool.pool.weights.patches.patch_set import PatchSet
from tests.pool.weights.patches.test_adapter_entries import write

UNET = Role.DIFFUSION_MODEL
Names = dict[str, tuple[RowRange, ...]]


def random(*shape: int, seed: int = 0, scale: float = 0.3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


#: tensors of each kind for a weight of shape (24, 16)
KINDS: dict[str, dict[str, Tensor]] = {
    "lora": {"lora_up.weight": random(24, 4), "lora_down.weight": random(4, 16), "alpha": torch.tensor(2.0)},
    "dora over rows": {"lora_up.weight": random(24, 4), "lora_down.weight": random(4, 16), "dora_scale": random(24, 1)},
    "peft dora": {
        "lora_B.weight": random(24, 4),
        "lora_A.weight": random(4, 16),
        "lora_magnitude_vector": random(24),
    },
    "loha": {f"hada_w{n}_{s}": random(*size, seed=n) for n in (1, 2) for s, size in (("a", (24, 4)), ("b", (4, 16)))},
    "lokr": {"lokr_w1": random(4, 4), "lokr_w2_a": random(6, 2), "lokr_w2_b": random(2, 4), "alpha": torch.tensor(1.0)},
    "glora": {
        "a1.weight": random(16, 4),
        "a2.weight": random(4, 16),
        "b1.weight": random(24, 4),
        "b2.weight": random(4, 16),
    },
    "oft": {"oft_blocks": random(6, 4, 4), "rescale": random(24, 1)},
    "diff": {"diff": random(24, 16)},
    "set": {"set_weight": random(24, 16)},
    "dora over columns": {
        "lora_up.weight": random(24, 4),
        "lora_down.weight": random(4, 16),
        "dora_scale": random(1, 16),
    },
    "boft": {"oft_blocks": random(1, 6, 4, 4)},
}
MIX_ROWS = ("dora over columns", "boft")
NEED_WEIGHT = ("dora over rows", "peft dora", "glora", "oft", *MIX_ROWS)


def lora(tmp_path: Path, tensors: dict[str, Tensor], name: str = "m") -> Path:
    return write(tmp_path / "lora.safetensors", {f"{name}.{key}": tensor for key, tensor in tensors.items()})


def match(path: Path, names: Mapping[str, tuple[RowRange, ...]], shapes: Mapping[str, tuple[int, ...]]) -> LoraMatch:
    return match_lora(path, "hash", {UNET: names}, {UNET: shapes})


def patched(found: LoraMatch, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    patches = PatchSet(found.patches.get(UNET, ()))
    patches.check({key: tuple(w.shape) for key, w in weights.items()})
    result = {}
    for key, weight in weights.items():
        working = weight.clone()
        for function in patches.functions(key):
            working = function(working)
        result[key] = working
    return result


def names_of(key_map: KeyMap) -> Names:
    return {source.removesuffix(".weight"): key_map.targets(source) for source in key_map.sources}


def alone(tmp_path: Path, kind: str, weight: Tensor) -> Tensor:
    """The weight patched as one parameter."""
    names = {"m": (RowRange("m.weight", tuple(weight.shape), 0, weight.shape[0], 0),)}
    found = match(lora(tmp_path, KINDS[kind]), names, {"m.weight": tuple(weight.shape)})
    assert (found.matched, found.total, found.unmatched, found.warning) == (1, 1, (), None)
    return patched(found, {"m.weight": weight})["m.weight"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_changes_its_weight(tmp_path: Path, kind: str) -> None:
    weight = random(24, 16, seed=9, scale=1.0)
    assert (alone(tmp_path, kind, weight) - weight).abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_of_the_file_that_is_rows_of_a_parameter(tmp_path: Path, kind: str) -> None:
    """The model has q, k and v in one; a patch for k changes the rows of k, whatever the kind."""
    shapes = {"q.weight": (24, 16), "m.weight": (24, 16), "v.weight": (24, 16)}
    fused = discover(shapes, lambda c: {"qkv.weight": torch.cat([c["q.weight"], c["m.weight"], c["v.weight"]])})
    weight = random(72, 16, seed=9, scale=1.0)
    found = match(lora(tmp_path, KINDS[kind]), names_of(fused), {"qkv.weight": (72, 16)})
    result = patched(found, {"qkv.weight": weight})["qkv.weight"]
    assert torch.equal(result[24:48], alone(tmp_path, kind, weight[24:48].clone()))
    assert torch.equal(result[:24], weight[:24])
    assert torch.equal(result[48:], weight[48:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_of_the_file_that_is_several_parameters(tmp_path: Path, kind: str) -> None:
    split = discover(
        {"m.weight": (24, 16)},
        lambda c: dict(zip(("q.weight", "k.weight", "v.weight"), c["m.weight"].chunk(3), strict=True)),
    )
    weight = random(24, 16, seed=9, scale=1.0)
    weights = dict(zip(("q.weight", "k.weight", "v.weight"), weight.chunk(3), strict=True))
    found = match(lora(tmp_path, KINDS[kind]), names_of(split), dict.fromkeys(weights, (8, 16)))
    if kind in MIX_ROWS:
        assert (found.matched, found.total) == (0, 1)
        assert "rows" in found.unmatched[0].reason
        return
    result = torch.cat(list(patched(found, weights).values()))
    assert torch.allclose(result, alone(tmp_path, kind, weight), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_is_kept_transposed(tmp_path: Path, kind: str) -> None:
    turned = discover({"m.weight": (24, 16)}, lambda c: {"m.weight": c["m.weight"].T})
    weight = random(24, 16, seed=9, scale=1.0)
    found = match(lora(tmp_path, KINDS[kind]), names_of(turned), {"m.weight": (16, 24)})
    if kind in NEED_WEIGHT:
        assert found.matched == 0
        assert "another order" in found.unmatched[0].reason
        return
    result = patched(found, {"m.weight": weight.T.contiguous()})["m.weight"]
    assert torch.allclose(result.T, alone(tmp_path, kind, weight), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_convolution_that_is_kept_as_a_matrix(tmp_path: Path, kind: str) -> None:
    flat = discover({"m.weight": (24, 16, 1, 1)}, lambda c: {"m.weight": c["m.weight"].reshape(24, 16)})
    weight = random(24, 16, seed=9, scale=1.0)
    found = match(lora(tmp_path, KINDS[kind]), names_of(flat), {"m.weight": (24, 16)})
    assert torch.allclose(patched(found, {"m.weight": weight})["m.weight"], alone(tmp_path, kind, weight), atol=1e-6)


def test_a_rotation_is_cut_at_its_blocks_only(tmp_path: Path) -> None:
    split = discover({"m.weight": (24, 16)}, lambda c: {"q.weight": c["m.weight"][:6], "k.weight": c["m.weight"][6:]})
    found = match(lora(tmp_path, KINDS["oft"]), names_of(split), {"q.weight": (6, 16), "k.weight": (18, 16)})
    assert "OFT blocks of 4 rows" in found.unmatched[0].reason


def test_biases_and_norms(tmp_path: Path) -> None:
    key_map = discover(
        {"a.weight": (8, 4), "m.weight": (8, 4)}, lambda c: {"both.weight": torch.cat([c["a.weight"], c["m.weight"]])}
    )
    delta = random(8)
    found = match(lora(tmp_path, {"diff_b": delta}), names_of(key_map), {"both.weight": (16, 4), "both.bias": (16,)})
    assert torch.equal(patched(found, {"both.bias": torch.zeros(16)})["both.bias"], torch.cat([torch.zeros(8), delta]))
    norm = {"m": (RowRange("m.weight", (8,), 0, 8, 0),)}
    found = match(lora(tmp_path, {"w_norm": delta, "b_norm": -delta}), norm, {"m.weight": (8,), "m.bias": (8,)})
    result = patched(found, {"m.weight": torch.zeros(8), "m.bias": torch.zeros(8)})
    assert (found.matched, found.total) == (2, 2)
    assert torch.equal(result["m.weight"], delta)
    assert torch.equal(result["m.bias"], -delta)


def test_a_bias_that_the_model_lacks_is_told(tmp_path: Path) -> None:
    found = match(
        lora(tmp_path, {"diff_b": random(8)}), {"m": (RowRange("m.weight", (8, 4), 0, 8, 0),)}, {"m.weight": (8, 4)}
    )
    assert (found.matched, found.total) == (0, 1)
    assert found.unmatched[0].reason == "the model has no 'm.bias'"


def test_bfl_control_widens_a_weight_and_sets_norms(tmp_path: Path) -> None:
    tensors = {
        "img_in.lora_A.weight": random(4, 8),
        "img_in.lora_B.weight": random(6, 4),
        "img_in.lora_B.bias": random(6),
        "single_blocks.0.norm.key_norm.scale": random(4),
    }
    names = {
        "diffusion_model.img_in": (RowRange("x.weight", (6, 5), 0, 6, 0),),
        "diffusion_model.single_blocks.0.norm.key_norm": (RowRange("norm.weight", (4,), 0, 4, 0),),
    }
    shapes = {"x.weight": (6, 5), "x.bias": (6,), "norm.weight": (4,)}
    found = match(write(tmp_path / "control.safetensors", tensors), names, shapes)
    assert (found.matched, found.unmatched) == (3, ())
    assert PatchSet(found.patches[UNET]).patched_shape("x.weight", (6, 5)) == (6, 8)
    weights = {"x.weight": random(6, 5), "x.bias": random(6), "norm.weight": random(4)}
    result = patched(found, weights)
    widened = torch.cat([weights["x.weight"], torch.zeros(6, 3)], 1)
    delta = tensors["img_in.lora_B.weight"] @ tensors["img_in.lora_A.weight"]
    assert torch.allclose(result["x.weight"], widened + delta)
    assert torch.equal(result["norm.weight"], tensors["single_blocks.0.norm.key_norm.scale"])


def test_what_does_not_fit_is_counted_with_its_shapes(tmp_path: Path) -> None:
    names = {
        "m": (RowRange("m.weight", (24, 16), 0, 24, 0),),
        "n": (RowRange("n.weight", (24, 12), 0, 24, 0),),
        "twin": (RowRange("m.weight", (24, 16), 0, 24, 0),),
    }
    tensors = {f"{name}.{key}": t.clone() for name in ("m", "n", "twin", "other") for key, t in KINDS["lora"].items()}
    tensors["zero.lora_up.weight"], tensors["zero.lora_down.weight"] = random(24, 4), random(4, 16)
    tensors["zero.alpha"] = torch.tensor(0.0)
    names["zero"] = (RowRange("zero.weight", (24, 16), 0, 24, 0),)
    shapes = {"m.weight": (24, 16), "n.weight": (24, 12), "zero.weight": (24, 16)}
    found = match(write(tmp_path / "lora.safetensors", tensors), names, shapes)
    assert (found.matched, found.total) == (1, 5)
    reasons = {s.name: s.reason for s in found.unmatched}
    assert reasons["n"] == "LowRank: a delta of 24 x 16 for a weight of shape (24, 12)"
    assert reasons["other"] == "the model has no weight of this name"
    assert reasons["twin"] == "'m' is for the same rows of 'm.weight'"
    assert reasons["zero"] == "its alpha is 0, which disables it"
    assert found.warning is not None
    assert found.warning.startswith("1 of 5 keys matched, not used: n (LowRank")
    with pytest.raises(AdapterMismatch, match="1 of its 5 keys matched"):
        require_match(found, "lora", "model", "SD1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, dtype: torch.dtype, bad: float) -> None:
    down = random(4, 16)
    down[2, 3] = bad
    path = lora(tmp_path, {"lora_up.weight": random(24, 4).to(dtype), "lora_down.weight": down.to(dtype)})
    names = {"m": (RowRange("m.weight", (24, 16), 0, 24, 0),)}
    with pytest.raises(CorruptFile, match=r"the 'down' factor of 'm' holds 1 of 64 numbers"):
        match(path, names, {"m.weight": (24, 16)})


def test_large_finite_numbers_are_fine(tmp_path: Path) -> None:
    path = lora(tmp_path, {"lora_up.weight": torch.full((24, 4), 3e38), "lora_down.weight": random(4, 16)})
    assert match(path, {"m": (RowRange("m.weight", (24, 16), 0, 24, 0),)}, {"m.weight": (24, 16)}).matched == 1


def test_the_rank_of_the_inner_factor_scales_a_lokr(tmp_path: Path) -> None:
    """With both factors decomposed, alpha is over the rank of the second."""
    tensors = {
        "lokr_w1_a": random(4, 1),
        "lokr_w1_b": random(1, 4),
        "alpha": torch.tensor(3.0),
        "lokr_w2_a": random(6, 3),
        "lokr_w2_b": random(3, 4),
    }
    found = match(lora(tmp_path, tensors), {"m": (RowRange("m.weight", (24, 16), 0, 24, 0),)}, {"m.weight": (24, 16)})
    result = patched(found, {"m.weight": torch.zeros(24, 16)})["m.weight"]
    outer, inner = tensors["lokr_w1_a"] @ tensors["lokr_w1_b"], tensors["lokr_w2_a"] @ tensors["lokr_w2_b"]
    assert torch.allclose(result, torch.kron(outer, inner), atol=1e-6)


@pytest.mark.parametrize("kind", ["dora over rows", "dora over columns", "peft dora"])
def test_a_magnitude_counts_without_a_delta(tmp_path: Path, kind: str) -> None:
    """Alpha 0 makes the delta nothing; the lengths of the rows or columns change all the same."""
    names = {"m": (RowRange("m.weight", (24, 16), 0, 24, 0),)}
    weight = random(24, 16, seed=9, scale=1.0)
    found = match(lora(tmp_path, KINDS[kind] | {"alpha": torch.tensor(0.0)}), names, {"m.weight": (24, 16)})
    assert (found.matched, found.unmatched) == (1, ())
    axis = 0 if kind == "dora over columns" else 1
    magnitude = KINDS[kind].get("dora_scale", KINDS[kind].get("lora_magnitude_vector"))
    assert magnitude is not None
    length = weight.norm(dim=axis, keepdim=True)
    expected = weight * magnitude.reshape(length.shape) / length
    assert torch.allclose(patched(found, {"m.weight": weight})["m.weight"], expected, atol=1e-5)
