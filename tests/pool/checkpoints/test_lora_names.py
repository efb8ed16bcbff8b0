"""Every convention's name for a weight means that weight, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pool.checkpoints.adapter_keys import PARTS, looks_like_lora, split_key
from pool.checkpoints.build import BuiltComponent, open_checkpoint
from pool.checkpoints.lora_names import lora_key_map, style_of
from pool.spec import Role
from tests.pool.checkpoints import layouts
from tests.pool.checkpoints.tiny_checkpoint import TEXT_TARGETS, UNET_TARGETS, write_tiny_checkpoint


@pytest.fixture(scope="module")
def components(tmp_path_factory: pytest.TempPathFactory) -> dict[Role, BuiltComponent]:
    checkpoint = open_checkpoint(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny.safetensors"))
    return {role: checkpoint.build(role) for role in Role}


UNET_KEY = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_out.0.weight"
UNET_NAMES = (
    "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_out_0",
    "lora_unet_input_blocks_1_1_transformer_blocks_0_attn1_to_out_0",
    "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_out.0",
    "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_out.0",
    "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.processor.to_out",
    "base_model.model.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_out.0",
    "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_out.0",
)
TEXT_KEY = "encoder.layers.1.self_attn.q_proj.weight"
TEXT_NAMES = (
    "lora_te_text_model_encoder_layers_1_self_attn_q_proj",
    "lora_te1_text_model_encoder_layers_1_self_attn_q_proj",
    "text_encoder.text_model.encoder.layers.1.self_attn.q_proj",
    "text_encoder.encoder.layers.1.self_attn.q_proj",
    "base_model.model.text_model.encoder.layers.1.self_attn.q_proj",
)


@pytest.mark.parametrize(
    ("role", "name", "key"),
    [(Role.DIFFUSION_MODEL, name, UNET_KEY) for name in UNET_NAMES]
    + [(Role.TEXT_ENCODER, name, TEXT_KEY) for name in TEXT_NAMES],
)
def test_conventions_agree(components: dict[Role, BuiltComponent], role: Role, name: str, key: str) -> None:
    (target,) = lora_key_map(components[role])[name]
    assert (target.key, target.source_start, target.start) == (key, 0, 0)
    assert target.rows == components[role].module.get_parameter(key).shape[0]


def test_every_weight_has_a_kohya_name_in_both_spellings(components: dict[Role, BuiltComponent]) -> None:
    built = components[Role.DIFFUSION_MODEL]
    names = lora_key_map(built)
    for key, parameter in built.module.named_parameters():
        if key.endswith(".weight"):
            joined = key.removesuffix(".weight").replace(".", "_")
            (target,) = names[f"lora_unet_{joined}"]
            assert (target.key, target.source_shape) == (key, tuple(parameter.shape))
    for key, shape in built.key_map.sources.items():
        if key.endswith(".weight"):
            joined = key.removeprefix("model.diffusion_model.").removesuffix(".weight").replace(".", "_")
            assert names[f"lora_unet_{joined}"][0].source_shape == shape


def test_no_name_has_two_meanings(components: dict[Role, BuiltComponent]) -> None:
    """Both spellings of a weight end at the same parameter, so each parameter has as many names as any other."""
    built = components[Role.DIFFUSION_MODEL]
    names = lora_key_map(built)
    expected = {key for key in built.key_map.shapes if key.endswith(".weight")}
    by_target: dict[str, set[str]] = {key: set() for key in expected}
    for name, ranges in names.items():
        for target in ranges:
            by_target[target.key].add(name)
    for key, own in by_target.items():
        joined = {name for name in own if name.startswith("lora_unet_")}
        assert 1 <= len(joined) <= 2, key


def test_the_tiny_lora_of_the_tests_fits(components: dict[Role, BuiltComponent]) -> None:
    for role, prefix, targets in (
        (Role.DIFFUSION_MODEL, "lora_unet_", UNET_TARGETS),
        (Role.TEXT_ENCODER, "lora_te_", TEXT_TARGETS),
    ):
        names = lora_key_map(components[role])
        for name, shape in targets.items():
            assert names[prefix + name.replace(".", "_")][0].source_shape == shape


def test_a_delta_in_the_files_form_reaches_the_module(components: dict[Role, BuiltComponent]) -> None:
    """The autoencoder keeps attention as convolutions in the file and as linear layers in the module."""
    key_map = components[Role.VAE].key_map
    (target,) = key_map.targets("first_stage_model.decoder.mid.attn_1.q.weight")
    delta = torch.randn(64, 64, 1, 1)
    assert target.source_shape == (64, 64, 1, 1)
    assert torch.equal(target.place(delta), delta[:, :, 0, 0])


def test_the_vae_takes_no_lora(components: dict[Role, BuiltComponent]) -> None:
    assert lora_key_map(components[Role.VAE]) == {}


def test_the_old_spelling_of_the_text_encoder_takes_the_same_names(tmp_path: Path) -> None:
    layout = {k.replace("transformer.text_model.", "transformer."): s for k, s in layouts.tiny_sd1().items()}
    path = write_tiny_checkpoint(tmp_path / "old.safetensors", layout=layout)
    names = lora_key_map(open_checkpoint(path).build(Role.TEXT_ENCODER))
    assert [names[name][0].key for name in TEXT_NAMES] == [TEXT_KEY] * len(TEXT_NAMES)


SPLITS = {
    "lora_unet_conv_in.lora_up.weight": ("lora_unet_conv_in", "up"),
    "lora_unet_conv_in.lora_down.weight": ("lora_unet_conv_in", "down"),
    "lora_unet_conv_in.alpha": ("lora_unet_conv_in", "alpha"),
    "unet.conv_in.lora_A.weight": ("unet.conv_in", "down"),
    "unet.conv_in.lora_B.default.weight": ("unet.conv_in", "up"),
    "unet.mid_block.attn1.processor.to_q_lora.up.weight": ("unet.mid_block.attn1.processor.to_q", "up"),
    "text_encoder.layers.0.fc1.lora_linear_layer.down.weight": ("text_encoder.layers.0.fc1", "down"),
    "lora_unet_conv_in.lokr_w1_a": ("lora_unet_conv_in", "lokr_w1_a"),
    "lora_unet_conv_in.diff_b": ("lora_unet_conv_in", "diff_b"),
    "model.diffusion_model.input_blocks.0.0.weight": None,
    ".alpha": None,
}


@pytest.mark.parametrize("key", SPLITS)
def test_keys_split_into_base_and_part(key: str) -> None:
    assert split_key(key) == SPLITS[key]


def test_every_part_is_found_by_its_whole_ending() -> None:
    for ending, part in PARTS:
        assert split_key(f"some.weight{ending}") == ("some.weight", part)


def test_an_alpha_alone_makes_no_lora() -> None:
    """Other files have tensors called alpha, such as audio autoencoders."""
    assert not looks_like_lora(["decoder.layers.1.alpha", "decoder.layers.1.beta"])
    assert looks_like_lora(["decoder.layers.1.alpha", "lora_unet_conv_in.lora_up.weight"])


def test_styles_name_the_component() -> None:
    assert style_of("lora_te2_text_model_encoder_layers_0_mlp_fc1") == (Role.TEXT_ENCODER, "kohya")
    assert style_of("base_model.model.text_model.encoder") == (Role.TEXT_ENCODER, "peft")
    assert style_of("base_model.model.conv_in") == (Role.DIFFUSION_MODEL, "peft")
    assert style_of("conv_in") == (Role.DIFFUSION_MODEL, "bare keys")
