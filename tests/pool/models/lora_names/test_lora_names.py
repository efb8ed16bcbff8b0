"""Every convention's name for a weight means that weight, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from modelpool.pool.families.parts.lora_naming import BaseNames, NameSource
from modelpool.pool.models.loading.build_checkpoint import BuiltComponent, open_checkpoint
from modelpool.pool.models.lora_names.discovered import layout_map
from modelpool.pool.models.lora_names.lora_key_map import lora_key_map, lora_targets
from modelpool.pool.models.lora_names.name_conventions import STYLES, style_of, styles_of
from modelpool.pool.models.lora_names.naming import generate_names, naming_of
from modelpool.pool.values.specs.spec import Role
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import TEXT_TARGETS, UNET_TARGETS, write_tiny_checkpoint


@pytest.fixture(scope="module")
def components(tmp_path_factory: pytest.TempPathFactory) -> dict[Role, BuiltComponent]:
    checkpoint = open_checkpoint(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny.safetensors"))
    return {role: checkpoint.build(role) for role in checkpoint.roles}


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
    "clip_l.text_model.encoder.layers.1.self_attn.q_proj",
    "clip_l.transformer.text_model.encoder.layers.1.self_attn.q_proj",
    "te1.text_model.encoder.layers.1.self_attn.q_proj",
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
        for target in (target for target in ranges if target.key in expected):
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


def test_styles_name_the_component() -> None:
    assert style_of("lora_te2_text_model_encoder_layers_0_mlp_fc1") == (Role.TEXT_ENCODER, "kohya")
    assert style_of("base_model.model.text_model.encoder") == (Role.TEXT_ENCODER, "peft")
    assert style_of("base_model.model.conv_in") == (Role.DIFFUSION_MODEL, "peft")
    assert style_of("conv_in") == (Role.DIFFUSION_MODEL, "bare keys")
    assert style_of("lora_prior_unet_down_blocks_0") == (Role.DIFFUSION_MODEL, "kohya")
    assert style_of("lora_prior_te_text_projection") == (Role.TEXT_ENCODER, "kohya")
    assert style_of("lora_transformer_x_embedder") == (Role.DIFFUSION_MODEL, "onetrainer")
    assert style_of("text_encoder_2.text_model.encoder") == (Role.TEXT_ENCODER, "diffusers")
    assert style_of("text_encoders.t5xxl.transformer.shared") == (Role.TEXT_ENCODER, "checkpoint keys")
    assert style_of("unet.base_model.model.conv_in") == (Role.DIFFUSION_MODEL, "peft")


def test_the_styles_of_a_file_are_counted() -> None:
    names = ["lora_unet_conv_in", "lora_unet_conv_out", "lora_te_text_model_encoder", "transformer.x_embedder"]
    assert list(styles_of(names).items()) == [("kohya", 3), ("diffusers", 1)]
    assert styles_of([]) == {}


def test_no_style_hides_another() -> None:
    """The longest beginning counts, so each is found by a name that is little more."""
    for beginning, role, style in STYLES:
        assert style_of(beginning + "x") == (role, style)


def test_a_fused_weight_is_cut_up_for_the_module_and_put_together_for_the_checkpoint() -> None:
    """Flux by hand: what a name means in the checkpoint goes on to the parameters of the module that is built of it."""
    hidden = 48
    key_map = layout_map("flux", layouts.flux(1, 1, hidden=hidden, prefix="model."), "model.")
    names = lora_targets(Role.DIFFUSION_MODEL, key_map, "model.", "flux")
    attention = "transformer_blocks.0.attn"
    for name in ("lora_unet_double_blocks_0_img_attn_qkv", "diffusion_model.double_blocks.0.img_attn.qkv"):
        assert [(r.key, r.source_start, r.rows, r.start) for r in names[name]] == [
            (f"{attention}.to_q.weight", 0, hidden, 0),
            (f"{attention}.to_k.weight", hidden, hidden, 0),
            (f"{attention}.to_v.weight", 2 * hidden, hidden, 0),
        ]
    whole = (key_map.parameter_range(f"{attention}.to_k.weight"),)
    assert names[f"transformer.{attention}.to_k"] == names[f"lycoris_{attention.replace('.', '_')}_to_k"] == whole
    # in diffusers' order, or with halves that change places in the checkpoint's
    assert names["transformer.norm_out.linear"] == (key_map.parameter_range("norm_out.linear.weight"),)
    assert [(r.key, r.source_start, r.start) for r in names["lora_unet_final_layer_adaLN_modulation_1"]] == [
        ("norm_out.linear.weight", 0, hidden),
        ("norm_out.linear.weight", hidden, 0),
    ]
    part = names["diffusion_model.single_blocks.0.linear1_qkv"]
    assert [r.key.rpartition("to_")[2] for r in part] == ["q.weight", "k.weight", "v.weight"]
    assert {r.source_shape for r in part} == {(3 * hidden, hidden)}


def test_biases_have_the_names_of_their_keys(components: dict[Role, BuiltComponent]) -> None:
    names = lora_key_map(components[Role.DIFFUSION_MODEL])
    assert names["diffusion_model.input_blocks.0.0.bias"][0].key == "conv_in.bias"


def test_asking_for_a_style_imports_no_torch() -> None:
    """`modelpool inspect` tells what a LoRA is in a moment."""
    code = "import sys, modelpool.pool.models.lora_names.name_conventions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_stages_of_cascade_have_names_of_their_own() -> None:
    """A LoRA for the prior must not reach the decoder: its weights have the same names."""
    base: BaseNames = {source: {"down_blocks.0": ()} for source in NameSource}
    names = {
        stage: {name for name, _ in generate_names(naming_of(stage), base)} for stage in ("cascade_c", "cascade_b")
    }
    assert {"prior.down_blocks.0", "lora_prior_unet_down_blocks_0"} <= names["cascade_c"]
    assert "decoder.down_blocks.0" in names["cascade_b"]
    assert not any("prior" in name for name in names["cascade_b"])
    assert not any("decoder" in name for name in names["cascade_c"])
