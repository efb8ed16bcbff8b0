"""DoRA over rows and columns, with every kind of delta: `V * m / |V|` with `V = W + delta`, interpolated by strength.

The formula is written out here, as LyCORIS (`weight_decompose`), PEFT and OneTrainer train it; deltas are computed from
the same file without its magnitude, whose values other tests check.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from modelpool.pool.weights.keymaps.key_map import RowRange
from modelpool.pool.weights.patches.patch_set import PatchSet, WeightPatch
from tests.pool.weights.patches.test_lora_file import Names, lora, match, random

#: tensors of each kind for a weight of shape (24, 24)
KINDS: dict[str, dict[str, Tensor]] = {
    "LoRA": {"lora_up.weight": random(24, 4), "lora_down.weight": random(4, 24), "alpha": torch.tensor(2.0)},
    "LoHa": {f"hada_w{n}_{s}": random(*size, seed=n) for n in (1, 2) for s, size in (("a", (24, 4)), ("b", (4, 24)))},
    "LoKr": {"lokr_w1": random(4, 4), "lokr_w2_a": random(6, 2), "lokr_w2_b": random(2, 6), "alpha": torch.tensor(1.0)},
    "full LoKr": {"lokr_w1": random(4, 4), "lokr_w2": random(6, 6), "alpha": torch.tensor(torch.inf)},
    "GLoRA": {
        "a1.weight": random(24, 4),
        "a2.weight": random(4, 24),
        "b1.weight": random(24, 4),
        "b2.weight": random(4, 24),
    },
    "OFT": {"oft_blocks": random(6, 4, 4), "rescale": random(24, 1) + 1},
    "OFT of rotations": {"oft_diag": random(6, 4, 4)},
    "OFT of inputs": {"oft_R.weight": random(6, 6)},
    "BOFT": {"oft_blocks": random(1, 6, 4, 4)},
}
#: shapes of a magnitude for a (24, 24) weight, and the axis that its lengths are measured along
MAGNITUDES = {"dora_scale": (((24, 1), 1), ((24,), 1), ((1, 24), 0)), "lora_magnitude_vector": (((24,), 1),)}
WHOLE: Names = {"m": (RowRange("m.weight", (24, 24), 0, 24, 0),)}
#: a fused weight of the file that is three parameters of the model
FUSED: Names = {"m": tuple(RowRange(f"{part}.weight", (24, 24), 8 * n, 8, 0) for n, part in enumerate("qkv"))}


def applied(patches: tuple[WeightPatch, ...], weight: Tensor, strength: float = 1.0) -> Tensor:
    found = weight.clone()
    for function in PatchSet(tuple(replace(p, strength=strength) for p in patches)).functions(patches[0].parameter):
        found = function(found)
    return found


def by_formula(weight: Tensor, delta: Tensor, magnitude: Tensor, axis: int, strength: float) -> Tensor:
    total = weight + delta
    lengths = total.flatten(1).norm(dim=1) if axis == 1 else total.transpose(0, 1).flatten(1).norm(dim=1)
    places = [-1 if d == 1 - axis else 1 for d in range(weight.ndim)]
    return weight + strength * (total * (magnitude.reshape(places) / lengths.reshape(places)) - weight)


def test_every_kind_has_the_lengths_that_its_magnitude_says(tmp_path: Path) -> None:
    weight, wrong = random(24, 24, seed=9, scale=1.0), []
    for kind, tensors in KINDS.items():
        (plain,) = match(lora(tmp_path, tensors), WHOLE, {"m.weight": (24, 24)}).patches.values()
        delta = applied(plain, weight) - weight
        for key, forms in MAGNITUDES.items():
            for shape, axis in forms:
                magnitude = torch.linspace(0.5, 3, 24).reshape(shape)
                found = match(lora(tmp_path, tensors | {key: magnitude}), WHOLE, {"m.weight": (24, 24)})
                (patches,) = found.patches.values()
                for strength in (1.0, 0.4, -0.5, 1.5):
                    expected = by_formula(weight, delta, magnitude, axis, strength)
                    error = (applied(patches, weight, strength) - expected).abs().max().item()
                    if error > 1e-5 or found.unmatched:
                        wrong.append((kind, key, shape, strength, error, found.unmatched))
    assert not wrong


def test_convolutions_have_magnitudes_of_output_and_of_input_channels(tmp_path: Path) -> None:
    weight = random(24, 8, 3, 3, seed=9, scale=1.0)
    tensors = {"lora_up.weight": random(24, 4, 1, 1), "lora_down.weight": random(4, 8, 3, 3)}
    delta = (tensors["lora_up.weight"].flatten(1) @ tensors["lora_down.weight"].flatten(1)).reshape(weight.shape)
    names: Names = {"m": (RowRange("m.weight", (24, 8, 3, 3), 0, 24, 0),)}
    for key, shape, axis in (
        ("dora_scale", (24, 1, 1, 1), 1),
        ("dora_scale", (1, 8, 1, 1), 0),
        ("lora_magnitude_vector", (1, 24, 1, 1), 1),  # as PEFT stores it
    ):
        magnitude = torch.linspace(0.5, 3, max(shape)).reshape(shape)
        (patches,) = match(
            lora(tmp_path, tensors | {key: magnitude}), names, {"m.weight": tuple(weight.shape)}
        ).patches.values()
        expected = by_formula(weight, delta, magnitude, axis, 0.7)
        assert torch.allclose(applied(patches, weight, 0.7), expected, atol=1e-5), (key, shape)


def test_each_part_of_a_fused_weight_has_the_lengths_of_its_rows(tmp_path: Path) -> None:
    """Of a fused weight of the file, and of a fused weight of the model."""
    weight, magnitude, wrong = random(24, 24, seed=9, scale=1.0), torch.linspace(0.5, 3, 24)[:, None], []
    for kind, tensors in KINDS.items():
        if kind == "BOFT":  # mixes all rows
            continue
        (plain,) = match(lora(tmp_path, tensors), WHOLE, {"m.weight": (24, 24)}).patches.values()
        expected = by_formula(weight, applied(plain, weight) - weight, magnitude, 1, 0.6)
        shapes = {f"{part}.weight": (8, 24) for part in "qkv"}
        (patches,) = match(lora(tmp_path, tensors | {"dora_scale": magnitude}), FUSED, shapes).patches.values()
        for number, patch in enumerate(patches):
            rows = slice(8 * number, 8 * number + 8)
            if (applied((patch,), weight[rows], 0.6) - expected[rows]).abs().max() > 1e-5:
                wrong.append((kind, patch.parameter))
        part: Names = {"m": (RowRange("fused.weight", (24, 24), 0, 24, 24),)}
        (patches,) = match(
            lora(tmp_path, tensors | {"dora_scale": magnitude}), part, {"fused.weight": (72, 24)}
        ).patches.values()
        fused = torch.cat([weight + 1, weight, weight - 1])
        found = applied(patches, fused, 0.6)
        if (found[24:48] - expected).abs().max() > 1e-5 or not torch.equal(found[:24], fused[:24]):
            wrong.append((kind, "fused"))
    assert not wrong


def test_several_loras_apply_one_after_the_other(tmp_path: Path) -> None:
    """As PEFT merges them: each is for the weight that the ones before it made."""
    weight, magnitude = random(24, 24, seed=9, scale=1.0), torch.linspace(0.5, 3, 24)[:, None]
    shapes = {"m.weight": (24, 24)}
    (plain,) = match(lora(tmp_path, KINDS["LoRA"]), WHOLE, shapes).patches.values()
    delta = applied(plain, weight) - weight
    (dora,) = match(lora(tmp_path, KINDS["LoRA"] | {"dora_scale": magnitude}), WHOLE, shapes).patches.values()
    both = PatchSet((replace(plain[0], strength=0.5), replace(dora[0], strength=0.8)))
    found = weight.clone()
    for function in both.functions("m.weight"):
        found = function(found)
    assert torch.allclose(found, by_formula(weight + 0.5 * delta, delta, magnitude, 1, 0.8), atol=1e-5)


def test_magnitudes_of_other_shapes_are_named(tmp_path: Path) -> None:
    shapes = {"m.weight": (24, 16)}
    names: Names = {"m": (RowRange("m.weight", (24, 16), 0, 24, 0),)}
    tensors = {"lora_up.weight": random(24, 4), "lora_down.weight": random(4, 16)}
    for shape in ((16,), (16, 1), (1, 24), (24, 16), (1,), (5, 1)):
        found = match(lora(tmp_path, tensors | {"dora_scale": torch.ones(shape)}), names, shapes)
        assert found.matched == 0, shape
        assert "the DoRA magnitude has shape" in found.unmatched[0].reason, shape


def test_a_row_of_zeros_stays_finite(tmp_path: Path) -> None:
    tensors = {"lora_up.weight": torch.zeros(24, 4), "lora_down.weight": random(4, 24), "dora_scale": torch.ones(24, 1)}
    (patches,) = match(lora(tmp_path, tensors), WHOLE, {"m.weight": (24, 24)}).patches.values()
    assert torch.equal(applied(patches, torch.zeros(24, 24)), torch.zeros(24, 24))


def test_columns_across_split_rows_are_refused_by_name(tmp_path: Path) -> None:
    tensors = KINDS["LoRA"] | {"dora_scale": torch.ones(1, 24)}
    found = match(lora(tmp_path, tensors), FUSED, {f"{part}.weight": (8, 24) for part in "qkv"})
    assert found.matched == 0
    assert "over input channels" in found.unmatched[0].reason
