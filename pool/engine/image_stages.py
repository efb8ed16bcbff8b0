"""Stages that read or write images of users: an image, a video or audio to a latent, and a latent to an image that
keeps the area outside of a mask.

Prepares the inputs of `EncodeImageParams` and `DecodeParams`; `pool.engine.stages` runs the VAE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from modelpool.pool.engine.stages import (
    begin_decode_batch,
    decode_part,
    decode_sounds,
    join_parts,
    vae_encode,
    vae_encode_beginning,
)
from modelpool.pool.inference.conditioning.control_video import encode_control_video, encode_video
from modelpool.pool.inference.pixels.audio_latents import encode_audio
from modelpool.pool.inference.pixels.decode_parts import requested_tiling
from modelpool.pool.inference.pixels.image_ops import covering, pasted
from modelpool.pool.inference.pixels.latent_pixels import DROPS_BEFORE
from modelpool.pool.inference.pixels.sound_latents import encode_sound
from modelpool.pool.inference.pixels.tiled import HOST
from modelpool.pool.inference.sampling.noise import image_noise_seed
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.stage_params import (
    FRAMES,
    SOUND,
    AudioSamples,
    ControlVideo,
    DecodedTiles,
    DecodeParams,
    EncodeImageParams,
    FirstFrames,
    ImagePixels,
    Latent,
    Mask,
    Output,
    RunHooks,
    VideoBeginning,
    VideoFrames,
)
from modelpool.pool.values.core.stopping import stop_if_asked
from modelpool.pool.values.core.task_inputs import AUDIO, IMAGE, LAST_IMAGE, LATENT, MASK, TILES, VIDEO, TaskInputs
from modelpool.pool.values.specs.spec import ExecutionMode
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher


def encode_images(
    works: Sequence[EncodeImageParams],
    inputs: Sequence[TaskInputs],
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None = None,
    follows: bool = False,
) -> tuple[Latent, ...]:
    """Encode each image to a latent: the mean of the VAE posterior, so that runs with different seeds start from the
    same latent. One after the other. The model `follows` its control videos as a whole. Raises as `vae_encode`."""
    return tuple(
        _encoded(work, read, vae, latent, hooks, division, follows) for work, read in zip(works, inputs, strict=True)
    )


def _encoded(
    work: EncodeImageParams,
    read: TaskInputs,
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None,
    follows: bool,
) -> Latent:
    size = work.width, work.height
    if work.sound:
        return encode_sound(work.sound, read.read(AUDIO, AudioSamples), vae, hooks)
    if work.seconds:
        return encode_audio(work.seconds, read.read(AUDIO, AudioSamples), vae, latent, hooks, division)
    match work.video:
        case ControlVideo() as video:
            return encode_control_video(video, size, read, vae, latent, hooks, division, follows)
        case FirstFrames(frames):
            return encode_video(frames, size, read, vae, latent, hooks, division)
        case VideoBeginning(frames, begins, ends):
            first = read.read(VIDEO, VideoFrames).frames_THWC[:begins] if begins else ()
            images = tuple(ImagePixels(covering(frame, *size)) for frame in first) or (_scaled(read, IMAGE, size),)
            last = _scaled(read, LAST_IMAGE, size) if ends else None
            return vae_encode_beginning(images, frames, vae, latent, hooks, division, last)
    image = _scaled(read, IMAGE, size)
    hidden = Mask(covering(read.read(MASK, Mask).values_HW, *size)) if work.hides else None
    shaken = work.noise, image_noise_seed(work.seed)
    return vae_encode(image, vae, latent, hooks, None, division, hidden, shaken, work.bright, work.black)


def decode_images(
    works: Sequence[DecodeParams],
    inputs: Sequence[TaskInputs],
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None = None,
) -> tuple[Output, ...]:
    """Decode each latent to an image, video or audio; outside of its mask, the user image is pasted back. Raises as
    `decode_batch`."""
    return begin_decode_images(works, inputs, vae, latent, hooks, division, is_pending=False)()


def begin_decode_images(
    works: Sequence[DecodeParams],
    inputs: Sequence[TaskInputs],
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None,
    is_pending: bool,
) -> Callable[[], tuple[Output, ...]]:
    """Begin `decode_images`. If it `is_pending`, the device may still compute when this returns, and the returned
    function waits for the results, as `begin_decode_batch`."""
    latents, leading = [read.read(LATENT, Latent) for read in inputs], works[0].shape.leading
    if latent.vae in DROPS_BEFORE:
        latents, leading = [Latent(each.samples_CHW[:, leading:]) for each in latents], 0
    lasts = works[0].shape.frame_rate, works[0].shape.seconds, leading * latent.frames_per_cell
    # devices may round the sum of tiles differently: it is always on the host, as in the join of parts
    into = vae.device if is_pending and not works[0].is_tiled else HOST
    if works[0].track == SOUND:
        sounds = decode_sounds(latents, vae, hooks)
        return lambda: sounds
    if works[0].track == FRAMES:
        latents = [Latent(each.samples_CHW) for each in latents]
    made = begin_decode_batch(latents, vae, latent, hooks, division, *lasts, into, requested_tiling(works[0], latent))
    return lambda: tuple(_pasted(work, image, read) for work, image, read in zip(works, made(), inputs, strict=True))


def decode_image_part(
    work: DecodeParams,
    read: TaskInputs,
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None = None,
) -> DecodedTiles:
    """Compute the tiles that are the part of `work`. Raises as `decode_images`."""
    sampled = read.read(LATENT, Latent)
    if latent.vae in DROPS_BEFORE:
        sampled = Latent(sampled.samples_CHW[:, work.shape.leading :])
        work = replace(work, shape=replace(work.shape, leading=0))
    return decode_part(sampled, vae, latent, hooks, division, work)


def join_image(work: DecodeParams, read: TaskInputs, hooks: RunHooks) -> Output:
    """Join the parts of a decode on the host; outside of its mask, the user image is pasted back. One step. Raises
    Stopped before it."""
    stop_if_asked(hooks.should_stop)
    image = _pasted(work, join_parts(read.read_all(TILES, DecodedTiles)), read)
    hooks.on_step(1, 1)
    return image


def _pasted(work: DecodeParams, image: Output, read: TaskInputs) -> Output:
    return _kept(image, read) if work.pastes and isinstance(image, ImagePixels) else image


def _scaled(read: TaskInputs, name: str, size: tuple[int, int]) -> ImagePixels:
    return ImagePixels(covering(read.read(name, ImagePixels).pixels_HWC, *size))


def _kept(made: ImagePixels, read: TaskInputs) -> ImagePixels:
    height, width = made.pixels_HWC.shape[:2]
    kept, mask = read.read(IMAGE, ImagePixels).pixels_HWC, read.read(MASK, Mask).values_HW
    return ImagePixels(pasted(made.pixels_HWC, covering(kept, width, height), covering(mask, width, height)))
