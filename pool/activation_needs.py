"""How many bytes each stage holds on the device beside weights, whole and divided, by dry runs of the stage's own code.

Knows what `pool.stages` calls on the device: the text encoder over all chunks of a text, the sampler's loop around the
diffusion model, the VAE over a latent or over one tile of it. Knows no device and adds no margin.

Shape legend: B batch, C latent channels, H W height and width of a latent, L tokens, D text width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pool.activation import PeakCounter, peak_bytes
from pool.checkpoints.families import PLAIN_SAMPLING, LatentFacts, SamplingFacts, TextFacts
from pool.dry_run import META, AttentionForm
from pool.sampling.conditions import Condition
from pool.sampling.extras import call_unet, empty_extras
from pool.sampling.run import denoise_pictures
from pool.stages import latent_cells
from pool.text.chunks import CHUNK_TOKENS, Chunk, split_prompt
from pool.text.encode import ReadText, matched_length, read_texts
from pool.text.tokenizer import ClipTokenizer
from pool.tiling.vae import Tiling, decode_latent
from pool.work import DecodeWork, EncodeWork, RunHooks, SampleWork, Stopped, Work

#: edges of tiles that a VAE may be run by, in latent cells, largest first
TILES = (64, 48, 32, 24, 16, 12, 8)
#: what of a longer run is looked at: a sampler's history and its noise are there by the fifth step
_STEPS, _STEPS_LOOKED_AT = 8, 5
#: tokens of a text that nobody knows
USUAL_TOKENS = 3 * CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class TextShape:
    """What the activations of encoding a text depend on.

    chunks    of 77 tokens each
    weighted  some token weighs other than 1: the empty text is encoded with it
    """

    chunks: int
    weighted: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that the diffusion model reads."""
        return self.chunks * CHUNK_TOKENS


def text_shape(tokenizer: ClipTokenizer, text: str) -> TextShape:
    """The shape of `text`. Raises UnusableField as `parse_weights` does."""
    chunks: tuple[Chunk, ...] = split_prompt(tokenizer, text)
    return TextShape(len(chunks), any(chunk.is_weighted for chunk in chunks))


@dataclass(frozen=True, slots=True)
class StageModule:
    """What a stage runs: a built module, as `peak_bytes` takes it."""

    module: nn.Module
    compute_dtype: torch.dtype
    attention: AttentionForm = AttentionForm.FUSED

    def peak_bytes(self, call: Callable[[nn.Module], object]) -> int:
        """See `pool.activation.peak_bytes`."""
        return peak_bytes(self.module, self.compute_dtype, call, self.attention)


def encode_bytes(text_encoders: Sequence[tuple[StageModule, TextFacts]], tokenizer: ClipTokenizer, text: str) -> int:
    """Device memory beside weights for `text`, which the text encoders read one after the other; texts of one
    `TextShape` need the same."""
    read_bytes, most_bytes = 0, 0
    for encoder, facts in text_encoders:
        peak_bytes, own_bytes = _read_bytes(encoder, tokenizer, text, facts)
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
) -> int:
    """Device memory beside weights for `work`.

    `context_tokens` are the lengths of the texts that it reads; with `most_at_once` 1 they run apart. Depends on the
    size, the sampler, the lengths and whether `work.cfg` is 1.
    """
    lengths = list(context_tokens)
    common = matched_length(*lengths) if len(lengths) == 2 and most_at_once != 1 else None
    if common is not None:
        lengths = [common] * 2
    cells = latent_cells(work.width, work.height, latent)
    model_bytes: dict[tuple[int, int], int] = {}

    def predict_noise(x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor) -> Tensor:
        held = torch.empty(model_bytes[context_BLD.shape[0], context_BLD.shape[1]], dtype=torch.uint8, device=META)
        del held
        return torch.empty_like(x_BCHW, dtype=diffusion_model.compute_dtype)

    run = lengths if work.cfg != 1 else lengths[:1]
    batch = len(run) if common is not None else 1
    for length in set(run):
        model_bytes[batch, length] = _model_call_bytes(diffusion_model, (latent.channels, *cells), batch, length, facts)
    width = text_width(diffusion_model.module)
    contexts = [torch.empty(length, width) for length in lengths]
    return _loop_bytes(predict_noise, work, (latent.channels, *cells), contexts, most_at_once)


def decode_bytes(vae: StageModule, cells: tuple[int, int], channels: int, tile: int = 0) -> int:
    """Device memory beside weights to decode a latent of `cells` (height, width), by tiles of `tile` cells unless 0.

    The result of tiles is put together on the host.
    """
    if tile:
        edges, _ = Tiling(tile).edges(cells)
        cells = (min(edges[0], cells[0]), min(edges[1], cells[1]))

    def decode(module: nn.Module) -> object:
        latent_BCHW = torch.empty((1, channels, *cells), dtype=torch.float32, device=META)
        return decode_latent(module, latent_BCHW.to(vae.compute_dtype))

    return vae.peak_bytes(decode)


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
    pictures: int = 1,
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
            batch = pictures * (1 if work.cfg == 1 else 2)
            shape_CHW = (latent.channels, *latent_cells(work.width, work.height, latent))
            return lambda module: call_unet(
                module,
                empty(batch, *shape_CHW),
                empty(batch, dtype=torch.float32),
                empty(batch, context_tokens, text_width(module)),
                empty_extras(facts.size_conditions, module, batch, META),
            )
        case DecodeWork():
            cells = latent_cells(work.width, work.height, latent)
            return lambda module: decode_latent(module, empty(pictures, latent.channels, *cells))


def _read_bytes(encoder: StageModule, tokenizer: ClipTokenizer, text: str, facts: TextFacts) -> tuple[int, int]:
    """The peak of reading `text`, and what is read."""
    read: list[ReadText] = []
    peak_bytes = encoder.peak_bytes(lambda m: read.extend(read_texts(m, tokenizer, (text,), META, facts)))
    return peak_bytes, sum(one.context_LD.nbytes for one in read)


def _model_call_bytes(
    model: StageModule, shape_CHW: tuple[int, ...], batch: int, length: int, facts: SamplingFacts
) -> int:
    """What one call of the diffusion model adds to the inputs that the sampler made for it."""
    x_BCHW = torch.empty((batch, *shape_CHW), dtype=torch.float32, device=META)
    timestep_B = torch.empty((batch,), dtype=torch.float32, device=META)
    context_BLD = torch.empty((batch, length, text_width(model.module)), dtype=torch.float32, device=META)
    dtype, extras = model.compute_dtype, empty_extras(facts.size_conditions, model.module, batch, META)
    return model.peak_bytes(lambda m: call_unet(m, x_BCHW.to(dtype), timestep_B, context_BLD.to(dtype), extras))


def _loop_bytes(
    predict_noise: Callable[[Tensor, Tensor, Tensor], Tensor],
    work: SampleWork,
    shape_CHW: tuple[int, int, int],
    contexts: Sequence[Tensor],
    most_at_once: int,
) -> int:
    """The peak of the first steps of the sampler's loop around `predict_noise`."""
    done = 0

    def on_step(steps_done: int, steps: int) -> None:
        nonlocal done
        done = steps_done

    hooks = RunHooks(on_step, lambda: done >= _STEPS_LOOKED_AT)
    cond, uncond = Condition(contexts[0][None]), Condition(contexts[1][None]) if len(contexts) > 1 else None
    counter = PeakCounter()
    with torch.no_grad(), counter:
        try:
            denoise_pictures(
                predict_noise,
                replace(work, steps=_STEPS),
                (work.seed,),
                shape_CHW,
                cond,
                uncond,
                META,
                hooks,
                most_at_once=most_at_once,
            )
        except Stopped:
            return counter.peak_bytes
    raise AssertionError("the loop ended before it was stopped")


def text_width(model: nn.Module) -> int:
    """The width of the texts that a diffusion model reads."""
    return int(model.config.cross_attention_dim)  # type: ignore[union-attr, arg-type] # diffusers is not typed
