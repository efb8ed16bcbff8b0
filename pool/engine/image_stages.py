"""The stages that read or write pixels of a person's own: an image into a latent, a latent into an image that keeps
what was not to change.

Knows the inputs of `EncodeImageWork` and `DecodeWork`; what is run on them is `pool.engine.stages`' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from modelpool.pool.conditioning.control_video import encode_followed
from modelpool.pool.core.family_facts import LatentFacts
from modelpool.pool.core.stage_params import (
    DecodeWork,
    EncodeImageWork,
    ImagePixels,
    Latent,
    Made,
    Mask,
    Result,
    RunHooks,
)
from modelpool.pool.engine.stages import decode_together, vae_encode, vae_encode_beginning
from modelpool.pool.patcher.model_patcher import ModelPatcher
from modelpool.pool.pixels.image_ops import covering, pasted
from modelpool.pool.sampling.noise import seed_beside
from modelpool.pool.specs.spec import Division

Kind = TypeVar("Kind")


def encode_images(
    works: Sequence[EncodeImageWork],
    inputs: Sequence[Sequence[Result]],
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: Division | None = None,
) -> tuple[Latent, ...]:
    """The latent of each image: the mean of what the VAE says of it, so that whoever starts from the same image,
    with whatever seed, starts from the same latent. One after the other. Raises as `vae_encode`."""
    return tuple(_encoded(work, read, vae, latent, hooks, division) for work, read in zip(works, inputs, strict=True))


def _encoded(
    work: EncodeImageWork,
    read: Sequence[Result],
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: Division | None,
) -> Latent:
    size = work.width, work.height
    if work.follows:
        return encode_followed(work, read, vae, latent, hooks, division)
    images = [ImagePixels(covering(one.pixels_HWC, *size)) for one in read if isinstance(one, ImagePixels)]
    image = images[0]
    hidden = Mask(covering(_only(read, Mask).values_HW, *size)) if work.hides else None
    if work.frames:
        last = images[-1] if work.ends else None
        return vae_encode_beginning(image, work.frames, vae, latent, hooks, division, last)
    shaken = work.noise, seed_beside(work.seed)
    return vae_encode(image, vae, latent, hooks, None, division, hidden, shaken, work.bright, work.black)


def decode_images(
    works: Sequence[DecodeWork],
    inputs: Sequence[Sequence[Result]],
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: Division | None = None,
) -> tuple[Made, ...]:
    """The image, video or audio of each latent; outside of its mask that of the driver, where it is to be kept.
    Raises as `decode_together`."""
    latents = [_only(read, Latent) for read in inputs]
    lasts = works[0].frame_rate, works[0].seconds, works[0].leading * latent.frames_per_cell
    made = decode_together(latents, vae, latent, hooks, division, *lasts)
    return tuple(
        _kept(image, read) if work.pastes and isinstance(image, ImagePixels) else image
        for work, image, read in zip(works, made, inputs, strict=True)
    )


def _kept(made: ImagePixels, read: Sequence[Result]) -> ImagePixels:
    height, width = made.pixels_HWC.shape[:2]
    kept, mask = _only(read, ImagePixels).pixels_HWC, _only(read, Mask).values_HW
    return ImagePixels(pasted(made.pixels_HWC, covering(kept, width, height), covering(mask, width, height)))


def _only(read: Sequence[Result], kind: type[Kind]) -> Kind:
    """The one input of this kind; another number of them is our mistake."""
    found = [one for one in read if isinstance(one, kind)]
    assert len(found) == 1, f"expected one {kind.__name__}, found {[type(one).__name__ for one in read]}"
    return found[0]
