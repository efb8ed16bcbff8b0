"""Facts of a VAE before it is built: sizes, dtypes, latents and memory. Torch-free values.

Does not know a VAE's keys (`pool.families.detection.vaes`), nor how it is built (`pool.models.vae`).

Memory figures are those of section 7 of the published behaviour of ComfyUI (commit 4086acf3c2, 2025-12-06): formulas
fitted to measured peaks of complete passes. Golden values: tests/golden/vae_detection.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from modelpool.pool.files.formats.safetensors_file import Shape

BF16, F16, F32 = "bfloat16", "float16", "float32"


@dataclass(frozen=True, slots=True)
class VaeFacts:
    """One kind of VAE, as in a file.

    name              short and stable, "kl"
    title             for human readers
    latent_channels   channels of its latents, as diffusion models read them
    dimensions        dimensions of its latents after batch and channels: 1, 2 or 3
    pixel_channels    channels of its decoded output
    encode_ratio      pixels (or audio samples) along one side per latent cell, when encoding
    decode_ratio      the same when decoding
    temporal_ratio    frames per time cell; the first cell of a video is one frame
    working_dtypes    supported compute dtypes, best first
    latent_formats    possible formats of its latents, in `latent_formats`; if several, the model's family decides
    frames_are_batch  a batch of images is several images, not frames of a video
    may_offload       whether its weights may leave the device between runs
    crops_input       whether pixels beyond a multiple of the ratio are cropped before encoding
    extra_channels    size of an additional dimension of its latents between channels and time; 0 for none
    has_encoder       whether the file has the encoder's weights
    has_decoder       whether the file has the decoder's weights
    layout            "original", or "diffusers" for a file in diffusers' naming
    """

    name: str
    title: str
    latent_channels: int = 4
    dimensions: int = 2
    pixel_channels: int = 3
    encode_ratio: float = 8
    decode_ratio: float = 8
    temporal_ratio: int = 1
    working_dtypes: tuple[str, ...] = (BF16, F32)
    latent_formats: tuple[str, ...] = ()
    frames_are_batch: bool = False
    may_offload: bool = True
    crops_input: bool = True
    extra_channels: int = 0
    has_encoder: bool = True
    has_decoder: bool = True
    layout: str = "original"

    def decoded_frames(self, cells: int) -> int:
        """Return the frames of `cells` time cells; `cells` itself without a time dimension."""
        return max(0, cells * self.temporal_ratio - (self.temporal_ratio - 1))

    def encoded_frames(self, frames: int) -> int:
        """Return the time cells of `frames`."""
        return max(0, (frames + self.temporal_ratio - 1) // self.temporal_ratio)

    def decoded_sides(self, cells: tuple[int, ...]) -> tuple[int, ...]:
        """Return the pixels (or samples) of cells along each side, without time."""
        return tuple(int(side * self.decode_ratio) for side in cells)

    def encoded_sides(self, pixels: tuple[int, ...]) -> tuple[int, ...]:
        """Return the cells of pixels along each side, without time; a remainder is lost."""
        return tuple(int(side / self.encode_ratio) for side in pixels)

    def decode_bytes(self, latent_shape: Shape, bytes_per_number: int) -> float:
        """Return the bytes, in addition to weights, for decoding a latent of `latent_shape` at that value size."""
        return _figures(self)[0](latent_shape) * bytes_per_number

    def encode_bytes(self, pixel_shape: Shape, bytes_per_number: int) -> float:
        """Return the bytes, in addition to weights, for encoding pixels (or audio) of `pixel_shape`, channels
        second."""
        return _figures(self)[1](pixel_shape) * bytes_per_number


Numbers: TypeAlias = Callable[[Shape], float]


def _whole(shape: Shape) -> int:
    """Return the product of all dimensions after batch and channels."""
    area = 1
    for side in shape[2:]:
        area *= side
    return area


def _last_two(shape: Shape) -> int:
    return shape[-1] * shape[-2]


def _last_three(shape: Shape) -> int:
    return shape[-1] * shape[-2] * shape[-3]


def _tiny_video(factor: float, cells_per_side: int, power: float, share: float) -> Numbers:
    """Tiny video autoencoders work frame by frame, and keep a share of all frames."""
    return lambda s: factor * max(1.0, s[2] ** power * share) * _last_two(s) * cells_per_side**2


_IMAGE: tuple[Numbers, Numbers] = (lambda s: 2178 * _last_two(s) * 64, lambda s: 1767 * _last_two(s))
_LTX: tuple[Numbers, Numbers] = (
    lambda s: 900 * _whole(s) * 8 * 8 * 8,
    lambda s: 70 * max(s[2], 7) * _last_two(s),
)
_FOLDED_VIDEO: tuple[Numbers, Numbers] = (
    lambda s: 3600 * 4 * _last_two(s) * 16**2,
    lambda s: 1400 * 9 * _last_two(s),
)
_TINY_VIDEO_ENCODE = _tiny_video(700, 1, 0.66, 0.11)
_FIGURES: Mapping[str, tuple[Numbers, Numbers]] = {
    "flux2": (lambda s: 4 * 2178 * _last_two(s) * 64, lambda s: 1767 * _last_two(s)),
    # estimated, not measured: of a residual block at full size, whose norms are computed in float32
    "dc": (lambda s: 1200 * _last_two(s) * 32**2, lambda s: 1200 * _last_two(s)),
    "hunyuan_image": (lambda s: 700 * _last_two(s) * 32**2, lambda s: 700 * _last_two(s)),
    "hunyuan_image_3": (lambda s: 2800 * _last_three(s) * 16**2, lambda s: 2800 * _last_two(s)),
    "hunyuan_video_15": _FOLDED_VIDEO,
    "hunyuan_image_refiner": _FOLDED_VIDEO,
    "hunyuan_video": (
        lambda s: 2800 * min(8, 4 * (s[2] - 1) + 1) * _last_two(s) * 64,
        lambda s: 1400 * min(9, s[2]) * _last_two(s),
    ),
    # estimated, not measured: those of HunyuanVideo, with eight frames at a time in each direction
    "cogvideox": (
        lambda s: 2800 * min(9, 4 * (s[2] - 1) + 1) * _last_two(s) * 64,
        lambda s: 1400 * min(9, s[2]) * _last_two(s),
    ),
    # 803 numbers for each pixel of a tile, counted without computing; and the complete video
    "allegro": (
        lambda s: 900 * 4 * min(6, s[2]) * min(40, s[-2]) * min(40, s[-1]) * 64 + 8 * 4 * _whole(s) * 64,
        lambda s: 900 * min(24, s[2]) * min(320, s[-2]) * min(320, s[-1]) + 8 * _whole(s),
    ),
    "oobleck": (lambda s: 1000 * s[2] * 2048, lambda s: 1000 * s[2]),
    # estimated, not measured: a mask of all pairs of tokens, 17 of which are one cell, and the states of a layer
    "stable_audio_3": (
        lambda s: 4 * (17 * s[2]) ** 2 + 40000 * 17 * s[2],
        lambda s: 4 * (17 * s[2] / 4096) ** 2 + 40000 * 17 * s[2] / 4096,
    ),
    "mochi": (
        lambda s: 1000 * _whole(s) * 8 * 8 * 6,
        lambda s: 1.5 * max(s[2], 7) * _last_two(s) * 8 * 8 * 6,
    ),
    "ltx_v0": _LTX,
    "ltx_v1": _LTX,
    "ltx_v2": _LTX,
    "ltx2": _LTX,
    "cosmos": (lambda s: 50 * _whole(s) * 8 * 8 * 8, lambda s: 50 * round((s[2] + 7) / 8) * 8 * _last_two(s)),
    # estimated, not measured: of a residual block at full size, whose norms are computed in float32
    "qwen_image_21": (lambda s: 2500 * _last_two(s) * 16**2, lambda s: 1700 * _last_two(s)),
    "wan22": (lambda s: 8000 * _last_two(s) * 16**2, lambda s: 3300 * _last_two(s)),
    "qwen_image_layered": (lambda s: 7000 * _last_two(s) * 8**2, lambda s: 6000 * _last_two(s)),
    "wan21": (lambda s: 7000 * _last_two(s) * 8**2, lambda s: 6000 * _last_two(s)),
    "hunyuan3d": (lambda s: s[0] * s[-1] * s[-2] * (1 + 2 * 16), lambda s: s[0] * s[-1] * s[-2]),
    "ace_step": (lambda s: _last_two(s) * 87000, lambda s: s[-2] * 330),
    "pixel_space": (_last_two, _last_two),
    "mmaudio": (lambda s: 90 * s[2] * 1411.2, lambda s: 30 * s[2]),
    "taehv": (_tiny_video(50, 32, 0.65, 0.26), _TINY_VIDEO_ENCODE),
    "taehv_hunyuan_15": (_tiny_video(1200, 32, 0.7, 0.05), _TINY_VIDEO_ENCODE),
    "taehv_wan22": (_tiny_video(1800, 16, 0.7, 0.1), _TINY_VIDEO_ENCODE),
}


def _figures(facts: VaeFacts) -> tuple[Numbers, Numbers]:
    return _FIGURES.get(facts.name, _IMAGE)
