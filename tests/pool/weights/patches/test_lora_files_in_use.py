"""LoRA files as trainers publish them, in their key layouts: PEFT's folders, XLabs' Flux files, wrapped modules,
biases, ranks of 0.

PEFT's adapters are compared with the weights that PEFT merges, XLabs' with diffusers' conversion.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from diffusers.loaders.lora_conversion_utils import _convert_xlabs_flux_lora_to_diffusers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.models.loading.describe import describe_lora
from modelpool.pool.models.lora_names.discovered import layout_map
from modelpool.pool.models.lora_names.lora_key_map import lora_targets
from modelpool.pool.values.core.errors import AdapterMismatch, CorruptFile
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.keymaps.adapter_keys import looks_like_lora, normalized_keys
from modelpool.pool.weights.keymaps.key_map import RowRange
from modelpool.pool.weights.patches.lora_file import LoraMatch, match_lora, require_match
from modelpool.pool.weights.patches.patch_set import PatchSet
from tests.pool.models.loading import layouts

UNET = Role.DIFFUSION_MODEL
Shapes = dict[str, tuple[int, ...]]


class Words(nn.Module):
    """A table of vectors and two matrices of different sizes, one without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.first = nn.Linear(16, 24)
        self.second = nn.Linear(24, 8, bias=False)


def names_of(shapes: Shapes, prefix: str = "base_model.model.") -> dict[str, tuple[RowRange, ...]]:
    weights = {key: shape for key, shape in shapes.items() if key.endswith(".weight")}
    return {
        prefix + key.removesuffix(".weight"): (RowRange(key, shape, 0, shape[0], 0),) for key, shape in weights.items()
    }


def matched(path: Path, shapes: Shapes, prefix: str = "base_model.model.") -> LoraMatch:
    return match_lora(path, "hash", {UNET: names_of(shapes, prefix)}, {UNET: shapes})


def patched(match: LoraMatch, before: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {key: weight.clone() for key, weight in before.items()}
    for patch in PatchSet(match.patches[UNET]).patches:
        found[patch.parameter] = patch(found[patch.parameter])
    return found


LINES = ["first", "second"]
CONFIGS: dict[str, Any] = {
    "alpha over rank": peft.LoraConfig(r=4, lora_alpha=16, target_modules=LINES, init_lora_weights=False),
    "patterns": peft.LoraConfig(
        r=4,
        lora_alpha=2,
        target_modules=LINES,
        rank_pattern={"second": 2},
        alpha_pattern={"second": 6},
        init_lora_weights=False,
    ),
    "rslora": peft.LoraConfig(r=4, lora_alpha=2, use_rslora=True, target_modules=LINES, init_lora_weights=False),
    "dora": peft.LoraConfig(r=4, lora_alpha=6, use_dora=True, target_modules=LINES, init_lora_weights=False),
    "bias": peft.LoraConfig(r=4, lora_alpha=6, lora_bias=True, target_modules=["first"], init_lora_weights=False),
    "table": peft.LoraConfig(r=3, lora_alpha=6, target_modules=["words", "first"], init_lora_weights=False),
    "loha": peft.LoHaConfig(r=4, alpha=6, target_modules=LINES, init_weights=False),
    "vera": peft.VeraConfig(r=6, target_modules=LINES),
}


def saved_by_peft(config: Any, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights before, and those that PEFT merges with an adapter that it saved in `folder`."""
    torch.manual_seed(0)
    model = Words()
    wrapped = peft.get_peft_model(model, config)
    for name, parameter in wrapped.named_parameters():
        if any(part in name for part in ("magnitude", "vera_lambda", "bias")):  # start as what hides their effect
            parameter.data += 0.5 * torch.rand_like(parameter)
        elif "hada" in name:
            parameter.data.normal_().mul_(0.5)
    wrapped.save_pretrained(folder)
    base = {name.replace(".base_layer", ""): p.detach().clone() for name, p in model.named_parameters()}
    after = {name: p.detach().clone() for name, p in wrapped.merge_and_unload().named_parameters()}
    return {name: base[name] for name in after}, after


# PEFT takes the bias of a matrix for a part of it
@pytest.mark.filterwarnings("ignore:.*LoRA tensor.s. have invalid shape")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_of_peft_gives_the_weights_that_peft_merges(tmp_path: Path, name: str) -> None:
    before, after = saved_by_peft(CONFIGS[name], tmp_path)
    match = matched(tmp_path / "adapter_model.safetensors", {key: tuple(w.shape) for key, w in before.items()})
    assert match.unmatched == ()
    found = patched(match, before)
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    assert changed, "PEFT changed nothing"
    for key, weight in after.items():
        torch.testing.assert_close(found[key], weight, rtol=0, atol=2e-6, msg=key)


def test_the_configuration_of_peft_is_part_of_the_identity_of_a_lora(tmp_path: Path) -> None:
    saved_by_peft(CONFIGS["alpha over rank"], tmp_path)
    path, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"

    def identity() -> str:
        return Catalog([], [tmp_path], "cpu").find_lora(str(path), 1.0).sha256

    first = identity()
    config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 8}))
    assert identity() != first
    config.write_text("{")
    with pytest.raises(CorruptFile, match=r"adapter_config.json: the configuration is damaged"):
        matched(path, {"first.weight": (24, 16)})
    config.unlink()
    assert identity() not in (first, "")


@pytest.mark.filterwarnings("ignore:Specified to not save vera_A and vera_B")
def test_a_vera_without_its_shared_matrices_says_how_to_save_it(tmp_path: Path) -> None:
    before, _ = saved_by_peft(peft.VeraConfig(r=6, target_modules=LINES, save_projection=False), tmp_path)
    match = matched(tmp_path / "adapter_model.safetensors", {key: tuple(w.shape) for key, w in before.items()})
    with pytest.raises(AdapterMismatch, match=r"needs vera_A and vera_B.*save it with save_projection"):
        require_match(match, "vera", "model", "test")


@pytest.mark.parametrize("single", [False, True], ids=["double blocks", "all blocks"])
def test_xlabs_loras_for_flux_are_what_diffusers_converts_them_to(tmp_path: Path, single: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, shapes = 64, layouts.flux(2, 2, 64)
    key_map = layout_map("flux", shapes)
    names = lora_targets(UNET, key_map, "", "flux")
    parameters = {key: tuple(origin.shape) for key, origin in key_map.origins.items()}
    tensors: dict[str, Tensor] = {}
    for block in range(2):
        modules = [
            (f"double_blocks.{block}.processor.{part}_lora{n}", part) for part in ("qkv", "proj") for n in (1, 2)
        ]
        if single:
            modules += [(f"single_blocks.{block}.processor.{part}_lora", part) for part in ("qkv", "proj")]
        for module, part in modules:
            rows = 3 * hidden if part == "qkv" else hidden
            columns = 5 * hidden if "single" in module and part == "proj" else hidden
            tensors[f"{module}.down.weight"] = torch.randn(4, columns, generator=generator)
            tensors[f"{module}.up.weight"] = torch.randn(rows, 4, generator=generator)
    path, converted = tmp_path / "xlabs.safetensors", tmp_path / "converted.safetensors"
    save_file(tensors, path)
    assert looks_like_lora(tensors)
    assert describe_lora(path).modules == {UNET: len(tensors) // 2}
    renamed = _convert_xlabs_flux_lora_to_diffusers(dict(tensors))
    save_file({key: tensor.clone() for key, tensor in renamed.items()}, converted)
    blank = {key: torch.zeros(shape) for key, shape in parameters.items()}
    made = []
    for file in (path, converted):
        match = match_lora(file, "hash", {UNET: names}, {UNET: parameters})
        assert match.unmatched == ()
        made.append(patched(match, blank))
    assert any(weight.any() for weight in made[0].values())
    for key, weight in made[0].items():
        torch.testing.assert_close(weight, made[1][key], msg=key)


PAIR = {"lora_up.weight": torch.ones(8, 2), "lora_down.weight": torch.ones(2, 4), "alpha": torch.tensor(1.0)}


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ("_orig_mod.transformer.block.to_q", "transformer.block.to_q"),
        ("transformer._orig_mod.block.to_q", "transformer.block.to_q"),
        ("module.transformer.block.to_q", "transformer.block.to_q"),
        ("state_dict.module._orig_mod.transformer.block.to_q", "transformer.block.to_q"),
        ("lora_unet__orig_mod_block_to_q", "lora_unet_block_to_q"),
    ],
)
def test_names_of_wrappers_are_no_part_of_a_name(tmp_path: Path, written: str, plain: str) -> None:
    path = tmp_path / "lora.safetensors"
    save_file({f"{written}.{part}": tensor for part, tensor in PAIR.items()}, path)
    names = {plain: (RowRange("w.weight", (8, 4), 0, 8, 0),)}
    match = match_lora(path, "hash", {UNET: names}, {UNET: {"w.weight": (8, 4)}})
    assert (match.matched, match.unmatched) == (1, ())
    assert torch.equal(patched(match, {"w.weight": torch.zeros(8, 4)})["w.weight"], torch.ones(8, 4))


def test_two_keys_that_are_one_name_without_wrappers_keep_their_names() -> None:
    keys = {"module.a.lora_up.weight": (8, 2), "a.lora_up.weight": (8, 2)}
    assert set(normalized_keys(keys).original) == set(keys)


def test_the_bias_of_an_up_matrix_is_scaled_like_the_product(tmp_path: Path) -> None:
    """A layer with an up matrix and a bias adds alpha / rank * (up @ down @ x + bias)."""
    path, bias = tmp_path / "lora.safetensors", torch.arange(8.0)
    save_file({"m.lora_up.bias": bias, **{f"m.{part}": tensor for part, tensor in PAIR.items()}}, path)
    match = matched(path, {"m.weight": (8, 4), "m.bias": (8,)}, prefix="")
    found = patched(match, {"m.weight": torch.zeros(8, 4), "m.bias": torch.zeros(8)})
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    up, down = nn.Linear(2, 8), nn.Linear(4, 2, bias=False)
    up.weight.data, up.bias.data, down.weight.data = PAIR["lora_up.weight"], bias, PAIR["lora_down.weight"]
    torch.testing.assert_close(x @ found["m.weight"].T + found["m.bias"], 0.5 * up(down(x)).detach())


def test_adapters_of_rank_0_are_named_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    empty = {"lora_up.weight": torch.ones(8, 0), "lora_down.weight": torch.ones(0, 4), "alpha": torch.tensor(0.0)}
    save_file({**{f"m.{k}": t for k, t in PAIR.items()}, **{f"none.{k}": t for k, t in empty.items()}}, path)
    match = matched(path, {"m.weight": (8, 4), "none.weight": (8, 4)}, prefix="")
    assert match.matched == 1
    assert match.warning == "1 of 2 keys matched, not used: none (its rank is 0: it changes nothing)"
    assert [patch.parameter for patch in match.patches[UNET]] == ["m.weight"]
    assert len(load_file(path)) == 6
