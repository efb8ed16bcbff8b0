"""Every published VAE is recognised from keys and shapes, with the figures that another implementation has for it.

Where ours differ, `DIFFERENCES` says so, case by case, with the reason.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modelpool.pool.families.detection.vaes import SIGNATURES, VaeFacts, recognise_vae
from modelpool.pool.families.parts.latent_formats import LATENT_FORMATS
from modelpool.pool.files.formats.safetensors_file import Shape
from tests.each_case import each_case

GOLDEN = Path(__file__).resolve().parents[3] / "golden"
KEYS: dict[str, dict[str, tuple[list[int], str]]] = json.loads(
    gzip.decompress((GOLDEN / "vae_keys.json.gz").read_bytes())
)
FOUND: dict[str, Any] = json.loads((GOLDEN / "vae_detection.json").read_text())["vae"]
FORMATS: dict[str, Any] = json.loads((GOLDEN / "misc.json").read_text())["latent_formats"]

#: what we call each of the golden entries
NAMES = {
    "sd1_kl": "kl", "sdxl_kl": "kl", "flux_sd3_kl16_no_quant_conv": "kl", "sd_x4_upscaler": "kl", "taesd": "taesd",
    "cascade_stage_a": "cascade_a", "audio_oobleck": "oobleck", "mochi": "mochi", "ltxv_v0": "ltx_v0",
    "ltxv_v1": "ltx_v1", "hunyuan_video": "hunyuan_video", "hunyuan_image_2.1": "hunyuan_image",
    # its plain convolutions and group norms are HunyuanImage 3's; HunyuanVideo 1.5 was published with causal ones
    "hunyuan_video_1.5": "hunyuan_image_3", "cosmos": "cosmos", "wan21": "wan21", "hunyuan3d": "hunyuan3d",
    "pixel_space": "pixel_space", "taehv_hunyuan": "taehv", "taew2_2": "taehv_wan22",
}  # fmt: skip
#: (golden entry, field) -> why ours is another
DIFFERENCES = {
    ("hunyuan3d", "latent_channels"): "upstream leaves its default of 4; the file's post_kl layer reads 64 channels",
    ("taew2_2", "mem_encode"): "upstream leaves its default for images, which takes frames for rows of pixels; ours "
    "is the formula of the other tiny video autoencoders, which have the same encoder",
}
#: the golden names of the latent formats
FORMAT_NAMES = {
    "SD15": "sd1", "SDXL": "sdxl", "SDXL_Playground_2_5": "playground_25", "SD_X4": "sd_x4", "SD3": "sd3",
    "Flux": "flux", "Flux2": "flux2", "SC_B": "cascade_b", "SC_Prior": "cascade_c", "StableAudio1": "stable_audio",
    "Mochi": "mochi", "LTXV": "ltxv", "HunyuanVideo": "hunyuan_video", "HunyuanVideo15": "hunyuan_video_15",
    "HunyuanImage21": "hunyuan_image", "Cosmos1CV8x8x8": "cosmos", "Wan21": "wan21", "Wan22": "wan22",
    "Hunyuan3Dv2": "hunyuan3d_2", "Hunyuan3Dv2_1": "hunyuan3d_21", "Hunyuan3Dv2mini": "hunyuan3d_2_mini",
    "ACEAudio": "ace_step", "ChromaRadiance": "pixels",
}  # fmt: skip


def shapes_of(entry: str) -> dict[str, Shape]:
    return {key: tuple(shape) for key, (shape, _) in KEYS[entry].items()}


def recognised(entry: str) -> VaeFacts:
    facts = recognise_vae(shapes_of(entry))
    assert facts is not None
    return facts


def cells_of(facts: VaeFacts, frames: int) -> int:
    return (frames + facts.temporal_ratio - 1) // facts.temporal_ratio


def told(facts: VaeFacts) -> dict[str, Any]:
    """The facts in the golden file's words."""
    sides = facts.dimensions
    down: Any = facts.encode_ratio
    up: Any = facts.decode_ratio
    if facts.temporal_ratio > 1:
        down = [cells_of(facts, 17), *[facts.encode_ratio] * 2]
        up = [facts.decoded_frames(5), *[facts.decode_ratio] * 2]
    return {
        "latent_channels": facts.latent_channels, "latent_dim": sides, "output_channels": facts.pixel_channels,
        "downscale": down, "upscale_at_5": up,
        "not_video": facts.frames_are_batch,
        "extra_1d_channel": facts.extra_channels or None, "crop_input": facts.crops_input,
    }  # fmt: skip


@pytest.mark.parametrize("entry", list(KEYS))
def test_every_listed_vae_is_what_it_is(entry: str) -> None:
    facts, golden = recognised(entry), FOUND[entry]
    assert facts.name == NAMES[entry]
    assert (facts.has_encoder, facts.has_decoder) == (True, True)
    for field, value in told(facts).items():
        if (entry, field) in DIFFERENCES:
            assert value != golden[field], f"{field}: no difference any more"
        else:
            assert value == golden[field], field


def test_every_difference_is_of_a_listed_entry_that_was_tried() -> None:
    assert set(NAMES) == set(KEYS) == set(FOUND) - {"none"}
    assert {entry for entry, _ in DIFFERENCES} <= set(KEYS)


@each_case("golden_name", list(FORMAT_NAMES))
def test_latents_are_scaled_and_shifted_as_published(golden_name: str) -> None:
    """Exactly, in both directions, on the golden input."""
    tensors = load_file(GOLDEN / "misc.safetensors")
    shape, latents = FORMATS[golden_name]["shape"], LATENT_FORMATS[FORMAT_NAMES[golden_name]]
    assert (latents.channels, latents.dimensions) == (shape[1], len(shape) - 2)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    mean, std = (torch.tensor(v).view(1, -1, *[1] * latents.dimensions) for v in (latents.mean, latents.std))
    assert torch.equal((x - mean) * latents.scale / std, tensors[f"latent.{golden_name}.in"])
    assert torch.equal(x * std / latents.scale + mean, tensors[f"latent.{golden_name}.out"])


def test_a_recognised_vae_has_formats_of_its_own_shape() -> None:
    for entry in KEYS:
        facts = recognised(entry)
        assert facts.latent_formats or facts.name == "hunyuan_image_3", entry
        for name in facts.latent_formats:
            assert LATENT_FORMATS[name].channels == facts.latent_channels
            # a tiny video autoencoder and its big one share latents; so do images that a video model makes
            assert LATENT_FORMATS[name].dimensions == facts.dimensions


@pytest.mark.parametrize("entry", ["sd1_kl", "flux_sd3_kl16_no_quant_conv", "sd_x4_upscaler", "hunyuan_image_2.1"])
def test_half_a_vae_is_the_same_kind(entry: str) -> None:
    whole = recognised(entry)
    shapes = shapes_of(entry)
    for half, other in (("decoder.", "encoder."), ("encoder.", "decoder.")):
        facts = recognise_vae({key: shape for key, shape in shapes.items() if not key.startswith(other)})
        assert facts is not None
        assert (facts.name, facts.latent_channels, facts.decode_ratio) == (
            whole.name, whole.latent_channels, whole.decode_ratio,
        )  # fmt: skip
        assert (facts.has_encoder, facts.has_decoder) == (half == "encoder.", half == "decoder.")


def variant(entry: str, **more: Shape) -> VaeFacts:
    """A VAE that no golden list has, made of the keys of one that has and those that set it apart."""
    facts = recognise_vae(shapes_of(entry) | {key.replace("__", "."): shape for key, shape in more.items()})
    assert facts is not None
    return facts


def test_flux_2_keeps_its_pixels_folded_once_more() -> None:
    facts = variant("flux_sd3_kl16_no_quant_conv", bn__running_mean=(128,), decoder__conv_in__weight=(512, 32, 3, 3))
    assert (facts.name, facts.latent_channels, facts.encode_ratio) == ("flux2", 128, 16)


def test_variants_that_no_list_has_are_told_from_their_relatives() -> None:
    assert variant("sd1_kl", decoder__mid__block_1__mix_factor=(1,)).name == "kl_temporal"
    assert variant("ltxv_v1", encoder__down_blocks__1__conv__conv__bias=(128,)).name == "ltx_v2"
    assert variant("ltxv_v0", encoder__down_blocks__1__conv__conv__bias=(128,)).name == "ltx2"
    folded = variant(
        "hunyuan_video",
        decoder__conv_in__conv__weight=(1024, 32, 3, 3, 3),
        decoder__up__0__upsample__conv__conv__weight=(8192, 1024, 3, 3, 3),
    )
    assert folded.name == "hunyuan_video_15"
    nested = variant("wan21", decoder__upsamples__0__upsamples__0__residual__2__weight=(1024, 1024, 3, 3, 3))
    assert (nested.name, nested.latent_channels, nested.decode_ratio) == ("wan22", 48, 16)
    wide = variant("taehv_hunyuan", decoder__1__weight=(256, 32, 3, 3))
    assert (wide.name, wide.latent_formats) == ("taehv_hunyuan_15", ("hunyuan_video_15",))


def test_the_type_of_its_weights_tells_whose_tiny_video_autoencoder_it_is() -> None:
    shapes = shapes_of("taehv_hunyuan")
    for dtype, formats in (("F16", ("hunyuan_video",)), ("F32", ("wan21",))):
        facts = recognise_vae(shapes, {"decoder.22.bias": dtype})
        assert facts is not None
        assert facts.latent_formats == formats


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("backbone.1.0.block.0.1.num_batches_tracked", "cascade_c_encoder"),
        ("blocks.11.num_batches_tracked", "cascade_c_previewer"),
        ("encoder.backbone.1.0.block.0.1.num_batches_tracked", "cascade_c"),
        ("vocoder.backbone.channel_layers.0.0.bias", "ace_step"),
        ("vocoder.activation_post.downsample.lowpass.filter", "mmaudio"),
        ("decoder.up_blocks.2.upsamplers.0.upscale_conv.weight", "seedvr2"),
        ("student.dconv_encoder.proj_out.weight", "mage"),
        ("decoder.mid_block.resnets.0.norm1.norm_layer.weight", "cogvideox"),
        ("decoder.mid.block_1.norm1.norm_layer.weight", "cogvideox"),
        ("encoder.temp_conv_in.weight", "allegro"),
        ("vocoder.resblocks.0.convs1.0.weight", "ltx_audio"),
        ("decoder.layers.3.transformers.0.pre_norm.alpha", "stable_audio_3"),
        ("gs.base_offset_scale", "triposplat"),
    ],
)
def test_kinds_without_a_list_of_keys_are_known_by_one(key: str, name: str) -> None:
    facts = recognise_vae({key: (1,), "something.else": (3, 3)})
    assert facts is not None
    assert facts.name == name


def test_the_naming_of_diffusers_is_recognised() -> None:
    shapes = {f"decoder.up_blocks.{i}.resnets.0.norm1.weight": (8,) for i in range(4)}
    facts = recognise_vae({**shapes, "decoder.conv_in.weight": (8, 16, 3, 3), "encoder.conv_in.weight": (8, 3, 3, 3)})
    assert facts is not None
    assert (facts.name, facts.layout, facts.latent_channels, facts.decode_ratio) == ("kl", "diffusers", 16, 8)


def test_other_files_are_no_vae() -> None:
    detection = json.loads(gzip.decompress((GOLDEN / "detection_keys.json.gz").read_bytes()))
    for name, shapes in detection.items():
        bare = {key.removeprefix("model.diffusion_model."): tuple(shape) for key, shape in shapes.items()}
        assert recognise_vae(bare) is None, name
    assert recognise_vae({}) is None


def test_nothing_in_the_table_breaks_on_shapes_without_dimensions() -> None:
    """Headers come from outside: a key with an unexpected shape is a file we do not know, or one with odd sizes."""
    for signature in SIGNATURES:
        for key in signature.keys:
            for shape in ((), (0,), (1, 1), (7, 7, 7, 7, 7)):
                recognise_vae({key: shape})


def test_frames_and_cells_are_each_others_inverse() -> None:
    for entry in KEYS:
        facts = recognised(entry)
        for cells in range(1, 20):
            assert cells_of(facts, facts.decoded_frames(cells)) == cells
