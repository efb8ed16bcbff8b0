"""Convert pixels to latents and back with any VAE: what each class needs in addition to one call.

Latents are in the `LatentFormat` of the diffusion model: scale, shift, means and deviations are applied here.
Pixels are -1 to 1, `BCHW` for images and `BCTHW` for video; layers of an image are decoded as a video with opacity as a
fourth channel. Audio is `BCS`, from -1 to 1. Legend: B batch, C channels, T frames or cells of time, H W height and
width, S samples of audio.

Does not tile, move weights, or choose dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from modelpool.pool.families.detection.vaes import VaeFacts
from modelpool.pool.families.parts.arguments import PATCH
from modelpool.pool.families.parts.latent_format import LatentFormat

#: standard deviation of the data that Cosmos' diffusion models assume
COSMOS_DATA_STD = 0.5
#: final timestep of LTX-Video's decoder, and the noise added for it. The authors' defaults
LTX_DECODE_TIMESTEP = 0.05
LTX_DECODE_NOISE = 0.025


@dataclass(frozen=True, slots=True)
class VaeCodec:
    """A built VAE and the format of its latents.

    module  from `VaePlan.build`; `Any` because every diffusers class has different calls
    facts   its facts
    latent  what the latents mean to the diffusion model
    """

    module: Any
    facts: VaeFacts
    latent: LatentFormat

    def encode(self, pixels: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the latents of `pixels`: the mean of the encoder's distribution, or a sample with `generator`.

        Sides are centre-cropped to multiples of the VAE's ratio. A batch of frames becomes a video for video VAEs.
        """
        x = self._as_its_own(pixels)
        if self.facts.name == "cascade_a":
            x = (x + 1) / 2
        if self.facts.name == "qwen_image_21":  # an opaque video of one frame
            x = torch.cat((x, torch.ones_like(x[:, :1])), dim=1).unsqueeze(2)
        if self.facts.name == "qwen_image_layered":
            x = torch.cat((x, torch.ones_like(x[:, :1])), dim=1)
        if self.facts.name == "allegro":  # its first cell is as many frames as the others
            x = torch.cat((x, x[:, :, -1:].expand(-1, -1, -x.shape[2] % self.facts.temporal_ratio, -1, -1)), dim=2)
        is_video = self.facts.name == "kl_temporal" and x.dim() == 5
        encoded = self.module.encode(_frames_as_batch(x) if is_video else x)
        if hasattr(encoded, "latent_dist"):
            spread = encoded.latent_dist
            z = spread.mode() if generator is None else spread.sample(generator)
        else:  # Sana's has one latent, the others a batch of them
            z = encoded.latent if self.facts.name == "dc" else encoded.latents
        if self.facts.name == "qwen_image_21":
            z = z.squeeze(2)
        if is_video:
            z = z.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)
        return self.from_vae(z)

    def decode(
        self, latents: Tensor, generator: torch.Generator | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the pixels of `latents`, which are scaled in their own dtype and decoded in `dtype` (default: theirs).

        LTX-Video since 0.9.1 adds noise if `generator`, a CPU generator, is passed.
        """
        z = self.to_vae(latents).to(dtype or latents.dtype)
        match self.facts.name:
            case "kl_temporal":
                decoded = self.module.decode(_frames_as_batch(z), num_frames=z.shape[2 if z.dim() == 5 else 0])
            case "ltx_v1" | "ltx_v2":
                own = generator or torch.Generator().manual_seed(0)
                if generator is not None:
                    noise = torch.randn(z.shape, generator=own, dtype=torch.float32).to(z)
                    z = (1 - LTX_DECODE_NOISE) * z + LTX_DECODE_NOISE * noise
                with _DrawnFrom(own):  # blocks of its decoder add noise, and accept no generator
                    decoded = self.module.decode(z, z.new_full((z.shape[0],), LTX_DECODE_TIMESTEP))
            case "qwen_image_21":
                decoded = self.module.decode(z.unsqueeze(2))
            case "qwen_image_layered":  # each layer as an image
                return torch.cat([self.module.decode(layer).sample for layer in z.split(1, dim=2)], dim=2)
            case _:
                decoded = self.module.decode(z)
        x: Tensor = decoded.sample
        if self.facts.name == "qwen_image_21":
            return on_white(x.squeeze(2))
        if self.facts.name == "allegro":  # frames are before channels
            return x.transpose(1, 2)[:, :, : self.facts.decoded_frames(z.shape[2])]
        if self.facts.name == "kl_temporal" and z.dim() == 5:
            x = x.unflatten(0, (z.shape[0], z.shape[2])).transpose(1, 2)
        return x * 2 - 1 if self.facts.name == "cascade_a" else x

    def _as_its_own(self, x: Tensor) -> Tensor:
        """Return `x` with the dimensions of the VAE, and sides that are multiples of its ratio."""
        facts = self.facts
        if facts.dimensions == 3 and x.dim() == 4:
            x = x.unsqueeze(2) if facts.frames_are_batch else x.transpose(0, 1).unsqueeze(0)
        if not facts.crops_input:
            return x
        ratio = int(facts.encode_ratio)
        first_side = 3 if facts.dimensions == 3 else 2
        for side in range(first_side, x.dim()):
            whole = x.shape[side] // ratio * ratio
            x = x.narrow(side, (x.shape[side] - whole) // 2, whole)
        return x

    def to_vae(self, latents: Tensor) -> Tensor:
        """Return latents as the VAE's decoder reads them."""
        match self.facts.name:
            case "taesd":  # it was distilled to read the model's latents directly
                return latents
            case "flux2":
                mean, std = self._patch_statistics(latents)
                return _unfolded(latents * std + mean, self.module.config.patch_size)
            case "cosmos":
                mean, std = _cosmos_statistics(self.module, latents)
                return latents * std / COSMOS_DATA_STD + mean
            case name if name.startswith("ltx"):
                return latents * _channels(self.module.latents_std, latents) + _channels(
                    self.module.latents_mean, latents
                )
            case "hunyuan_image_refiner":
                return _pairs_as_frames(latents / self.latent.scale)
            case _:
                mean, std = _as_tensor(self.latent.mean, latents), _as_tensor(self.latent.std, latents)
                return latents * std / self.latent.scale + mean

    def from_vae(self, z: Tensor) -> Tensor:
        """Convert the encoder's output to the diffusion model's latents: the inverse of `to_vae`."""
        match self.facts.name:
            case "taesd":
                return z
            case "flux2":
                folded = _folded(z, self.module.config.patch_size)
                mean, std = self._patch_statistics(folded)
                return (folded - mean) / std
            case "cosmos":
                mean, std = _cosmos_statistics(self.module, z)
                return (z - mean) * COSMOS_DATA_STD / std
            case name if name.startswith("ltx"):
                return (z - _channels(self.module.latents_mean, z)) / _channels(self.module.latents_std, z)
            case "hunyuan_image_refiner":
                return _frames_as_pairs(z) * self.latent.scale
            case _:
                mean, std = _as_tensor(self.latent.mean, z), _as_tensor(self.latent.std, z)
                return (z - mean) * self.latent.scale / std

    def _patch_statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of latents of Flux 2's VAE: the family's, else the VAE's."""
        if len(self.latent.mean) == 1:
            return _batch_statistics(self.module, like)
        return _as_tensor(self.latent.mean, like), _as_tensor(self.latent.std, like)


class _DrawnFrom(TorchFunctionMode):
    """Draws normal noise on the CPU from one generator: equal on every device, and no other generator advances."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`; redirect `torch.randn`."""
        if func is not torch.randn:
            return func(*args, **(kwargs or {}))
        options = {**(kwargs or {}), "generator": self._generator, "device": "cpu"}
        return torch.randn(*args, **options).to((kwargs or {}).get("device") or "cpu")


def on_white(x_BCHW: Tensor) -> Tensor:
    """Return images with a channel of transparency, all from -1 to 1, on a white ground."""
    colours, opacity = x_BCHW[:, :3].clamp(-1, 1), (x_BCHW[:, 3:].clamp(-1, 1) + 1) / 2
    return colours * opacity + (1 - opacity)


def _frames_as_batch(x: Tensor) -> Tensor:
    """Return each frame of a video as an image, video by video; images unchanged."""
    return x.transpose(1, 2).flatten(0, 1) if x.dim() == 5 else x


def _channels(values: Tensor, like: Tensor) -> Tensor:
    """Return one value per channel, broadcastable to `like`."""
    return values.to(like).view(1, -1, *[1] * (like.dim() - 2))


def _as_tensor(values: Sequence[float], like: Tensor) -> Tensor:
    return _channels(torch.tensor(values), like)


def _batch_statistics(module: nn.Module, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of Flux 2's latents, the running statistics of a batch norm."""
    norm: Any = module.bn
    config: Any = module.config
    return _channels(norm.running_mean, like), _channels(torch.sqrt(norm.running_var + config.batch_norm_eps), like)


def statistics_in_folder(means: Sequence[float], deviations: Sequence[float], epsilon: float) -> dict[str, Tensor]:
    """Return the batch norm of Flux 2's VAE in the folder of a family with statistics of its own, from statistics of
    each channel and its four cells: Ideogram 4. Its pipeline has them for each cell and its channels."""
    mean, std = (torch.tensor(each).unflatten(0, (-1, PATCH)).T.flatten() for each in (means, deviations))
    return {"bn.running_mean": mean, "bn.running_var": std**2 - epsilon}


def _folded(x_BCHW: Tensor, patch: tuple[int, int]) -> Tensor:
    """Return patches as channels."""
    b, c, h, w = x_BCHW.shape
    down, across = patch
    x = x_BCHW.view(b, c, h // down, down, w // across, across).permute(0, 1, 3, 5, 2, 4)
    return x.reshape(b, c * down * across, h // down, w // across)


def _unfolded(x_BCHW: Tensor, patch: tuple[int, int]) -> Tensor:
    """Return channels as patches: the inverse of `_folded`."""
    b, c, h, w = x_BCHW.shape
    down, across = patch
    x = x_BCHW.reshape(b, c // (down * across), down, across, h, w).permute(0, 1, 4, 2, 5, 3)
    return x.reshape(b, c // (down * across), h * down, w * across)


def _cosmos_statistics(module: nn.Module, like_BCTHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of Cosmos' latents, per channel and time cell; the last value extends to all later
    cells."""
    config: Any = module.config
    cells = like_BCTHW.shape[2]

    def spread(values: Sequence[float]) -> Tensor:
        known = torch.tensor(values).view(1, config.latent_channels, -1, 1, 1)
        last = known[:, :, -1:].expand(-1, -1, max(0, cells - known.shape[2]), -1, -1)
        return torch.cat((known, last), dim=2)[:, :, :cells].to(like_BCTHW)

    return spread(config.latents_mean), spread(config.latents_std)


def _pairs_as_frames(x_BCTHW: Tensor) -> Tensor:
    """Split each time cell of HunyuanImage's refiner into two of its VAE's; the first is a repetition and dropped."""
    b, c, t, h, w = x_BCTHW.shape
    x = x_BCTHW.permute(0, 2, 1, 3, 4).reshape(b, t * 2, c // 2, h, w).permute(0, 2, 1, 3, 4)
    return x[:, :, 1:]


def _frames_as_pairs(x_BCTHW: Tensor) -> Tensor:
    """The inverse of `_pairs_as_frames`."""
    x = torch.cat((x_BCTHW[:, :, :1], x_BCTHW), dim=2)
    b, c, t, h, w = x.shape
    assert t % 2 == 0, f"{t - 1} cells of time, expected an odd number"
    return x.permute(0, 2, 1, 3, 4).reshape(b, t // 2, c * 2, h, w).permute(0, 2, 1, 3, 4)
