"""`TinyDecoder`: TAESD and its relatives (TAESDXL, TAESD3, TAEF1), which decode latents of a diffusion model quickly.

Runs on the CPU, next to a run on a GPU: no memory of the device is planned for it. Its files come from the author, in
two layouts, or from diffusers. Sources of the architecture: madebyollin/taesd (MIT) and diffusers' `AutoencoderTiny`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from modelpool.pool.families.parts.latent_formats import LATENT_FORMATS
from modelpool.pool.models.components.common.extra_tensors import check_extra_tensors
from modelpool.pool.models.components.common.fitted_key_map import within
from modelpool.pool.models.components.vae.build_vae import plan_vae
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.stage_params import FloatArray, PixelArray
from modelpool.pool.weights.quant.open_weights import open_weights

KIND = "taesd"
#: relative difference of scaling factors that are the same number
_TOLERANCE = 1e-4


class TinyDecoder:
    """An opened file. Used by one thread."""

    def __init__(self, module: Any, latent_channels: int, ratio: int) -> None:
        """`ratio`: pixels along a side of a cell."""
        self._module = module
        self._ratio = ratio
        self.latent_channels = latent_channels

    @classmethod
    def open(cls, path: str | Path) -> TinyDecoder:
        """Read the decoder in a file, in float32. Raises CorruptFile, BadQuantization, or UnknownArchitecture if
        it has none."""
        # the catalog, which found the file, has allowed its kind; nothing in a pickle is run
        weights = open_weights(path, allow_pickle=True)
        shapes = weights.shapes
        plan = plan_vae(shapes)
        if plan.facts.name != KIND or not plan.facts.has_decoder:
            raise UnknownArchitecture(f"{path}: found the VAE of {plan.facts.title}, expected a decoder of TAESD")
        module = plan.build({name: weights[name].to(torch.float32) for name in shapes})
        check_extra_tensors(weights, "decoder", within(plan.key_map, module.state_dict()).unused)
        return cls(module, plan.facts.latent_channels, int(plan.facts.decode_ratio))

    def image(self, latent_CHW: FloatArray, max_side: int) -> PixelArray:
        """Return the pixels [height, width, 3] of a latent in the scale of the diffusion model. A latent of more than
        `max_side` pixels is reduced before it is decoded, which takes as long as a small image."""
        latent_1CHW = torch.from_numpy(latent_CHW)[None]
        most = max(1, max_side // self._ratio)
        height, width = latent_CHW.shape[1:]
        if max(height, width) > most:
            scale = most / max(height, width)
            size = max(1, round(height * scale)), max(1, round(width * scale))
            latent_1CHW = functional.interpolate(latent_1CHW, size=size, mode="area")
        with torch.no_grad():
            pixels_1CHW = self._module.decode(latent_1CHW).sample
        pixels = pixels_1CHW[0].permute(1, 2, 0).add(1).mul(127.5).nan_to_num().clamp(0, 255).round()
        found: PixelArray = pixels.to(torch.uint8).contiguous().numpy()
        return found


def tiny_name(latent: LatentFacts) -> str:
    """Return the name of the tiny decoder for these latents, as in `LatentFormat.tiny`; "" if there is none."""
    for row in LATENT_FORMATS.values():
        same_layout = (row.channels, row.dimensions) == (latent.channels, latent.dimensions)
        numbers = ((row.scale, latent.scaling_factor), (row.mean[0] if len(row.mean) == 1 else 0.0, latent.shift))
        same_scale = all(abs(one - other) <= _TOLERANCE * max(1e-3, abs(one)) for one, other in numbers)
        if same_layout and same_scale and (row.mean if len(row.mean) > 1 else ()) == latent.means:
            return row.tiny
    return ""
