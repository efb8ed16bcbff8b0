"""Latents go to pixels and back as each VAE wants it: scaled as its family's models are, as diffusers' pipelines do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from modelpool.pool.families.detection.vaes import HUNYUAN_IMAGE_REFINER
from modelpool.pool.families.parts.latent_format import LatentFormat
from modelpool.pool.families.parts.latent_formats import LATENT_FORMATS
from modelpool.pool.models.components.vae.build_vae import plan_vae
from modelpool.pool.models.components.vae.codec import LTX_DECODE_TIMESTEP, VaeCodec
from tests.pool.models.components.vae.cases import CASES, Case, decode, encode

CASE = pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))


def format_for(case: Case, channels: int) -> LatentFormat:
    """The published format, or for latents of fewer channels one with its numbers cut to them."""
    facts = plan_vae({key: tuple(x.shape) for key, x in case.file(case.module()).items()}).facts
    found = LATENT_FORMATS[facts.latent_formats[0]] if facts.latent_formats else LatentFormat(channels, scale=0.5)
    mean = found.mean[:channels] if len(found.mean) > 1 else found.mean
    std = found.std[:channels] if len(found.std) > 1 else found.std
    return LatentFormat(channels, found.dimensions, found.scale, mean, std)


def codec_for(case: Case) -> tuple[VaeCodec, Any]:
    """A codec over a built VAE, and diffusers' module with the same weights."""
    theirs = case.module()
    file = case.file(theirs)
    plan = plan_vae({key: tuple(x.shape) for key, x in file.items()})
    channels = case.latent[1] * (4 if case.name == "flux2" else 1)
    return VaeCodec(plan.build(file), plan.facts, format_for(case, channels)), theirs


def model_latents(case: Case) -> Tensor:
    """Latents as a diffusion model has them."""
    shape = case.latent
    if case.name == "flux2":
        shape = (shape[0], shape[1] * 4, shape[2] // 2, shape[3] // 2)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def per_channel(values: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(values).view(1, -1, *[1] * (like.dim() - 2))


def as_pipelines_do(case: Case, theirs: Any, latents: Tensor, latent: LatentFormat) -> Tensor:
    """What diffusers' pipelines give their VAE: from each pipeline's own lines before `vae.decode`."""
    match case.name:
        case "taesd":
            return latents
        case "flux2":
            mean = theirs.bn.running_mean.view(1, -1, 1, 1)
            std = torch.sqrt(theirs.bn.running_var.view(1, -1, 1, 1) + theirs.config.batch_norm_eps)
            x = latents * std + mean
            b, c, h, w = x.shape
            return x.reshape(b, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, c // 4, h * 2, w * 2)
        case "cosmos":
            channels = theirs.config.latent_channels
            mean, std = (torch.tensor(v).view(1, channels, -1, 1, 1)[:, :, : latents.shape[2]]
                         for v in (theirs.config.latents_mean, theirs.config.latents_std))  # fmt: skip
            return latents * std / 0.5 + mean
        case "ltx_v0" | "ltx_v1" | "ltx_v2" | "ltx2":
            return latents * per_channel(theirs.latents_std, latents) + per_channel(theirs.latents_mean, latents)
    return latents * per_channel(latent.std, latents) / latent.scale + per_channel(latent.mean, latents)


@CASE
def test_decoding_is_what_the_pipeline_does(case: Case) -> None:
    codec, theirs = codec_for(case)
    if case.name == "cosmos":  # four channels have other lengths of time than the published sixteen
        assert len(theirs.config.latents_mean) % theirs.config.latent_channels == 0
    latents = model_latents(case)
    given = as_pipelines_do(case, theirs, latents, codec.latent)
    expected = decode(case, theirs, given)
    if case.name == "cascade_a":  # its pixels are 0 to 1
        expected = expected * 2 - 1
    if case.name == "ltx_v1":  # noise inside of its decoder
        torch.manual_seed(0)
        expected = theirs.decode(given, torch.full((1,), LTX_DECODE_TIMESTEP)).sample
    torch.testing.assert_close(codec.decode(latents), expected, rtol=1e-5, atol=1e-5)


@CASE
def test_encoding_undoes_what_decoding_does_to_latents(case: Case) -> None:
    """`to_vae` after `from_vae` is nothing: and latents are diffusers', in the model's scale."""
    codec, theirs = codec_for(case)
    latents = model_latents(case)
    torch.testing.assert_close(codec.from_vae(codec.to_vae(latents)), latents, rtol=1e-4, atol=1e-5)
    pixels = torch.rand(case.pixels, generator=torch.Generator().manual_seed(4)) * 2 - 1
    given = (pixels + 1) / 2 if case.name == "cascade_a" else pixels
    torch.testing.assert_close(codec.to_vae(codec.encode(pixels)), encode(theirs, given), rtol=1e-4, atol=1e-5)


def test_noise_for_the_decoder_is_the_generators_and_nobody_elses() -> None:
    codec, _ = codec_for(CASES["ltx_v1"])
    latents = model_latents(CASES["ltx_v1"])
    state = torch.get_rng_state()
    first = codec.decode(latents, torch.Generator().manual_seed(7))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(123)
    assert torch.equal(codec.decode(latents, torch.Generator().manual_seed(7)), first)
    assert not torch.equal(codec.decode(latents, torch.Generator().manual_seed(8)), first)
    assert torch.equal(codec.decode(latents), codec.decode(latents))


def test_a_draw_of_the_encoder_is_the_generators() -> None:
    codec, _ = codec_for(CASES["kl"])
    pixels = torch.zeros(1, 3, 16, 16)
    drawn = [codec.encode(pixels, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(codec.encode(pixels), codec.encode(pixels))


def test_sides_are_cut_at_the_middle() -> None:
    codec, theirs = codec_for(CASES["kl"])
    pixels = torch.randn(1, 3, 17, 20, generator=torch.Generator().manual_seed(1))
    ratio = int(codec.facts.encode_ratio)
    assert ratio == 2
    torch.testing.assert_close(
        codec.to_vae(codec.encode(pixels)), encode(theirs, pixels[..., :16, :]), rtol=1e-4, atol=1e-5
    )
    wide = torch.randn(1, 3, 16, 21, generator=torch.Generator().manual_seed(1))
    assert codec._as_its_own(wide).shape == (1, 3, 16, 20)


def test_images_given_to_a_video_vae_are_its_frames() -> None:
    codec, _ = codec_for(CASES["wan21"])
    frames = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    latents = codec.encode(frames)
    assert latents.shape == (1, 4, 2, 2, 2)
    assert torch.equal(latents, codec.encode(frames.transpose(0, 1).unsqueeze(0)))


def test_latents_longer_than_the_known_statistics_of_cosmos_take_the_last() -> None:
    codec, theirs = codec_for(CASES["cosmos"])
    channels = theirs.config.latent_channels
    known = len(theirs.config.latents_mean) // channels
    long = torch.zeros(1, channels, known + 2, 1, 1)
    given = codec.to_vae(long)
    assert torch.equal(given[:, :, known - 1], given[:, :, known + 1])
    assert not torch.equal(given[:, :, 0], given[:, :, known + 1])


def test_each_cell_of_the_refiner_is_two_of_its_vae() -> None:
    codec = VaeCodec(None, HUNYUAN_IMAGE_REFINER, LATENT_FORMATS["hunyuan_image_refiner"])
    latents = torch.randn(1, 64, 1, 2, 3, generator=torch.Generator().manual_seed(1))
    given = codec.to_vae(latents)
    assert given.shape == (1, 32, 1, 2, 3)
    assert torch.equal(given[:, :, 0], latents[:, 32:, 0] / codec.latent.scale)
    again = codec.from_vae(given)
    assert again.shape == latents.shape
    torch.testing.assert_close(again[:, 32:], latents[:, 32:])
