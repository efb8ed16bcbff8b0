"""`PreviewMaker`: turns the clean latents that a run predicts into small images.

Two threads use it: `prepare` belongs to the one that runs tasks, since it decodes with the model's VAE; `image` to one
that makes previews while a run continues. Neither uses memory of the device during a run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import torch
from PIL import Image

from modelpool.pool.core.errors import UserError
from modelpool.pool.core.family_facts import LatentFacts
from modelpool.pool.core.lru_cache import LruCache
from modelpool.pool.core.previews import FORMAT, MAX_PREVIEW_BYTES, MAX_SIDE, PreviewKind, PreviewWish
from modelpool.pool.core.stage_params import FloatArray, PixelArray
from modelpool.pool.pixels.latent_colours import LatentColours, latents_to_fit
from modelpool.pool.pixels.tiny_decoder import TinyDecoder, tiny_name

logger = logging.getLogger(__name__)

#: maps of models, some KiB each, and models that have none
MAPS_KEPT = 64
#: open decoders, some 5 MB each
DECODERS_KEPT = 4
#: cells along a side of the latents that a map is fitted to: more than the smallest VAE needs
CELLS_TO_FIT = 8
#: tried in turn until a preview is small enough
_QUALITIES = (80, 40, 10)


class PreviewMaker:
    """The maps and decoders of one engine. See the module for its threads."""

    def __init__(self) -> None:
        #: by the hash of the model; what the thread of the runs puts there is never changed. None: it has no colours
        self._colours: LruCache[str, tuple[LatentFacts, LatentColours | None]] = LruCache(MAPS_KEPT)
        #: by path; None: it cannot be read
        self._decoders: LruCache[str, TinyDecoder | None] = LruCache(DECODERS_KEPT)

    def needs(self, model_sha256: str) -> bool:
        """Whether `prepare` has not been called for a model."""
        return model_sha256 not in self._colours

    def prepare(
        self,
        model_sha256: str,
        latent: LatentFacts,
        wish: PreviewWish,
        decode: Callable[[FloatArray], PixelArray | None],
    ) -> None:
        """Prepare previews of a model with these latents, as `wish` says. `decode` returns the image [height, width, 3]
        of a latent [C, H, W]; of a video, its first frame; None for audio. It is called only if the linear map is
        needed."""
        if self._tiny_path(latent, wish):
            return
        colours = None
        if wish.reads_colours and latent.audio is None:
            latents_SCHW = latents_to_fit(latent.channels, CELLS_TO_FIT)
            images = [decode(latent_CHW) for latent_CHW in latents_SCHW]
            if all(image is not None and min(image.shape[:2]) >= CELLS_TO_FIT for image in images):
                colours = LatentColours.fitted(latents_SCHW, [image for image in images if image is not None])
        self._colours.put(model_sha256, (latent, colours))

    def image(self, model_sha256: str, latent: LatentFacts, latent_CHW: FloatArray, wish: PreviewWish) -> bytes | None:
        """Return the preview of a latent as a WebP file; None if there is none of the wanted kind."""
        if wish.kind is PreviewKind.NONE or latent_CHW.ndim != 3:
            return None
        path = self._tiny_path(latent, wish)
        decoder = None if not path else self._decoder(path)
        if decoder is not None and decoder.latent_channels == len(latent_CHW):
            return encoded_preview(decoder.image(latent_CHW, MAX_SIDE))
        _, colours = self._colours.kept(model_sha256) or (None, None)
        if colours is None or not wish.reads_colours:
            return None
        height, width = latent_CHW.shape[1:]
        return encoded_preview(colours.image(latent_CHW), height * latent.downscale, width * latent.downscale)

    def _tiny_path(self, latent: LatentFacts, wish: PreviewWish) -> str:
        """Return the file of the tiny decoder that is used, or ""."""
        if wish.kind is PreviewKind.LATENT_RGB or not wish.tiny_decoders:
            return ""
        return dict(wish.tiny_decoders).get(tiny_name(latent), "")

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
    """Return the first frame of decoded pixels in -1 to 1 as bytes; None for audio."""
    if pixels_BC.dim() == 5:
        pixels_BC = pixels_BC[:, :, 0]
    if pixels_BC.dim() != 4:
        return None
    found: PixelArray = (
        pixels_BC[0].permute(1, 2, 0).float().add(1).mul(127.5).nan_to_num().clamp(0, 255).to(torch.uint8).numpy()
    )
    return found
