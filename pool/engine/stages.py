"""The stages encode and decode on components that are ready to run, for one task or a batch. Plain functions
without memory management.

Shape legend: B batch, L tokens, D text width, V width of a pooled text, C latent channels, H W height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modelpool.pool.families.parts.text_reading import Pooled, Reading, reading_of, with_layers_skipped
from modelpool.pool.families.text_readings import readings_of
from modelpool.pool.inference.pixels.decode_parts import decoded_part, joined_bytes
from modelpool.pool.inference.pixels.image_ops import HALF
from modelpool.pool.inference.pixels.latent_pixels import as_bytes, decoded, encoded, expect_finite
from modelpool.pool.inference.pixels.tiled import HOST
from modelpool.pool.inference.pixels.tiled_vae import Tiling
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.models.components.text.connectors import connected
from modelpool.pool.models.components.text.text_conditioning import text_kwargs
from modelpool.pool.models.components.text.work_reading import reading_of_work
from modelpool.pool.models.components.vae.audio_decoders import sound_of
from modelpool.pool.models.text.clip_tokenizer import ClipTokenizer
from modelpool.pool.models.text.embeddings import Embedding
from modelpool.pool.models.text.encode import AnyTokenizer, ReadText, read_texts
from modelpool.pool.models.text.image_tokens import ImageStates
from modelpool.pool.models.text.token_writer import TokenWriting
from modelpool.pool.values.core.errors import CorruptFile, UnusableField
from modelpool.pool.values.core.family_facts import PLAIN_TEXT, LatentFacts, TextFacts
from modelpool.pool.values.core.stage_params import (
    FRAMES,
    AudioSamples,
    DecodedTiles,
    DecodeParams,
    Encoded,
    EncodeParams,
    ImageEmbeds,
    ImagePixels,
    Latent,
    Mask,
    Output,
    PixelArray,
    RunHooks,
    VideoFrames,
)
from modelpool.pool.values.core.stopping import stop_check
from modelpool.pool.values.specs.spec import ExecutionMode
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher

#: amplitude of clips that are taken for silence. Source: diffusers' AceStepPipeline
SMALLEST_PEAK = 1e-6


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """A text encoder of a model and its reading. `place` is its index among the encoders of the family, `name` its name
    in textual inversions; `tokenizer` is set if it is not CLIP's."""

    patcher: ModelPatcher
    facts: TextFacts | Reading = PLAIN_TEXT
    place: int = 0
    tokenizer: AnyTokenizer | None = None
    name: str = "clip_l"


def encode(
    work: EncodeParams, encoders: Sequence[TextEncoder], tokenizer: ClipTokenizer, hooks: RunHooks, text_set: str = ""
) -> Encoded:
    """Encode the text of `work` for the diffusion model: the outputs of `encoders`, concatenated or, with `text_set`,
    combined as the family requires. One step, or one for each token that is written. Raises Stopped at a layer."""
    return encode_batch((work,), encoders, tokenizer, hooks, text_set)[0]


def encode_batch(
    works: Sequence[EncodeParams],
    encoders: Sequence[TextEncoder],
    tokenizer: ClipTokenizer,
    hooks: RunHooks,
    text_set: str = "",
    embeddings: Sequence[Embedding] = (),
    images: Sequence[ImageEmbeds] = (),
) -> tuple[Encoded, ...]:
    """`encode` for each of `works`, which differ in their texts, in one run. `embeddings` are the textual inversions
    that the texts name, `images` the reference images that the text encoders read."""
    texts, negative = [work.text for work in works], [work.is_negative for work in works]
    read: list[tuple[ReadText, ...]] = []
    for number, encoder in enumerate(encoders):
        facts = with_layers_skipped(encoder.facts, works[0].layers_skipped)
        if isinstance(facts, Reading):
            facts = reading_of_work(facts, works[0])
        elif works[0].pooled and not facts.gives_pooled:
            facts = replace(reading_of(facts), pooled=Pooled.PLAIN)
        with encoder.patcher.running(stop_check(hooks)) as module:
            if isinstance(facts, Reading) and facts.connects:
                read.append(connected(module, read[-1], encoder.patcher.compute_dtype))
                continue
            own, known = encoder.tokenizer or tokenizer, {}
            if embeddings and isinstance(own, ClipTokenizer):
                config: Any = module.config  # transformers is not typed
                known = {each.name: each.for_encoder(encoder.name, config.hidden_size) for each in embeddings}
            device = encoder.patcher.device
            image_states = [ImageStates(torch.from_numpy(each.states_LD.copy()), *each.grid) for each in images]
            sees = isinstance(facts, Reading) and facts.sees
            how: dict[str, Any] = {"embeddings": known, "negative": negative, "images": image_states if sees else ()}
            how["tokens"] = [work.tokens[number] if work.tokens else None for work in works]
            how["writing"] = None if works[0].writes is None else TokenWriting(works[0].writes, hooks.on_step)
            read.append(read_texts(module, own, texts, device, facts, **how))
    if works[0].writes is None:  # otherwise each token was a step
        hooks.on_step(1, 1)
    by_text = list(zip(*read, strict=True))
    if text_set:
        places = [encoder.place for encoder in encoders]
        return tuple(_joined_states(text_set, dict(zip(places, parts, strict=True))) for parts in by_text)
    return tuple(_encoded(parts) for parts in by_text)


def _joined_states(text_set: str, parts: Mapping[int, ReadText]) -> Encoded:
    """Combine the outputs of the available encoders for one text, as the family requires."""
    members = readings_of(text_set)
    assert members is not None, f"no readings are defined for {text_set}"
    kwargs = {
        name: value[0].to("cpu")
        for name, value in text_kwargs(text_set, [parts.get(i) for i in range(len(members))]).items()
    }
    context, pooled = kwargs.pop("context"), kwargs.pop("pooled", None)
    others = {name: value.numpy() for name, value in kwargs.items()}
    return Encoded(context.numpy(), None if pooled is None else pooled.numpy(), others)


def _encoded(parts: Sequence[ReadText]) -> Encoded:
    """Concatenate the outputs of the text encoders for one text."""
    context_LD = torch.cat([part.context_LD.to("cpu") for part in parts], dim=-1)
    pooled = [part.pooled_V.to("cpu") for part in parts if part.pooled_V is not None]
    return Encoded(context_LD.numpy(), torch.cat(pooled).numpy() if pooled else None)


def decode(
    sampled: Latent, vae: ModelPatcher, latent: LatentFacts, hooks: RunHooks, division: ExecutionMode | None = None
) -> ImagePixels:
    """Decode a latent to pixels. One step, or one per tile. Raises CorruptFile for NaN and infinity, and Stopped at a
    tile or layer.

    `division.tile` is the tile edge; tiles overlap by a quarter of it. A tile as large as the latent changes nothing.
    """
    image = decode_batch((sampled,), vae, latent, hooks, division)[0]
    assert isinstance(image, ImagePixels), "a video latent is decoded by `decode_batch`"
    return image


def decode_batch(
    sampled: Sequence[Latent],
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None = None,
    frame_rate: float = 0.0,
    seconds: float = 0.0,
    leading: int = 0,
) -> tuple[Output, ...]:
    """`decode` for each of `sampled`, latents of equal size, in one run; video latents become videos, with their audio
    track if they have one, audio latents audio of `seconds`. The first `leading` frames are dropped."""
    return begin_decode_batch(sampled, vae, latent, hooks, division, frame_rate, seconds, leading, HOST)()


def begin_decode_batch(
    sampled: Sequence[Latent],
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None,
    frame_rate: float,
    seconds: float,
    leading: int,
    into: torch.device,
    requested: Tiling | None = None,
) -> Callable[[], tuple[Output, ...]]:
    """Begin `decode_batch`: images and videos are moved to the device `into`, which may still compute them then; with
    `requested` tiles they are blended there. Returns a function that moves them on to the host and returns the
    results. That raises CorruptFile for NaN and infinity."""
    scaled_BC = torch.stack([torch.from_numpy(each.samples_CHW.copy()) for each in sampled])
    if latent.audio is not None:
        rate, peak = latent.audio.samples_per_second, latent.audio.peak
        samples_BC = decoded(scaled_BC, vae, latent, hooks, division)
        expect_finite((samples_BC.sum(),), vae)
        return lambda: tuple(_audio(audio_CS, int(seconds * rate), rate, peak) for audio_CS in samples_BC.unbind())
    sounds = _sounds(sampled, vae, hooks)
    # bytes are made on the device: a quarter of what float32 is on the bus, and no passes on the CPU
    sums: list[Tensor] = []
    levels_BC = decoded(scaled_BC, vae, latent, hooks, division, partial(as_bytes, sums=sums), into, requested)

    def outputs() -> tuple[Output, ...]:
        bytes_BC = levels_BC.cpu()
        expect_finite(sums, vae)
        if bytes_BC.dim() == 5:
            pairs = zip(bytes_BC.unbind(), sounds, strict=True)
            return tuple(VideoFrames(_own(video_THWC[leading:]), frame_rate, sound) for video_THWC, sound in pairs)
        return tuple(ImagePixels(_own(image_HWC)) for image_HWC in bytes_BC.unbind())

    return outputs


def decode_part(
    sampled: Latent,
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None,
    work: DecodeParams,
) -> DecodedTiles:
    """Compute the tiles that are the part of `work`, and in the first part the audio track. One step for each tile.
    Raises CorruptFile for NaN and infinity, and Stopped at a tile or layer."""
    sound = _sounds((sampled,), vae, hooks)[0] if work.part == 1 and work.track != FRAMES else None
    scaled_BC = torch.from_numpy(sampled.samples_CHW.copy())[None]
    return decoded_part(scaled_BC, vae, latent, hooks, division, work, sound)


def join_parts(parts: Sequence[DecodedTiles]) -> Output:
    """Return the image or video of which `parts` are all tiles: the bytes of `decode_batch` with the same tiles."""
    grid, levels = parts[0].grid, joined_bytes(parts)
    if levels.dim() == 4:
        sound = next((part.sound for part in parts if part.sound is not None), None)
        return VideoFrames(_own(levels[grid.dropped :]), grid.frame_rate, sound)
    return ImagePixels(_own(levels))


def vae_encode(
    image: ImagePixels,
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    seed: int | None = None,
    division: ExecutionMode | None = None,
    hidden: Mask | None = None,
    shaken: tuple[float, int] = (0.0, 0),
    bright: bool = False,
    black: bool = False,
) -> Latent:
    """Encode pixels to a latent in the scale of the diffusion model: the mean of the VAE posterior or, with `seed`, a
    sample with the noise of that seed. One step, or one per tile; `division.tile` is in latent cells here too. Pixels
    where `hidden` is at least half white become grey, or black with `black`. `shaken` is the standard deviation of
    noise on the pixels, which are in [-1, 1], and its seed; `bright` as in `EncodeImageParams`.

    Raises UnusableField for a size that is not a whole number of latent cells, CorruptFile for a result with NaN or
    infinity, and Stopped at a tile or layer.
    """
    pixels_BCHW = torch.from_numpy(image.pixels_HWC.copy()).permute(2, 0, 1)[None].float()
    # Source: the inference code of Stability-AI/sd3.5, for edges: 255 times an image from 0 to 1, halved, and a half
    pixels_BCHW = pixels_BCHW * 0.5 + 0.5 if bright else pixels_BCHW / 127.5 - 1.0
    strength, own_seed = shaken
    if strength:
        pixels_BCHW = pixels_BCHW + strength * ImageNoise(own_seed).draw(tuple(pixels_BCHW.shape))
    if hidden is not None:
        pixels_BCHW = pixels_BCHW.masked_fill(torch.from_numpy(hidden.values_HW >= HALF), -1.0 if black else 0.0)
    noise = None if seed is None else ImageNoise(seed)
    return _finite_latent(encoded(pixels_BCHW, vae, latent, hooks, noise, division), vae)


def vae_encode_beginning(
    images: Sequence[ImagePixels],
    frames: int,
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None = None,
    last: ImagePixels | None = None,
) -> Latent:
    """Encode a video of `frames` frames: `images` first, `last` last, the others grey. As `vae_encode`."""
    high, wide, channels = images[0].pixels_HWC.shape
    video_BCTHW = torch.zeros((1, channels, frames, high, wide))
    for place, image in enumerate(images):
        video_BCTHW[0, :, place] = torch.from_numpy(image.pixels_HWC.copy()).permute(2, 0, 1).float() / 127.5 - 1.0
    if last is not None:
        video_BCTHW[0, :, -1] = torch.from_numpy(last.pixels_HWC.copy()).permute(2, 0, 1).float() / 127.5 - 1.0
    return _finite_latent(encoded(video_BCTHW, vae, latent, hooks, None, division), vae)


def _finite_latent(samples_BC: Tensor, vae: ModelPatcher) -> Latent:
    if not torch.isfinite(samples_BC).all():
        raise CorruptFile(f"VAE {vae.key}: found a latent with NaN or infinity, expected numbers")
    return Latent(samples_BC[0].contiguous().numpy())


def _sounds(sampled: Sequence[Latent], vae: ModelPatcher, hooks: RunHooks) -> tuple[AudioSamples | None, ...]:
    """Return the audio track of each of `sampled`; None for those without, and for VAEs that decode none."""
    latents = [torch.from_numpy(each.sound_LA.copy()) for each in sampled if each.sound_LA is not None]
    sounding = sound_of(vae.module) is not None and len(latents) == len(sampled)
    if not sounding:
        return (None,) * len(sampled)
    with vae.running(stop_check(hooks)) as module:
        decoder = sound_of(module)
        assert decoder is not None, "the module of the patcher"
        samples_BCS = decoder(torch.stack(latents).to(vae.device), vae.compute_dtype).float().cpu()
        expect_finite((samples_BCS.sum(),), vae)
        rate = decoder.samples_per_second
    return tuple(_audio(samples_CS, samples_CS.shape[1], rate) for samples_CS in samples_BCS.unbind())


def decode_sounds(sampled: Sequence[Latent], vae: ModelPatcher, hooks: RunHooks) -> tuple[AudioSamples, ...]:
    """Return the audio track of each of `sampled`, without frames. One step. Raises UnusableField for a VAE that
    decodes none."""
    found = tuple(_present(sound, vae) for sound in _sounds(sampled, vae, hooks))
    hooks.on_step(1, 1)
    return found


def _present(sound: AudioSamples | None, vae: ModelPatcher) -> AudioSamples:
    """Return an audio track that is asked for alone. Raises UnusableField for none."""
    if sound is None:
        raise UnusableField(f"VAE {vae.key}: found none that decodes audio tracks, expected one")
    return sound


def _audio(samples_CS: Tensor, count: int, samples_per_second: int, peak: float = 0.0) -> AudioSamples:
    """The first `count` decoded samples, or all if there are fewer; with a `peak`, scaled to that amplitude."""
    if peak:
        samples_CS = samples_CS.float() * (peak / samples_CS.float().abs().amax().clamp(min=SMALLEST_PEAK))
    return AudioSamples(samples_CS[:, :count].T.float().contiguous().numpy(), samples_per_second)


def _own(levels: Tensor) -> PixelArray:
    """The bytes of one image or video, without the rest of its batch."""
    found: PixelArray = (
        levels.numpy() if levels.numel() == levels.untyped_storage().nbytes() else levels.clone().numpy()
    )
    return found
