"""Peak device bytes of each stage without weights, in full and divided execution, by dry runs of the stage's own code.

Mirrors the device calls of `pool.engine.stages` and `pool.engine.sampling_stage`: the text encoder over all chunks of a
text, the sampler loop around the diffusion model, the VAE over a latent or one tile. Device-independent, without
margin.

Shape legend: B batch, C latent channels, H W height and width of a latent, L tokens, D text width.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from modelpool.pool.catalog.estimates.counted_options import CountedOptions, counted_options
from modelpool.pool.families.parts.audio_tracks import KEPT_SOUND, VOICE, SoundTrack, sound_length
from modelpool.pool.families.parts.text_reading import Reading
from modelpool.pool.families.parts.two_stages import prior_channels
from modelpool.pool.inference.conditioning.conditions import Condition, inputs_on
from modelpool.pool.inference.conditioning.first_frame import first_frame_inputs, first_frame_shape
from modelpool.pool.inference.conditioning.guides import guide_shape, placed_guides
from modelpool.pool.inference.conditioning.image_concat import PRIOR, empty_image_inputs, left_out, repeats_image
from modelpool.pool.inference.conditioning.image_labels import empty_image_labels
from modelpool.pool.inference.conditioning.inpainting import Inpainting
from modelpool.pool.inference.conditioning.micro_conditioning import (
    CONTEXT,
    IMAGE,
    LYRICS,
    Residuals,
    empty_micro_conditioning,
)
from modelpool.pool.inference.conditioning.prompts import Prompts
from modelpool.pool.inference.conditioning.regions import Regions
from modelpool.pool.inference.conditioning.starts import StartLatent
from modelpool.pool.inference.controlnets.calls import ControlInputs
from modelpool.pool.inference.controlnets.controlnet_bytes import (
    ControlBytes,
    ControlStage,
    control_bytes,
    reads_prompt_only,
)
from modelpool.pool.inference.guidance.call_model import call_model, number_inputs
from modelpool.pool.inference.guidance.guided_steps import ModelCall
from modelpool.pool.inference.guidance.model_guiders import FirstFrame, guider_of
from modelpool.pool.inference.guidance.sampling_run import ImagesToDenoise, denoise_images
from modelpool.pool.inference.pixels.audio_latents import CHANNELS, audio_codec, cell_samples, samples_encoded
from modelpool.pool.inference.pixels.latent_pixels import KL, codec_of, sampled_shape, sound_length_of
from modelpool.pool.inference.pixels.sound_latents import sound_samples
from modelpool.pool.inference.pixels.tiled_vae import Tiling, decode_latent, encode_moments, frame_by_frame
from modelpool.pool.inference.sampling.partial_run import GuidanceMemory
from modelpool.pool.inference.sampling.schedules import sd1_sigma_table
from modelpool.pool.models.components.text.connectors import connected
from modelpool.pool.models.components.text.lengths import ReadLength
from modelpool.pool.models.components.vae.audio_decoders import sound_of
from modelpool.pool.models.components.vision.preprocess import side_of, states
from modelpool.pool.models.components.vision.seen_images import empty_seen_patches, seen_states
from modelpool.pool.models.text.chunks import CHUNK_TOKENS, Chunk
from modelpool.pool.models.text.encode import (
    AnyTokenizer,
    Embeddings,
    ReadText,
    matched_length,
    read_texts,
)
from modelpool.pool.models.text.image_tokens import ImageStates
from modelpool.pool.models.text.token_writer import TokenWriting
from modelpool.pool.values.core.family_facts import LatentFacts, TextFacts
from modelpool.pool.values.core.prompt_tokens import PromptTokens
from modelpool.pool.values.core.sampling_facts import PLAIN_SAMPLING, SamplingFacts
from modelpool.pool.values.core.stage_params import (
    DecodeParams,
    EncodeImageParams,
    EncodeParams,
    KeptSoundCondition,
    MaskCondition,
    ModelStageParams,
    RunHooks,
    SampleParams,
    StartCondition,
    Stopped,
    VisionEncodeParams,
    VoiceCondition,
)
from modelpool.pool.weights.patcher.blocks.diffusers_names import block_lists
from modelpool.pool.weights.patcher.blocks.dit import BlockForm
from modelpool.pool.weights.tracing.activation_bytes import PeakCounter, StageModule
from modelpool.pool.weights.tracing.dry_run import META

#: tile edges of a VAE in latent cells, largest first
TILES: tuple[int, ...] = (64, 48, 32, 24, 16, 12, 8)
#: the same for audio; an audio cell depends on some ten others
AUDIO_TILES: tuple[int, ...] = (4096, 2048, 1024, 512, 256, 128)
#: steps of the dry run: the history and noise of a sampler are allocated by the fifth step
_STEPS, _STEPS_LOOKED_AT = 8, 5
#: the two means, in float32 at most, of which the change between steps is the ratio
_CHANGE_BYTES = 8
#: tokens of an unknown text
TYPICAL_TOKENS = 3 * CHUNK_TOKENS
#: (tokens) -> text inputs of a model for a text of that length, by name, without values, batch 1
EmptyConditioning: TypeAlias = Callable[[int], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class TextShape:
    """Everything that the activations of encoding a text depend on.

    weighted  some token has a weight other than 1: the empty text is encoded too
    tokens    number of tokens that the diffusion model reads
    read      lengths for each text encoder, if they do not all read the same chunks
    learned   it names textual inversions
    """

    weighted: bool
    tokens: int
    read: tuple[ReadLength, ...] = ()
    learned: bool = False


def text_shape(chunks: Sequence[Chunk]) -> TextShape:
    """Return the shape of a text that all encoders read in the same chunks."""
    weighted, learned = (any(map(attrgetter(name), chunks)) for name in ("is_weighted", "learned"))
    return TextShape(weighted, len(chunks) * CHUNK_TOKENS, learned=learned)


@dataclass(frozen=True, slots=True)
class TextStage:
    """A text encoder, its reading, and what it reads of a prompt: tokens, and without values reference images and the
    vectors of textual inversions."""

    module: StageModule
    facts: TextFacts | Reading
    tokenizer: AnyTokenizer
    tokens: PromptTokens | None = None
    images: tuple[ImageStates, ...] = ()
    embeddings: Embeddings = field(default_factory=dict)


def encode_bytes(text_encoders: Sequence[TextStage], work: EncodeParams) -> int:
    """Return the device memory of encoding the text of `work` with the text encoders one after the other, without
    weights; equal for texts of one `TextShape`."""
    read_bytes, most_bytes = 0, 0
    before: list[ReadText] = []
    for encoder in text_encoders:
        peak_bytes, own_bytes, before = _read_bytes(encoder, work, before)
        most_bytes = max(most_bytes, read_bytes + peak_bytes)
        read_bytes += own_bytes  # results stay until all encoders have run
    return most_bytes


def sample_bytes(
    diffusion_model: StageModule,
    work: SampleParams,
    latent: LatentFacts,
    context_tokens: Sequence[int],
    max_batch: int = 0,
    facts: SamplingFacts = PLAIN_SAMPLING,
    text_inputs: EmptyConditioning | None = None,
    controls: Sequence[ControlStage] = (),
) -> int:
    """Return the device memory of `work` without weights. `controls` are its ControlNets.

    `context_tokens` are the lengths of its texts; with `max_batch` 1 they are evaluated separately. Depends on the
    size, the sampler, the lengths, the options (`counted_options`) and whether `work.cfg` is 1. `text_inputs` returns
    the text inputs of models that read more than a plain text.
    """
    track = SoundTrack.of(facts.video, work.shape.frames, work.shape.frame_rate, work.shape.leading)
    options = CountedOptions.of(work, diffusion_model.module, facts.model, track)
    if work.options.skips_by_content or facts.has_unconditional:
        max_batch = 1  # the cache decides for each text; a second model reads the negative one
    if facts.writes_tokens and not work.regions:
        max_batch = 1  # a negative prompt has no tokens
    lengths, regional = list(context_tokens), len(work.regions)
    if facts.learned_negative:
        lengths = lengths[:1] * (2 if work.reads_negative else 1)
    lengths, of_regions = lengths[: len(lengths) - regional], lengths[len(lengths) - regional :]
    common = _common_length(lengths, text_inputs) if len(lengths) == 2 and max_batch != 1 else None
    if common is not None:
        lengths = [common] * 2
    shape_CHW = sampled_shape(work, latent)
    call_CHW = options.call_shape(shape_CHW)
    inputs_of = partial(_inputs, diffusion_model.module, work, call_CHW, facts=facts, text_inputs=text_inputs)
    alone = inputs_of(1, lengths[0]) if reads_prompt_only(controls) else None
    model_bytes: dict[tuple[int, int], int] = {}

    def predict_noise(x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor, **_: Tensor) -> Tensor:
        size_bytes = _known_bytes(model_bytes, context_BLD.shape[0], context_BLD.shape[1])
        held = torch.empty(size_bytes, dtype=torch.uint8, device=META)
        del held
        return torch.empty_like(x_BCHW, dtype=diffusion_model.compute_dtype)

    run = lengths if work.reads_negative else lengths[:1]
    cached_bytes = 0
    together = Counter(run if common is not None or (len(run) > 2 and max_batch != 1) else set(run))
    if len(run) == 2 and work.guidance.without_image and max_batch != 1 and not left_out(work, facts):
        together[lengths[1]] += 1  # without reference images its prediction has other inputs, and is made by itself
    together.update(of_regions if max_batch != 1 else set(of_regions) - together.keys())
    for length, batch in together.items():
        inputs = inputs_of(batch, length)
        said = control_bytes(controls, diffusion_model, (alone or inputs).heard())
        with _noted_cache(diffusion_model.module, work) as noted_bytes:
            called_bytes = said.held_bytes + _model_call_bytes(diffusion_model, facts, inputs, said, options)
        cached_bytes = max(cached_bytes, sum(noted_bytes))
        # texts of some models have a fixed length
        model_bytes[batch, inputs.context_BLD.shape[1]] = max(said.peak_bytes, called_bytes)
    texts, regions = ([_held(inputs_of(1, length)) for length in those] for those in (lengths, of_regions))
    looped_bytes = _loop_bytes(predict_noise, work, shape_CHW, texts, regions, max_batch, facts, options)
    return cached_bytes + options.held_bytes + looped_bytes


def _known_bytes(model_bytes: Mapping[tuple[int, int], int], batch: int, length: int) -> int:
    """Return the bytes of a call with this many texts of this length. Options ask for predictions of some of the texts
    of a step: these need no more than all of them."""
    known = model_bytes.get((batch, length))
    if known is not None:
        return known
    return min(found for (texts, own), found in model_bytes.items() if own == length and texts > batch)


@contextmanager
def _noted_cache(module: nn.Module, work: SampleParams) -> Iterator[list[int]]:
    """Yield a list of the bytes that a cache over the steps holds (`pool.inference.extensions.block_runs.BlockCache`),
    one entry for each call of `module` inside of the block. The cache holds two tensors of the size of the image tokens
    for each text, one during a call, and the joined tokens of blocks that read text and image together. Nothing without
    such a cache."""
    found: list[int] = []
    handles = []

    def noted(kind: str, block: nn.Module) -> Callable[..., None]:
        form = BlockForm.of(block, kind)
        held = 2 * (work.texts + work.options.extra_predictions) + 1

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments = form.signature.bind(block, *args, **kwargs).arguments
            image_BLD, text_BLD = arguments[form.img], arguments.get(form.txt or "")
            if not found:
                found.append(image_BLD.nbytes * held + _CHANGE_BYTES)
            if form.joined and text_BLD is not None:
                found[0] += image_BLD.nbytes + text_BLD.nbytes

        return note

    firsts = {id(blocks[0]): (kind, blocks[0]) for kind, blocks in block_lists(module)}
    for kind, block in firsts.values() if work.options.skips_by_content else ():
        handles.append(block.register_forward_pre_hook(noted(kind, block), with_kwargs=True))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _decode(module: nn.Module, latent_BC: Tensor, latent: LatentFacts, dtype: torch.dtype) -> Tensor:
    if latent.vae == KL:
        return frame_by_frame(partial(decode_latent, module), latent_BC.to(dtype))
    own_BC = latent_BC.unsqueeze(2) if latent.dimensions == 3 and latent_BC.dim() == 4 else latent_BC
    return codec_of(module, latent).decode(own_BC, dtype=dtype)


def _decode_sound(module: nn.Module, images: int, length: int, latent: LatentFacts, dtype: torch.dtype) -> object:
    decoder, sound = sound_of(module), latent.sound
    if decoder is None or sound is None:
        return None
    return decoder(torch.empty((images, length, sound.width), device=META), dtype)


def _encode(module: nn.Module, pixels_BC: Tensor, latent: LatentFacts) -> Tensor:
    if latent.vae == KL:
        return frame_by_frame(partial(encode_moments, module), pixels_BC)
    is_flat = latent.dimensions == 3 and pixels_BC.dim() == 4
    return codec_of(module, latent).encode(pixels_BC.unsqueeze(2) if is_flat else pixels_BC)


def decode_bytes(
    vae: StageModule, shape: tuple[int, ...], latent: LatentFacts, tile: int = 0, sound_length: int = 0
) -> int:
    """Return the device memory of decoding a latent of `shape` (without a batch), without weights; by tiles of `tile`
    cells unless 0. Before it, its audio track of `sound_length` positions is decoded; with the shape (), that alone.

    The tiles are merged on the host.
    """
    cells = shape[-2:] if len(shape) > 2 else shape[-1:]  # of audio [C, L]
    if tile:
        edges, _ = Tiling(tile).edges(cells)
        cells = tuple(map(min, edges, cells))

    def decode(module: nn.Module) -> object:
        latent_BC = torch.empty((1, *shape[: -len(cells)], *cells), dtype=torch.float32, device=META)
        return _decode(module, latent_BC, latent, vae.compute_dtype)

    if not sound_length:
        return vae.peak_bytes(decode) if shape else 0

    def decode_sound(module: nn.Module) -> object:
        return _decode_sound(module, 1, sound_length, latent, vae.compute_dtype)

    sound_bytes = vae.peak_bytes(decode_sound)
    return max(vae.peak_bytes(decode), sound_bytes) if shape else sound_bytes


def encode_audio_bytes(vae: StageModule, samples: int, latent: LatentFacts, tile: int = 0) -> int:
    """Return the device memory of encoding so many samples of each channel, without weights; by tiles of `tile` cells
    unless 0. The latent is merged on the host."""
    cell = cell_samples(latent)
    cells = samples // cell
    if tile:
        cells = min(cells, Tiling(tile).edges((cells,))[0][0])

    def encode(module: nn.Module) -> object:
        samples_1CS = torch.empty((1, CHANNELS, cells * cell), dtype=torch.float32, device=META)
        return audio_codec(module, latent).encode(samples_1CS.to(vae.compute_dtype))

    return vae.peak_bytes(encode)


def encode_sound_bytes(vae: StageModule, length: int) -> int:
    """Return the device memory of encoding the audio track of a video, of `length` positions, without weights."""
    return vae.peak_bytes(partial(_encode_sound, images=1, length=length, dtype=vae.compute_dtype))


def _encode_sound(module: nn.Module, images: int, length: int, dtype: torch.dtype) -> object:
    coder = sound_of(module)
    if coder is None:
        return None
    return coder.encode(torch.empty((images, CHANNELS, sound_samples(length)[1]), device=META), dtype)


def encode_image_bytes(
    vae: StageModule, cells: tuple[int, int], latent: LatentFacts, tile: int = 0, frames: int = 0
) -> int:
    """Return the device memory of encoding an image to a latent of `cells` (height, width), without weights; by tiles
    of `tile` cells unless 0; with `frames` a video. The latent is merged on the host."""
    if tile:
        edges, _ = Tiling(tile).edges(cells)
        cells = (min(edges[0], cells[0]), min(edges[1], cells[1]))

    def encode(module: nn.Module) -> object:
        sides = (cell * latent.downscale for cell in cells)
        pixels_BC = torch.empty((1, 3, *([frames] if frames else []), *sides), dtype=torch.float32, device=META)
        return _encode(module, pixels_BC.to(vae.compute_dtype), latent)

    return vae.peak_bytes(encode)


@dataclass(frozen=True, slots=True)
class AdapterStage:
    """An image prompt adapter in a run: its module, its call, the bytes of keys and values that stay until the end of
    the run, and the bytes of queries that stay during a block of the model; 0 for UNets."""

    stage: StageModule
    call: Callable[[nn.Module], object]
    held_bytes: int
    queries_bytes: int = 0


def with_image_prompts(sampled_bytes: int, adapters: Sequence[AdapterStage]) -> int:
    """Return the device memory of a run that needs `sampled_bytes` without its image prompts: their adapters are called
    one after the other before the first step."""
    held_bytes = peak_bytes = 0
    for adapter in adapters:
        peak_bytes = max(peak_bytes, held_bytes + adapter.stage.peak_bytes(adapter.call))
        held_bytes += adapter.held_bytes
    queries_bytes = max((adapter.queries_bytes for adapter in adapters), default=0)
    return max(peak_bytes, held_bytes + sampled_bytes + queries_bytes)


def vision_encode_bytes(encoder: StageModule, facts: SamplingFacts, size: tuple[int, int] = (0, 0)) -> int:
    """Return the device memory of encoding an image of `size` with a vision encoder, without weights; the image comes
    from the host."""
    return encoder.peak_bytes(lambda module: _see(module, facts, 1, encoder.compute_dtype, size))


def _see(module: nn.Module, facts: SamplingFacts, images: int, dtype: torch.dtype, size: tuple[int, int]) -> Tensor:
    if facts.vision_use is None:
        return seen_states(module, empty_seen_patches(module, size).to(dtype), size)
    shown_BCHW = torch.empty((images, 3, *[side_of(module)] * 2), dtype=torch.float32, device=META)
    return states(module, shown_BCHW.to(dtype), facts.vision_use)


def tile_slowdown(cells: tuple[int, ...], tile: int) -> float:
    """Return the number of cells computed by tiles of `tile`, including overlaps, relative to all `cells`."""
    edges, overlaps = Tiling(tile).edges(cells)
    covered = 1
    for size, edge, overlap in zip(cells, edges, overlaps, strict=True):
        count = 1 if size <= edge else math.ceil((size - overlap) / (edge - overlap))
        covered *= size + (count - 1) * overlap
    return covered / math.prod(cells)


def stage_call(
    work: ModelStageParams,
    compute_dtype: torch.dtype,
    latent: LatentFacts,
    facts: SamplingFacts = PLAIN_SAMPLING,
    context_tokens: int = TYPICAL_TOKENS,
    images: int = 1,
    text_inputs: EmptyConditioning | None = None,
) -> Callable[[nn.Module], object]:
    """Return one call of the module that `work` runs, with inputs on the meta device, for dry runs: for texts of
    `context_tokens` and, in sampling and decoding, `images` images at once."""

    def empty(*shape: int, dtype: torch.dtype = compute_dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    match work:
        case EncodeParams():
            chunks = max(1, context_tokens // CHUNK_TOKENS)
            return lambda module: module(input_ids=empty(chunks, CHUNK_TOKENS, dtype=torch.long))
        case SampleParams():
            batch = images * (2 if work.reads_negative else 1)
            shape_CHW = sampled_shape(work, latent)
            return lambda module: _inputs(
                module, work, shape_CHW, batch, context_tokens, facts, text_inputs
            ).call_model(facts, module, compute_dtype)
        case VisionEncodeParams():
            return lambda module: _see(module, facts, images, compute_dtype, (work.width, work.height))
        case EncodeImageParams() if work.sound:
            return lambda module: _encode_sound(module, images, work.sound, compute_dtype)
        case EncodeImageParams() if work.seconds:
            return lambda module: audio_codec(module, latent).encode(
                empty(images, CHANNELS, samples_encoded(work.seconds, latent))
            )
        case EncodeImageParams():
            return lambda module: _encode(
                module,
                empty(images, 3, *([work.frames] if work.frames else []), work.height, work.width),
                latent.of_encoder,
            )
        case DecodeParams():
            shape, length = sampled_shape(work, latent), sound_length_of(work.shape, latent)
            return lambda module: (
                _decode_sound(module, images, length, latent, compute_dtype),
                _decode(module, empty(images, *shape), latent, compute_dtype),
            )


def _read_bytes(encoder: TextStage, work: EncodeParams, before: Sequence[ReadText]) -> tuple[int, int, list[ReadText]]:
    """Peak bytes of encoding the text of `work`, bytes of the result, and the result, without values. `before` is the
    result of the encoder before it."""
    read: list[ReadText] = []

    def call(module: nn.Module) -> None:
        if isinstance(encoder.facts, Reading) and encoder.facts.connects:
            read.extend(connected(module, before, encoder.module.compute_dtype))
            return
        how: dict[str, Any] = {"negative": (work.is_negative,), "tokens": (encoder.tokens,)}
        how["writing"] = None if work.writes is None else TokenWriting(work.writes)
        how |= {"images": encoder.images, "embeddings": encoder.embeddings}
        read.extend(read_texts(module, encoder.tokenizer, (work.text,), META, encoder.facts, **how))

    peak_bytes = encoder.module.peak_bytes(call)
    kept = [t for one in read for t in (one.context_LD, one.pooled_V, one.tokens_N) if t is not None]
    # a view keeps its whole storage alive; a mask is counted even for texts without one
    mask_bytes = sum(one.context_LD.shape[-2] for one in read)
    return peak_bytes, mask_bytes + sum(tensor.untyped_storage().nbytes() for tensor in kept), read


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """Inputs of one call of a diffusion model, without values, in float32."""

    x_BC: Tensor
    level_B: Tensor
    context_BLD: Tensor
    model_kwargs: Mapping[str, Tensor]

    def heard(self) -> ControlInputs:
        """The same for ControlNets, but for their images."""
        return ControlInputs(self.x_BC, self.level_B, self.context_BLD, self.x_BC, self.model_kwargs)

    def call_model(
        self, facts: SamplingFacts, module: nn.Module, dtype: torch.dtype, more: Residuals | None = None
    ) -> Tensor:
        """The call, with what ControlNets add."""
        return call_model(
            facts, module, self.x_BC.to(dtype), self.level_B, self.context_BLD.to(dtype), self.model_kwargs, more
        )


def _inputs(
    module: nn.Module,
    work: SampleParams,
    shape_CHW: tuple[int, ...],
    batch: int,
    length: int,
    facts: SamplingFacts,
    text_inputs: EmptyConditioning | None,
) -> _Inputs:
    x_BC = torch.empty((batch, *shape_CHW), dtype=torch.float32, device=META)
    level_B = torch.empty((batch,), dtype=torch.float32, device=META)
    if text_inputs is None:
        context_BLD = torch.empty((batch, length, text_width(module)), dtype=torch.float32, device=META)
        model_kwargs = empty_micro_conditioning(facts.size_conditions, module, batch, META)
        model_kwargs |= empty_image_labels(facts, module, batch, META)
        return _Inputs(
            x_BC, level_B, context_BLD, model_kwargs | empty_image_inputs(facts, work, shape_CHW, batch, META)
        )
    texts = {name: value.expand(batch, *value.shape[1:]).contiguous() for name, value in text_inputs(length).items()}
    context_BLD = texts.pop(CONTEXT)
    model_inputs = number_inputs(facts, work, batch)
    if facts.reads_lyrics:  # nearly all of the text
        model_inputs[LYRICS], context_BLD = context_BLD, context_BLD[:, :1].contiguous()
    model_inputs |= empty_image_inputs(facts, work, shape_CHW, batch, META)
    if work.prior is not None:
        model_inputs[PRIOR] = torch.empty(
            (batch, prior_channels(module), work.prior.height, work.prior.width), dtype=torch.float32, device=META
        )
    if work.image is not None and repeats_image(facts):
        model_inputs[IMAGE] = torch.empty((batch, shape_CHW[0], *shape_CHW[2:]), dtype=torch.float32, device=META)
    elif work.image is not None and facts.video is not None:
        first = torch.empty((batch, *first_frame_shape(facts.video, shape_CHW)), dtype=torch.float32, device=META)
        model_inputs |= first_frame_inputs(facts.video, first, shape_CHW[1])
    if work.guides:
        shapes = [(batch, *guide_shape(guide, shape_CHW)) for guide in work.guides]
        images = [torch.empty(shape, dtype=torch.float32, device=META) for shape in shapes]
        model_inputs |= placed_guides(work.guides, images, shape_CHW)
    if facts.video is not None and (sound := facts.video.sound) is not None:
        if work.has(KeptSoundCondition):
            length = sound_length(sound, work.shape.frames, work.shape.frame_rate)
            model_inputs[KEPT_SOUND] = torch.empty((batch, length, sound.width), dtype=torch.float32, device=META)
        for voice in work.all_of(VoiceCondition):
            model_inputs[VOICE] = torch.empty((batch, voice.length, sound.width), dtype=torch.float32, device=META)
    others = {**{k: v for k, v in texts.items() if k in facts.reads}, **inputs_on(model_inputs, META)}
    return _Inputs(x_BC, level_B, context_BLD, others)


def _held(inputs: _Inputs) -> Condition:
    """Inputs of one text that a run holds on the host until it starts."""
    model_kwargs = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in inputs.model_kwargs.items()}
    return Condition(torch.empty(inputs.context_BLD.shape), model_kwargs=model_kwargs)


def _common_length(lengths: Sequence[int], text_inputs: EmptyConditioning | None) -> int | None:
    """The length of both texts of a run in one batch; None if they are evaluated separately."""
    if text_inputs is None:
        return matched_length(*lengths)
    return lengths[0] if lengths[0] == lengths[1] else None


def _model_call_bytes(
    model: StageModule, facts: SamplingFacts, inputs: _Inputs, said: ControlBytes, options: CountedOptions
) -> int:
    """Bytes that one call of the diffusion model adds to its inputs, the ControlNet residuals and what options keep
    until the next one."""
    count = len(inputs.x_BC)

    def call(own: nn.Module) -> object:
        return inputs.call_model(facts, own, model.compute_dtype, said.added(count))

    return model.peak_bytes(options.around(call, count)) - options.kept_bytes


def _loop_bytes(
    predict_noise: Callable[[Tensor, Tensor, Tensor], Tensor],
    work: SampleParams,
    shape_CHW: tuple[int, ...],
    texts: Sequence[Condition],
    regions: Sequence[Condition],
    max_batch: int,
    facts: SamplingFacts,
    options: CountedOptions,
) -> int:
    """Peak of the first steps of the sampler loop around `predict_noise`."""
    done = 0

    def on_step(steps_done: int, steps: int) -> None:
        nonlocal done
        done = steps_done

    hooks = RunHooks(on_step, lambda: done >= _STEPS_LOOKED_AT)
    cond, uncond = texts[0], texts[1] if len(texts) > 1 else None
    without = {name: value for name, value in cond.model_kwargs.items() if name == IMAGE}
    start = torch.empty((1, *shape_CHW)) if work.has(StartCondition) else None
    kept = None if start is None or not work.has(MaskCondition) else Inpainting(start, start[:, :1])
    counter = PeakCounter()
    with torch.no_grad(), counter:
        try:
            # listed levels may be fewer
            levels = tuple(1.0 - step / _STEPS for step in range(_STEPS)) if work.schedule.sigmas else ()
            schedule = replace(work.schedule, steps=_STEPS, first_step=0, switch=0, sigmas=levels)
            # a part of the steps may end before it is looked at; each step needs the same
            run = replace(work, schedule=schedule, options=counted_options(work.options), part=None)
            denoise_images(
                ImagesToDenoise(run, (run.seed,), shape_CHW),
                Prompts(
                    cond,
                    uncond,
                    Regions(tuple(regions), tuple(torch.empty((1, 1, *shape_CHW[1:])) for _ in regions)),
                    without if work.guidance.without_image else None,
                    texts[2].context_BLD if len(texts) > 2 else None,
                    left_out(work, facts),
                ),
                ModelCall(predict_noise, sd1_sigma_table(), options=options.model_options, max_batch=max_batch),
                guider_of(facts, run, cond, (1, *shape_CHW), META, GuidanceMemory()),
                META,
                hooks,
                StartLatent(start, kept),
                FirstFrame.of(facts, work, cond),
            )
        except Stopped:
            return counter.peak_bytes
    raise AssertionError("the loop ended before it was stopped")


def text_width(model: nn.Module) -> int:
    """Return the width of the texts that a diffusion model reads."""
    return int(model.config.cross_attention_dim)  # type: ignore[union-attr, arg-type] # diffusers is not typed
