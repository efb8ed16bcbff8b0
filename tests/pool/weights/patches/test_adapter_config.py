"""LoRAs as diffusers saves them, with their alphas in the header, have the strength that PEFT gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from diffusers.training_utils import _collate_lora_metadata
from diffusers.utils import convert_state_dict_to_diffusers
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.keymaps.key_map import RowRange
from modelpool.pool.weights.patches.adapter_config import METADATA_ENTRY, SavedStrength, read_strengths
from modelpool.pool.weights.patches.adapter_entries import read_adapters
from modelpool.pool.weights.patches.lora_file import LoraMatch, match_lora
from modelpool.pool.weights.patches.patch_set import PatchSet
from tests.pool.weights.patches.test_adapter_entries import DOWN, UP

UNET, TEXT = Role.DIFFUSION_MODEL, Role.TEXT_ENCODER
TARGETS = ["to_q", "to_k", "to_out.0", "conv1"]
CONFIGS: dict[str, dict[str, Any]] = {
    "alpha 1 of rank 8": {"r": 8, "lora_alpha": 1},
    "over the root of the rank": {"r": 4, "lora_alpha": 3, "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 2,
        "rank_pattern": {"to_k": 2, r".*attn2\.to_q": 6},
        "alpha_pattern": {"mid_block.attentions.0.transformer_blocks.0.attn1.to_q": 9, "attn1.to_k": 5},
    },
    "biases": {"r": 4, "lora_alpha": 1, "lora_bias": True, "target_modules": ["to_out.0"]},
    "DoRA": {"r": 4, "lora_alpha": 1, "use_dora": True, "target_modules": ["to_q"]},
}


def small_unet() -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=8,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    return made


def small_text_encoder() -> nn.Module:
    torch.manual_seed(1)
    return CLIPTextModel(
        CLIPTextConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32)
    )


def adapted(module: Any, **config: Any) -> dict[str, Tensor]:
    """Puts a LoRA into `module`; the weights that there were before."""
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    module.add_adapter(peft.LoraConfig(init_lora_weights=False, **({"target_modules": TARGETS} | config)))
    for name, parameter in module.named_parameters():
        if "magnitude" in name:  # starts as the weight's own lengths, which would hide what it does
            parameter.data *= 1 + 0.1 * torch.rand_like(parameter)
    return before


def saved(folder: Path, unet: nn.Module, text_encoder: nn.Module | None = None) -> Path:
    """The file that diffusers makes of them, as its training scripts do."""
    modules = {"unet": unet} | ({"text_encoder": text_encoder} if text_encoder else {})
    layers = {
        f"{name}_lora_layers": convert_state_dict_to_diffusers(get_peft_model_state_dict(module))
        for name, module in modules.items()
    }
    StableDiffusionPipeline.save_lora_weights(
        str(folder), weight_name="lora.safetensors", **layers, **_collate_lora_metadata(modules)
    )
    return folder / "lora.safetensors"


def matched(path: Path, before: dict[Role, dict[str, Tensor]]) -> LoraMatch:
    prefixes = {UNET: "unet", TEXT: "text_encoder"}
    names = {
        role: {
            f"{prefixes[role]}.{key.removesuffix('.weight')}": (RowRange(key, tuple(w.shape), 0, w.shape[0], 0),)
            for key, w in weights.items()
            if key.endswith(".weight")
        }
        for role, weights in before.items()
    }
    shapes = {role: {key: tuple(w.shape) for key, w in weights.items()} for role, weights in before.items()}
    found = match_lora(path, "hash", names, shapes)
    assert found.unmatched == ()
    return found


def merged(module: nn.Module) -> dict[str, Tensor]:
    """The weights and biases that PEFT merges, by the names that they had before."""
    result = {}
    for name, child in module.named_modules():
        if isinstance(child, peft.tuners.lora.LoraLayer):
            child.merge()
            result |= {f"{name}.{own}": p.detach() for own, p in child.get_base_layer().named_parameters()}
    return result


def expect_equal(found: LoraMatch, role: Role, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    patches = PatchSet(found.patches[role])
    changed = {key for key, weight in after.items() if not torch.equal(weight, before[key])}
    assert patches.parameters == changed
    for key in changed:
        weight = before[key].clone()
        for function in patches.functions(key):
            weight = function(weight)
        assert torch.allclose(weight, after[key], atol=2e-6), key


# PEFT takes biases for matrices that were cut into shards
@pytest.mark.filterwarnings("ignore:Adapter 'default'")
@pytest.mark.parametrize("name", CONFIGS)
def test_saved_by_diffusers_it_has_the_strength_of_peft(tmp_path: Path, name: str) -> None:
    unet = small_unet()
    before = adapted(unet, **CONFIGS[name])
    path = saved(tmp_path, unet)
    assert not any(key.endswith(".alpha") for key in load_file(path))
    expect_equal(matched(path, {UNET: before}), UNET, before, merged(unet))


def test_each_component_has_its_own_strengths(tmp_path: Path) -> None:
    unet, text = small_unet(), small_text_encoder()
    before = {UNET: adapted(unet, r=8, lora_alpha=1)}
    before[TEXT] = adapted(text, r=2, lora_alpha=7, target_modules=["q_proj", "out_proj"])
    found = matched(saved(tmp_path, unet, text), before)
    for role, module in ((UNET, unet), (TEXT, text)):
        expect_equal(found, role, before[role], merged(module))


def write(folder: Path, tensors: dict[str, Tensor], fields: Any) -> Path:
    path = folder / "lora.safetensors"
    text = fields if isinstance(fields, str) else json.dumps(fields)
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, path, {METADATA_ENTRY: text})
    return path


def pair(name: str) -> dict[str, Tensor]:
    return {f"{name}.lora_B.weight": UP, f"{name}.lora_A.weight": DOWN}


def test_an_alpha_of_its_own_counts_and_other_components_are_not_touched(tmp_path: Path) -> None:
    tensors = pair("unet.a") | pair("unet.b") | {"unet.b.alpha": torch.tensor(6.0)} | pair("text_encoder_2.a")
    fields = {"unet.r": 2, "unet.lora_alpha": 3.0, "text_encoder.r": 9, "text_encoder.lora_alpha": 1, "unet.bias": "x"}
    found = {e.name: (e.alpha, e.scale) for e in read_adapters(write(tmp_path, tensors, fields)).entries}
    assert found == {"unet.a": (None, 1.5), "unet.b": (6.0, None), "text_encoder_2.a": (None, None)}


def test_a_file_of_one_component_has_no_prefix(tmp_path: Path) -> None:
    (entry,) = read_adapters(write(tmp_path, pair("block.to_q"), {"r": 2, "lora_alpha": 1})).entries
    assert entry.scale == 0.5


def test_a_lokr_of_whole_matrices_is_scaled_by_the_header_alone(tmp_path: Path) -> None:
    tensors = {"unet.a.lokr_w1": torch.ones(2, 2), "unet.a.lokr_w2": torch.ones(4, 4)}
    path = write(tmp_path, tensors, {"unet.r": 8, "unet.alpha": 2})
    names = {"unet.a": (RowRange("w", (8, 8), 0, 8, 0),)}
    found = match_lora(path, "hash", {UNET: names}, {UNET: {"w": (8, 8)}})
    (function,) = PatchSet(found.patches[UNET]).functions("w")
    assert torch.equal(function(torch.zeros(8, 8)), torch.full((8, 8), 0.25))


def test_another_rank_than_the_header_says_is_told(tmp_path: Path) -> None:
    file = read_adapters(write(tmp_path, pair("unet.a"), {"unet.r": 8, "unet.lora_alpha": 3}))
    assert file.entries == ()
    assert [str(s) for s in file.unmatched] == ["unet.a (its factors share the rank 2, the file's header says 8)"]


def test_patterns_match_from_a_dot_on(tmp_path: Path) -> None:
    fields = {"r": 2, "lora_alpha": 2, "alpha_pattern": {"to_q": 4, "^a.to_k": 6}}
    strengths = read_strengths(tmp_path, {METADATA_ENTRY: json.dumps(fields)})
    scales = {name: strengths.of(name) for name in ("to_q", "a.to_q", "into_q", "a.to_k", "b.a.to_k")}
    expected = {"to_q": 2.0, "a.to_q": 2.0, "into_q": 1.0, "a.to_k": 3.0, "b.a.to_k": 1.0}
    assert scales == {name: SavedStrength(2, scale) for name, scale in expected.items()}


@pytest.mark.parametrize("fields", [None, "{}", '{"title": "mine"}'])
def test_a_header_without_strengths_says_nothing(fields: str | None) -> None:
    metadata = {} if fields is None else {METADATA_ENTRY: fields}
    assert read_strengths(Path("x"), metadata).of("unet.a") is None


GOOD = {"unet.r": 2, "unet.lora_alpha": 2}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("{", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ([1], "expected an object"),
        ({"unet.r": 2}, r"'unet.lora_alpha' .* is 'None', expected a finite number"),
        ({"unet.lora_alpha": 2}, r"'unet.r' .* expected a whole number above 0"),
        (GOOD | {"unet.r": 0}, "'unet.r'"),
        (GOOD | {"unet.r": True}, "'unet.r'"),
        (GOOD | {"unet.lora_alpha": float("nan")}, "'unet.lora_alpha'"),
        (GOOD | {"unet.lora_alpha": "2"}, "'unet.lora_alpha'"),
        (GOOD | {"unet.use_rslora": "no"}, "'unet.use_rslora'"),
        (GOOD | {"unet.rank_pattern": ["to_q"]}, "'unet.rank_pattern'"),
        (GOOD | {"unet.rank_pattern": {"to_q": 1.5}}, "'unet.rank_pattern'"),
        (GOOD | {"unet.alpha_pattern": {"to_(q": 1}}, "expected regular expressions"),
        (GOOD | {"unet.alpha_pattern": {"(a+)+b": 1}}, "without repeated groups"),
    ],
)
def test_strengths_that_cannot_be_read_are_refused(tmp_path: Path, fields: Any, message: str) -> None:
    path = write(tmp_path, pair("unet.a"), fields)
    with pytest.raises(CorruptFile, match=message) as caught:
        read_adapters(path)
    assert str(path) in str(caught.value)
