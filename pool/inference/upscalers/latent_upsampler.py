"""Upscalers of the latents of LTX-Video and LTX-2, which double or quadruple the sides of a video: how the network of a
file is built, and how it is run.

The network reads latents in the scale of the VAE, and whole: its norms are over all cells, so that tiles would change
the result. Source: diffusers' LTXLatentUpsamplePipeline and LTX2LatentUpsamplePipeline, without their filters.

Shape legend: B batch, C channels, T H W cells of a latent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from torch import nn

from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.inference.pixels.latent_pixels import codec_of
from modelpool.pool.values.core.errors import CorruptFile, UnknownArchitecture
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.stage_params import Latent, RunHooks, UpscaleParams
from modelpool.pool.values.core.stopping import stop_check
from modelpool.pool.values.core.task_inputs import LATENT, TaskInputs
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher

#: keys of such a network, and the kernel that scales down again after it has scaled up; a whole factor reads none
FIRST, KERNEL = "initial_conv.weight", "upsampler.blur_down.kernel"
_BLOCK = re.compile(r"(res_blocks|post_upsample_res_blocks)\.(\d+)\.conv1\.weight")
#: groups of its norms
_GROUPS = 32


class LatentUpsampler(LTX2LatentUpsamplerModel):  # type: ignore[misc]
    """The network of diffusers, for whole factors."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        if sizes["use_rational_resampler"]:
            self.upsampler.blur_down = nn.Identity()


def upsampler_sizes(shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], int]:
    """Return the arguments of the network with tensors of these shapes, and its factor. Raises UnknownArchitecture for
    one that changes the number of frames, or that has a factor with a fraction."""
    mid, channels, *kernel = shapes[FIRST]
    counts = dict.fromkeys(("res_blocks", "post_upsample_res_blocks"), 0)
    for key in shapes:
        if found := _BLOCK.fullmatch(key):
            counts[found[1]] = max(counts[found[1]], 1 + int(found[2]))
    rational = "upsampler.conv.weight" in shapes
    last = tuple(shapes.get("upsampler.conv.weight" if rational else "upsampler.0.weight", ()))
    factor = math.isqrt(last[0] // mid) if len(last) == 4 and mid else 0
    if len(last) == 5:
        raise UnknownArchitecture("an upscaler of latents that makes frames, expected one that enlarges frames alone")
    if factor not in ((2, 4) if rational else (2,)) or last[0] != factor**2 * mid:
        found_sizes = f"{last[0]} of {mid} channels" if last else "none"
        raise UnknownArchitecture(
            f"an upscaler of latents: found {found_sizes} to enlarge with, expected a factor of 2, or of 4 with "
            "upsampler.conv: a factor with a fraction is not told by the shapes"
        )
    if len(kernel) not in (2, 3) or mid % _GROUPS or len(set(counts.values())) != 1 or not all(counts.values()):
        raise UnknownArchitecture(f"an upscaler of latents of impossible sizes: {mid} channels, blocks {counts}")
    sizes = {
        "in_channels": channels,
        "mid_channels": mid,
        "num_blocks_per_stage": counts["res_blocks"],
        "dims": len(kernel),
        "rational_spatial_scale": float(factor),
        "use_rational_resampler": rational,
    }
    return sizes, factor


def upscale_latents(
    works: Sequence[UpscaleParams],
    inputs: Sequence[TaskInputs],
    upscaler: ModelPatcher,
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
) -> tuple[Latent, ...]:
    """Enlarge the latent of each of `works`, in one run for each; an audio track stays. The VAE has the statistics of
    its latents. Raises CorruptFile for a result with NaN or infinity, and Stopped at a layer."""
    read = [each.read(LATENT, Latent) for each in inputs]
    found: list[Latent] = []
    for number, each in enumerate(read):
        samples_BCTHW = torch.from_numpy(each.samples_CHW.copy())[None]
        with vae.running(stop_check(hooks)) as module:
            codec = codec_of(module, latent)
            in_scale = codec.to_vae(samples_BCTHW.to(vae.device)).float()
        with upscaler.running(stop_check(hooks)) as module:
            made = module(in_scale.to(upscaler.device).to(upscaler.compute_dtype)).float()
        with vae.running(stop_check(hooks)) as module:
            made_BCTHW = codec_of(module, latent).from_vae(made.to(vae.device)).float().cpu()
        if not torch.isfinite(made_BCTHW).all():
            raise CorruptFile(f"upscaler {upscaler.key}: found a latent with NaN or infinity, expected numbers")
        found.append(Latent(made_BCTHW[0].contiguous().numpy(), each.sound_LA))
        hooks.on_step(number + 1, len(works))
    return tuple(found)
