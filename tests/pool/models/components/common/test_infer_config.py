"""Configurations inferred from shapes equal the published models', and tiny ones follow the same rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from modelpool.pool.families.definitions.stable_diffusion_1 import SD1
from modelpool.pool.models.components.common.infer_config import check, clip_text_config, latent_facts, unet_config
from modelpool.pool.models.components.common.vae_configs import kl_config
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.specs.spec import Role
from tests.pool.models.loading import layouts
from tests.pool.models.loading.layouts import Layout


def bare(role: Role, layout: Layout) -> Layout:
    return SD1.bare_shapes_of(role, layout)


def test_the_unet_of_sd15() -> None:
    """Source: the unet/config.json published with Stable Diffusion 1.5."""
    assert unet_config(bare(Role.DIFFUSION_MODEL, layouts.sd15())) == {
        "in_channels": 4,
        "out_channels": 4,
        "block_out_channels": (320, 640, 1280, 1280),
        "layers_per_block": 2,
        "cross_attention_dim": 768,
        "attention_head_dim": 8,
        "use_linear_projection": False,
        "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        "transformer_layers_per_block": (1, 1, 1, 1),
        "norm_num_groups": 32,
    }


def test_the_vae_of_sd15() -> None:
    """Source: the vae/config.json published with Stable Diffusion 1.5."""
    assert kl_config(bare(Role.VAE, layouts.sd15())) == {
        "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
        "latent_channels": 4,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "use_quant_conv": True,
        "use_post_quant_conv": True,
        "mid_block_add_attention": True,
        "norm_num_groups": 32,
    }


def test_the_text_encoder_of_sd15() -> None:
    """Source: the text_encoder/config.json published with Stable Diffusion 1.5."""
    assert clip_text_config(bare(Role.TEXT_ENCODER, layouts.sd15())) == {
        "vocab_size": 49408,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 77,
        "hidden_act": "quick_gelu",
        "eos_token_id": 49407,
    }


def test_a_tiny_model_has_fewer_norm_groups_and_one_text_head() -> None:
    tiny = layouts.tiny_sd1()
    assert unet_config(bare(Role.DIFFUSION_MODEL, tiny))["norm_num_groups"] == 12
    assert kl_config(bare(Role.VAE, tiny))["norm_num_groups"] == 8
    assert clip_text_config(bare(Role.TEXT_ENCODER, tiny))["num_attention_heads"] == 1


def test_latents_are_an_eighth_of_the_image_and_a_shorter_vae_shrinks_less() -> None:
    assert latent_facts(SD1, layouts.sd15()) == LatentFacts(4, 8, 0.18215)
    assert latent_facts(SD1, layouts.ldm_vae(layouts.LdmVae(multipliers=(1, 2, 4)))).downscale == 4


def test_whole_checkpoints_fit_themselves() -> None:
    check(SD1, layouts.sd15())
    check(SD1, layouts.tiny_sd1())


UNET = "model.diffusion_model."
TEXT = "cond_stage_model.transformer.text_model."

MISFITS: dict[str, tuple[Callable[[Layout], object], str]] = {
    "no middle": (
        lambda x: [x.pop(k) for k in list(x) if k.startswith(UNET + "middle_block.1")],
        "without 1, expected all from 0 on",
    ),
    "flat convolution": (
        lambda x: x.update({UNET + "input_blocks.0.0.weight": (48,)}),
        r"found shape \(48,\), expected 4 dimensions",
    ),
    "widths without heads": (
        lambda x: x.update(layouts.ldm_unet(layouts.LdmUnet(44, (1, 2), 1, (1, 1), 1, 32))),
        r"found widths \(44, 88\), expected multiples of 8",
    ),
    "text of another width": (
        lambda x: x.update(layouts.hf_clip(layouts.ClipText(hidden=64, layers=2, mlp=128))),
        "the text encoder is 64 wide, expected 32 for the UNet",
    ),
    "VAE of other channels": (
        lambda x: x.update(layouts.ldm_vae(layouts.LdmVae(32, (1, 1, 2, 2), 1, latent_channels=16))),
        "expected the 16 of the VAE",
    ),
    "short vocabulary": (
        lambda x: x.update({TEXT + "embeddings.token_embedding.weight": (1000, 32)}),
        "found 1000 tokens and 77 positions, expected 49408 and 77",
    ),
    "short positions": (
        lambda x: x.update({TEXT + "embeddings.position_embedding.weight": (16, 32)}),
        "found 49408 tokens and 16 positions",
    ),
    "odd text width": (
        lambda x: x.update(layouts.hf_clip(layouts.ClipText(hidden=100, layers=2, mlp=128))),
        "found width 100, expected a multiple of 64",
    ),
    "no decoder": (
        lambda x: [x.pop(k) for k in list(x) if ".decoder.up." in k],
        "VAE: found 0 decoder.up blocks, expected 4",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_said(misfit: str) -> None:
    layout = layouts.tiny_sd1()
    change, message = MISFITS[misfit]
    change(layout)
    with pytest.raises(UnknownArchitecture, match=message):
        check(SD1, layout)


UNEVEN = {
    "attention behind one block": ("input_blocks.2.1.", r"\[320, 320\] channels and \[1, 0\] transformer blocks"),
    "a block less on the way up": (
        "output_blocks.11.",
        r"\[2, 2, 2, 2\] blocks in the down path and \[3, 3, 3, 2\] in",
    ),
    "no way up": ("output_blocks.", "found a level without residual blocks"),
}


@pytest.mark.parametrize("uneven", UNEVEN)
def test_levels_that_no_module_has_are_refused(uneven: str) -> None:
    left_out, message = UNEVEN[uneven]
    layout = bare(Role.DIFFUSION_MODEL, layouts.sd15())
    with pytest.raises(UnknownArchitecture, match=message):
        unet_config({k: v for k, v in layout.items() if not k.startswith(left_out)})


def test_a_middle_of_another_depth_than_the_last_level_is_refused() -> None:
    layout = layouts.ldm_unet(replace(layouts.TINY_SDXL_UNET, middle_depth=3), prefix="")
    with pytest.raises(UnknownArchitecture, match="found 3 transformer blocks in the middle, expected 2"):
        unet_config(layout)


@pytest.mark.parametrize("number", ["7", "999999999", "9" * 5000])
def test_a_key_alone_cannot_ask_for_layers(number: str) -> None:
    """Found in review: such a number was taken for how many layers there are, or was more digits than Python reads."""
    for key in (
        f"{TEXT}encoder.layers.{number}.mlp.fc1.weight",
        f"{UNET}input_blocks.{number}.0.in_layers.0.weight",
        f"{UNET}middle_block.1.transformer_blocks.{number}.norm1.weight",
        f"first_stage_model.decoder.up.{number}.block.0.norm1.weight",
    ):
        with pytest.raises(UnknownArchitecture, match="expected all from 0 on"):
            check(SD1, {**layouts.tiny_sd1(), key: (1,)})
