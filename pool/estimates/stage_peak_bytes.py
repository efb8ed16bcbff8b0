"""How many bytes each stage holds on the device beside weights, whole and divided, by dry runs of the stage's own code.

Knows what `pool.engine.stages` calls on the device: the text encoder over all chunks of a text, the sampler's loop
around the diffusion model, the VAE over a latent or over one tile of it. Knows no device and adds no margin.

Shape legend: B batch, C latent channels, H W height and width of a latent, L tokens, D text width.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from modelpool.pool.conditioning.conditions import Condition
from modelpool.pool.conditioning.first_frame import beginning_shape, told_of_beginning
from modelpool.pool.conditioning.image_concat import PRIOR, empty_told, repeats_image
from modelpool.pool.conditioning.inpainting import Inpainting
from modelpool.pool.conditioning.micro_conditioning import CONTEXT, FRAME_RATE, IMAGE, Residuals, empty_extras
from modelpool.pool.conditioning.regions import Regions
from modelpool.pool.controlnets.calls import Heard
from modelpool.pool.controlnets.controlnet_bytes import ControlBytes, ControlStage, control_bytes, hears_prompt
from modelpool.pool.core.family_facts import LatentFacts, TextFacts
from modelpool.pool.core.sampling_facts import PLAIN_SAMPLING, SamplingFacts
from modelpool.pool.core.stage_params import (
    DecodeWork,
    EncodeImageWork,
    EncodeWork,
    RunHooks,
    SampleWork,
    SeeImageWork,
    Stopped,
    Work,
)
from modelpool.pool.guidance.call_model import ask, numbers_told
from modelpool.pool.guidance.model_guiders import own_ways
from modelpool.pool.guidance.run import denoise_images
from modelpool.pool.models.diffusion.cascade_model import prior_channels
from modelpool.pool.models.text.lengths import ReadLength
from modelpool.pool.models.vision.preprocess import side_of, states
from modelpool.pool.models.vision.qwen import empty_patches, grid_of, read_patches
from modelpool.pool.pixels.latent_pixels import KL, codec_of, sampled_shape
from modelpool.pool.pixels.tiled_vae import Tiling, decode_latent, encode_moments, frame_by_frame
from modelpool.pool.text.chunks import CHUNK_TOKENS, Chunk, split_prompt
from modelpool.pool.text.clip_tokenizer import ClipTokenizer
from modelpool.pool.text.encode import AnyTokenizer, ReadText, matched_length, read_texts
from modelpool.pool.text.image_tokens import SeenImage
from modelpool.pool.text.reading import Reading
from modelpool.pool.tracing.activation_bytes import PeakCounter, StageModule
from modelpool.pool.tracing.dry_run import META

#: edges of tiles that a VAE may be run by, in latent cells, largest first
TILES = (64, 48, 32, 24, 16, 12, 8)
#: what of a longer run is looked at: a sampler's history and its noise are there by the fifth step
_STEPS, _STEPS_LOOKED_AT = 8, 5
#: tokens of a text that nobody knows
USUAL_TOKENS = 3 * CHUNK_TOKENS
#: (tokens) -> what a model is told of a text of so many, by name, without values, with a batch of one
EmptyTold: TypeAlias = Callable[[int], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class TextShape:
    """What the activations of encoding a text depend on.

    weighted  some token weighs other than 1: the empty text is encoded with it
    tokens    that the diffusion model reads
    read      how each text encoder reads it, where they read otherwise than all in the same chunks
    """

    weighted: bool
    tokens: int
    read: tuple[ReadLength, ...] = ()


def text_shape(tokenizer: ClipTokenizer, text: str) -> TextShape:
    """The shape of `text`. Raises UnusableField as `parse_weights` does."""
    chunks: tuple[Chunk, ...] = split_prompt(tokenizer, text)
    return TextShape(any(chunk.is_weighted for chunk in chunks), len(chunks) * CHUNK_TOKENS)


@dataclass(frozen=True, slots=True)
class TextStage:
    """A text encoder, how it is read, and which images it is shown, without values."""

    module: StageModule
    facts: TextFacts | Reading
    tokenizer: AnyTokenizer
    images: tuple[SeenImage, ...] = ()


def encode_bytes(text_encoders: Sequence[TextStage], text: str) -> int:
    """Device memory beside weights for `text`, which the text encoders read one after the other; texts of one
    `TextShape` need the same."""
    read_bytes, most_bytes = 0, 0
    for encoder in text_encoders:
        peak_bytes, own_bytes = _read_bytes(encoder, text)
        most_bytes = max(most_bytes, read_bytes + peak_bytes)
        read_bytes += own_bytes  # what is read stays until all have read
    return most_bytes


def sample_bytes(
    diffusion_model: StageModule,
    work: SampleWork,
    latent: LatentFacts,
    context_tokens: Sequence[int],
    most_at_once: int = 0,
    facts: SamplingFacts = PLAIN_SAMPLING,
    told: EmptyTold | None = None,
    controls: Sequence[ControlStage] = (),
) -> int:
    """Device memory beside weights for `work`. `controls` are the ControlNets that speak in it.

    `context_tokens` are the lengths of the texts that it reads; with `most_at_once` 1 they run apart. Depends on the
    size, the sampler, the lengths and whether `work.cfg` is 1. `told` is what a model is told of a text that is more
    than a text.
    """
    lengths, regional = list(context_tokens), len(work.regions)
    lengths, of_regions = lengths[: len(lengths) - regional], lengths[len(lengths) - regional :]
    common = _common_length(lengths, told) if len(lengths) == 2 and most_at_once != 1 else None
    if common is not None:
        lengths = [common] * 2
    shape_CHW = sampled_shape(work, latent)
    inputs_of = partial(_inputs, diffusion_model.module, work, shape_CHW, facts=facts, told=told)
    alone = inputs_of(1, lengths[0]) if hears_prompt(controls) else None
    model_bytes: dict[tuple[int, int], int] = {}

    def predict_noise(x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor, **_: Tensor) -> Tensor:
        held = torch.empty(model_bytes[context_BLD.shape[0], context_BLD.shape[1]], dtype=torch.uint8, device=META)
        del held
        return torch.empty_like(x_BCHW, dtype=diffusion_model.compute_dtype)

    run = lengths if work.cfg != 1 else lengths[:1]
    together = Counter(run if common is not None else set(run))
    if work.asks_without_image and most_at_once != 1:
        together[lengths[1]] += 1
    together.update(of_regions if most_at_once != 1 else set(of_regions) - together.keys())
    for length, batch in together.items():
        inputs = inputs_of(batch, length)
        said = control_bytes(controls, diffusion_model, (alone or inputs).heard())
        called_bytes = said.held_bytes + _model_call_bytes(diffusion_model, facts, inputs, said)
        # texts of some models have one length, whatever is asked for
        model_bytes[batch, inputs.context_BLD.shape[1]] = max(said.peak_bytes, called_bytes)
    texts, regions = ([_held(inputs_of(1, length)) for length in those] for those in (lengths, of_regions))
    return _loop_bytes(predict_noise, work, shape_CHW, texts, regions, most_at_once, facts)


def _decode(module: nn.Module, latent_BC: Tensor, latent: LatentFacts, dtype: torch.dtype) -> Tensor:
    if latent.vae == KL:
        return frame_by_frame(partial(decode_latent, module), latent_BC.to(dtype))
    own_BC = latent_BC.unsqueeze(2) if latent.dimensions == 3 and latent_BC.dim() == 4 else latent_BC
    return codec_of(module, latent).decode(own_BC, dtype=dtype)


def _encode(module: nn.Module, pixels_BC: Tensor, latent: LatentFacts) -> Tensor:
    if latent.vae == KL:
        return frame_by_frame(partial(encode_moments, module), pixels_BC)
    is_flat = latent.dimensions == 3 and pixels_BC.dim() == 4
    return codec_of(module, latent).encode(pixels_BC.unsqueeze(2) if is_flat else pixels_BC)


def decode_bytes(vae: StageModule, shape: tuple[int, ...], latent: LatentFacts, tile: int = 0) -> int:
    """Device memory beside weights to decode a latent of `shape` (without a batch), by tiles of `tile` cells unless 0.

    The result of tiles is put together on the host.
    """
    cells = shape[-2], shape[-1]
    if tile:
        edges, _ = Tiling(tile).edges(cells)
        cells = (min(edges[0], cells[0]), min(edges[1], cells[1]))

    def decode(module: nn.Module) -> object:
        latent_BC = torch.empty((1, *shape[:-2], *cells), dtype=torch.float32, device=META)
        return _decode(module, latent_BC, latent, vae.compute_dtype)

    return vae.peak_bytes(decode)


def encode_image_bytes(
    vae: StageModule, cells: tuple[int, int], latent: LatentFacts, tile: int = 0, frames: int = 0
) -> int:
    """Device memory beside weights to encode an image whose latent has `cells` (height, width), by tiles of `tile`
    cells unless 0; with `frames` a video of so many. The latent is put together on the host."""
    if tile:
        edges, _ = Tiling(tile).edges(cells)
        cells = (min(edges[0], cells[0]), min(edges[1], cells[1]))

    def encode(module: nn.Module) -> object:
        sides = (cell * latent.downscale for cell in cells)
        pixels_BC = torch.empty((1, 3, *([frames] if frames else []), *sides), dtype=torch.float32, device=META)
        return _encode(module, pixels_BC.to(vae.compute_dtype), latent)

    return vae.peak_bytes(encode)


def see_bytes(encoder: StageModule, facts: SamplingFacts, size: tuple[int, int] = (0, 0)) -> int:
    """Device memory beside weights to see an image of `size` with a vision encoder; it comes from the host."""
    return encoder.peak_bytes(lambda module: _see(module, facts, 1, encoder.compute_dtype, size))


def _see(module: nn.Module, facts: SamplingFacts, images: int, dtype: torch.dtype, size: tuple[int, int]) -> Tensor:
    if facts.sight is None:
        return read_patches(module, empty_patches(size).to(dtype), grid_of(size))
    shown_BCHW = torch.empty((images, 3, *[side_of(module)] * 2), dtype=torch.float32, device=META)
    return states(module, shown_BCHW.to(dtype), facts.sight)


def tile_slowdown(cells: tuple[int, int], tile: int) -> float:
    """Cells that are computed by tiles of `tile`, overlaps counted each time, as a multiple of all `cells`."""
    edges, overlaps = Tiling(tile).edges(cells)
    covered = 1
    for size, edge, overlap in zip(cells, edges, overlaps, strict=True):
        count = 1 if size <= edge else math.ceil((size - overlap) / (edge - overlap))
        covered *= size + (count - 1) * overlap
    return covered / math.prod(cells)


def stage_call(
    work: Work,
    compute_dtype: torch.dtype,
    latent: LatentFacts,
    facts: SamplingFacts = PLAIN_SAMPLING,
    context_tokens: int = USUAL_TOKENS,
    images: int = 1,
    told: EmptyTold | None = None,
) -> Callable[[nn.Module], object]:
    """One call of the module that `work` runs, with inputs on the meta device, for dry runs: for texts of
    `context_tokens` and, in sampling and decoding, so many `pictures` at once."""

    def empty(*shape: int, dtype: torch.dtype = compute_dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    match work:
        case EncodeWork():
            chunks = max(1, context_tokens // CHUNK_TOKENS)
            return lambda module: module(input_ids=empty(chunks, CHUNK_TOKENS, dtype=torch.long))
        case SampleWork():
            batch = images * (1 if work.cfg == 1 else 2)
            shape_CHW = sampled_shape(work, latent)
            return lambda module: _inputs(module, work, shape_CHW, batch, context_tokens, facts, told).ask(
                facts, module, compute_dtype
            )
        case SeeImageWork():
            return lambda module: _see(module, facts, images, compute_dtype, (work.width, work.height))
        case EncodeImageWork():
            return lambda module: _encode(
                module, empty(images, 3, *([work.frames] if work.frames else []), work.height, work.width), latent
            )
        case DecodeWork():
            shape = sampled_shape(work, latent)
            return lambda module: _decode(module, empty(images, *shape), latent, compute_dtype)


def _read_bytes(encoder: TextStage, text: str) -> tuple[int, int]:
    """The peak of reading `text`, and what is read."""
    read: list[ReadText] = []

    def call(module: nn.Module) -> None:
        read.extend(read_texts(module, encoder.tokenizer, (text,), META, encoder.facts, images=encoder.images))

    peak_bytes = encoder.module.peak_bytes(call)
    kept = [tensor for one in read for tensor in (one.context_LD, one.pooled_V) if tensor is not None]
    # a part of a tensor holds all of it; a mask is counted for texts too that need none
    mask_bytes = sum(one.context_LD.shape[-2] for one in read)
    return peak_bytes, mask_bytes + sum(tensor.untyped_storage().nbytes() for tensor in kept)


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """What one call of a diffusion model is given, without values, in float32."""

    x_BC: Tensor
    level_B: Tensor
    context_BLD: Tensor
    extras: Mapping[str, Tensor]

    def heard(self) -> Heard:
        """The same for ControlNets, but for their images."""
        return Heard(self.x_BC, self.level_B, self.context_BLD, self.x_BC, self.extras)

    def ask(self, facts: SamplingFacts, module: nn.Module, dtype: torch.dtype, more: Residuals | None = None) -> Tensor:
        """The call, with what ControlNets add."""
        return ask(facts, module, self.x_BC.to(dtype), self.level_B, self.context_BLD.to(dtype), self.extras, more)


def _inputs(
    module: nn.Module,
    work: SampleWork,
    shape_CHW: tuple[int, ...],
    batch: int,
    length: int,
    facts: SamplingFacts,
    told: EmptyTold | None,
) -> _Inputs:
    x_BC = torch.empty((batch, *shape_CHW), dtype=torch.float32, device=META)
    level_B = torch.empty((batch,), dtype=torch.float32, device=META)
    if told is None:
        context_BLD = torch.empty((batch, length, text_width(module)), dtype=torch.float32, device=META)
        extras = empty_extras(facts.size_conditions, module, batch, META)
        return _Inputs(x_BC, level_B, context_BLD, extras | empty_told(facts, work, shape_CHW, batch, META))
    texts = {name: value.expand(batch, *value.shape[1:]).contiguous() for name, value in told(length).items()}
    context_BLD = texts.pop(CONTEXT)
    told_numbers = numbers_told(facts, work, batch)
    told_numbers |= empty_told(facts, work, shape_CHW, batch, META)
    if work.prior is not None:
        told_numbers[PRIOR] = torch.empty(
            (batch, prior_channels(module), *work.prior), dtype=torch.float32, device=META
        )
    if work.imaged and repeats_image(facts):
        told_numbers[IMAGE] = torch.empty((batch, shape_CHW[0], *shape_CHW[2:]), dtype=torch.float32, device=META)
    elif work.imaged and facts.video is not None:
        first = torch.empty((batch, *beginning_shape(facts.video, shape_CHW)), dtype=torch.float32, device=META)
        told_numbers |= told_of_beginning(facts.video, first, shape_CHW[1])
    # models read the frame rate as a number
    beside = {name: value if name == FRAME_RATE else value.to(META) for name, value in told_numbers.items()}
    return _Inputs(x_BC, level_B, context_BLD, {**{k: v for k, v in texts.items() if k in facts.reads}, **beside})


def _held(inputs: _Inputs) -> Condition:
    """What a run holds of one text and of what goes beside it, on the host until it begins."""
    beside = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in inputs.extras.items()}
    return Condition(torch.empty(inputs.context_BLD.shape), extras=beside)


def _common_length(lengths: Sequence[int], told: EmptyTold | None) -> int | None:
    """The length at which both texts of a run are in one batch; None where they run apart."""
    if told is None:
        return matched_length(*lengths)
    return lengths[0] if lengths[0] == lengths[1] else None


def _model_call_bytes(model: StageModule, facts: SamplingFacts, inputs: _Inputs, said: ControlBytes) -> int:
    """What one call of the diffusion model adds to the inputs that the sampler made for it, and to what is `said`."""
    return model.peak_bytes(lambda own: inputs.ask(facts, own, model.compute_dtype, said.added(len(inputs.x_BC))))


def _loop_bytes(
    predict_noise: Callable[[Tensor, Tensor, Tensor], Tensor],
    work: SampleWork,
    shape_CHW: tuple[int, ...],
    texts: Sequence[Condition],
    regions: Sequence[Condition],
    most_at_once: int,
    facts: SamplingFacts,
) -> int:
    """The peak of the first steps of the sampler's loop around `predict_noise`."""
    done = 0

    def on_step(steps_done: int, steps: int) -> None:
        nonlocal done
        done = steps_done

    hooks = RunHooks(on_step, lambda: done >= _STEPS_LOOKED_AT)
    cond, uncond = texts[0], texts[1] if len(texts) > 1 else None
    without = {name: value for name, value in cond.extras.items() if name == IMAGE}
    start = torch.empty((1, *shape_CHW)) if work.starts else None
    kept = None if start is None or not work.masked else Inpainting(start, start[:, :1])
    counter = PeakCounter()
    with torch.no_grad(), counter:
        try:
            denoise_images(
                predict_noise,
                replace(work, steps=_STEPS, first_step=0, switch=0),
                (work.seed,),
                shape_CHW,
                cond,
                uncond,
                META,
                hooks,
                inpainting=kept,
                most_at_once=most_at_once,
                start_BCHW=start,
                regions=Regions(
                    tuple(regions),
                    tuple(torch.empty((1, 1, *shape_CHW[1:])) for _ in regions),
                ),
                without_image=without if work.asks_without_image else None,
                ways=own_ways(facts, work, cond, 1, shape_CHW[1], META),
            )
        except Stopped:
            return counter.peak_bytes
    raise AssertionError("the loop ended before it was stopped")


def text_width(model: nn.Module) -> int:
    """The width of the texts that a diffusion model reads."""
    return int(model.config.cross_attention_dim)  # type: ignore[union-attr, arg-type] # diffusers is not typed
