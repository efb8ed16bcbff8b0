"""`PreviewMaker`: turns the clean latents that a run predicts into small images.

Two threads use it: `note` and `fit` belong to the one that runs tasks, since a map is fitted with the model's VAE,
before a run; `image` to one that makes previews while a run continues, which uses no memory of the device.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import torch
from PIL import Image

from modelpool.pool.inference.pixels.latent_colours import LatentColours, latents_to_fit
from modelpool.pool.inference.pixels.tiny_decoder import TinyDecoder, tiny_name
from modelpool.pool.models.components.vae.codec import on_white
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.core.previews import FORMAT, MAX_PREVIEW_BYTES, MAX_SIDE, PreviewKind, PreviewWish
from modelpool.pool.values.core.stage_params import FloatArray, PixelArray
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher

logger = logging.getLogger(__name__)

#: models with known latents; a map takes some KiB
MODELS_KEPT = 64
#: open decoders, some 5 MB each
DECODERS_KEPT = 4
#: cells along a side of the latents that a map is fitted to: more than the smallest VAE needs
CELLS_TO_FIT = 8
#: longest side of what a tiny decoder decodes, in pixels: on one thread of a CPU, 256 take half a second
TINY_SIDE = 192
#: tensors of a block of a decoder that exist at a time
_TENSORS = 4
#: channels of pixels with transparency
_WITH_OPACITY = 4
#: tried in turn until a preview is small enough
_QUALITIES = (80, 40, 10)


@dataclass(slots=True)
class _KnownModel:
    """The latents of a model, and the map of its VAE's, once somebody wanted it: None if it has none."""

    latent: LatentFacts
    colours: LatentColours | None = None
    is_fitted: bool = False


class PreviewMaker:
    """The maps and decoders of one engine. See the module for its threads."""

    def __init__(self) -> None:
        #: by the hash of the model; the thread of the runs writes them, in single operations
        self._models: LruCache[str, _KnownModel] = LruCache(MODELS_KEPT)
        #: by path; None: it cannot be read. For the other thread
        self._decoders: LruCache[str, TinyDecoder | None] = LruCache(DECODERS_KEPT)

    def note(self, model_sha256: str, latent: LatentFacts) -> None:
        """Note the latents of a model that runs: somebody may want previews of them later."""
        if model_sha256 not in self._models:
            self._models.put(model_sha256, _KnownModel(latent))

    def needs_map(self, model_sha256: str, wish: PreviewWish) -> bool:
        """Whether previews of a model that was noted need a map that was not fitted yet."""
        known = self._models.kept(model_sha256)
        if known is None or known.is_fitted or not wish.reads_colours:
            return False
        return known.latent.audio is None and not _tiny_path(known.latent, wish)

    def fit(self, model_sha256: str, decode: Callable[[FloatArray], PixelArray | None]) -> None:
        """Fit the map of a model that was noted; once, also if that fails. `decode` returns the image [height, width,
        3] of a latent [C, H, W]; of a video, its first frame."""
        known = self._models.kept(model_sha256)
        assert known is not None, "a model is noted first"
        known.is_fitted = True
        latents_SCHW = latents_to_fit(known.latent.channels, CELLS_TO_FIT)
        images = [decode(latent_CHW) for latent_CHW in latents_SCHW]
        usable = [image for image in images if image is not None and min(image.shape[:2]) >= CELLS_TO_FIT]
        if len(usable) == len(latents_SCHW):
            known.colours = LatentColours.fitted(latents_SCHW, usable)

    def image(self, model_sha256: str, latent_CHW: FloatArray, wish: PreviewWish) -> bytes | None:
        """Return the preview of a latent as a WebP file; None if there is none of the wanted kind."""
        known = self._models.kept(model_sha256)
        if known is None or wish.kind is PreviewKind.NONE or latent_CHW.ndim != 3:
            return None
        path = _tiny_path(known.latent, wish)
        decoder = self._decoder(path) if path else None
        if decoder is not None and decoder.latent_channels == len(latent_CHW):
            return encoded_preview(decoder.image(latent_CHW, TINY_SIDE))
        if known.colours is None or not wish.reads_colours:
            return None
        height, width = (side * known.latent.downscale // known.latent.cells for side in latent_CHW.shape[1:])
        return encoded_preview(known.colours.image(latent_CHW), height, width)

    def _decoder(self, path: str) -> TinyDecoder | None:
        def opened() -> TinyDecoder | None:
            if not Path(path).exists():  # on another node
                return None
            try:
                return TinyDecoder.open(path)
            except UserError as problem:
                logger.warning("no previews with %s: %s", path, problem)
                return None

        return self._decoders.get(path, opened)


def _tiny_path(latent: LatentFacts, wish: PreviewWish) -> str:
    """Return the file of the tiny decoder that `wish` uses for these latents, or ""."""
    if wish.kind is PreviewKind.LATENT_RGB or not wish.tiny_decoders:
        return ""
    return dict(wish.tiny_decoders).get(tiny_name(latent), "")


def encoded_preview(pixels: PixelArray, height: int = 0, width: int = 0) -> bytes | None:
    """Return an image of `height` times `width` pixels (default: its own) as a small WebP file, reduced to `MAX_SIDE`;
    None if even the lowest quality takes more than `MAX_PREVIEW_BYTES`."""
    high, wide = height or pixels.shape[0], width or pixels.shape[1]
    scale = min(1.0, MAX_SIDE / max(high, wide))
    image = Image.fromarray(pixels)
    size = max(1, round(wide * scale)), max(1, round(high * scale))
    if size != image.size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    for quality in _QUALITIES:
        written = BytesIO()
        image.save(written, FORMAT, quality=quality, method=0)
        if written.tell() <= MAX_PREVIEW_BYTES:
            return written.getvalue()
    return None


def first_frame_of(pixels_BC: torch.Tensor) -> PixelArray | None:
    """Return the first frame of decoded pixels in -1 to 1 as bytes, transparent ones on white; None for audio."""
    if pixels_BC.dim() == 5:
        pixels_BC = pixels_BC[:, :, 0]
    if pixels_BC.dim() != 4:
        return None
    if pixels_BC.shape[1] == _WITH_OPACITY:
        pixels_BC = on_white(pixels_BC)
    found: PixelArray = (
        pixels_BC[0].permute(1, 2, 0).float().add(1).mul(127.5).nan_to_num().clamp(0, 255).to(torch.uint8).numpy()
    )
    return found


def small_decode_bytes(vae: ModelPatcher, cells: tuple[int, ...], latent: LatentFacts) -> int:
    """Return an upper bound of the activations of decoding a small latent: a few tensors with the widest channels at
    every pixel, in float32."""
    widest = max((weight.shape[0] for weight in vae.module.parameters() if weight.dim() >= 4), default=1)
    return _TENSORS * 4 * widest * math.prod(side * latent.downscale for side in cells) * latent.frames_per_cell
