"""A prompt through a text encoder: the conditioning that the diffusion model reads.

Knows how tokens and weights become tensors, as a `Reading` says. Runs on whatever the modules run on: call it inside
the compute context of `pool.ops` when their weights are cast on the way.

Shape legend: N rows of tokens (a text's chunks, for CLIP), T tokens of a row, L tokens that are told, D text width,
S states of a token that are read, V width of a pooled text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from modelpool.pool.core.family_facts import PLAIN_TEXT, TextFacts
from modelpool.pool.text.chunks import Chunk, empty_chunk, split_prompt
from modelpool.pool.text.clip_tokenizer import END_ID, ClipTokenizer
from modelpool.pool.text.image_tokens import SeenImage, shown_among_words, with_images
from modelpool.pool.text.reading import MaskTold, Padding, Pooled, Reading, check_layers, reading_of
from modelpool.pool.text.templates import cut_down, filled_up, kept_places, pad_of, told_mask, told_places, whole_text
from modelpool.pool.text.text_tokenizer import TextTokenizer

#: repeating texts to a common length pays while that is at most so many times the longer one: up to four chunks beside
#: up to four always, 5 chunks beside 6 (30) not
MOST_REPEATED = 4
AnyTokenizer: TypeAlias = ClipTokenizer | TextTokenizer
#: learned tokens by name, the vectors of each as rows
Embeddings: TypeAlias = Mapping[str, Tensor]
NO_VECTORS: Embeddings = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class ReadText:
    """A text as one text encoder reads it, float32.

    context_LD  its states; with a dimension for layers before both where the reading is of every layer
    pooled_V    None unless the reading says which vector is told
    mask_L      which tokens are real; None when all are, or the reading does not say that it is told
    cut_tokens  tokens of the text that there was no room for
    """

    context_LD: Tensor
    pooled_V: Tensor | None = None
    mask_L: Tensor | None = None
    cut_tokens: int = 0


def encode_prompt(text_model: nn.Module, tokenizer: ClipTokenizer, text: str, device: torch.device) -> Tensor:
    """The conditioning context_LD of `text` in float32, on `device`.

    Each chunk of 77 tokens goes through `text_model` (a `transformers.CLIPTextModel`) by itself; the chunks' last
    hidden states, after the final layer norm, follow each other.

    A token of weight w other than 1 is moved from, or towards, the state that an empty prompt has in its place:
    z = empty + (z - empty) * w, as ComfyUI does for SD1. Weights of 1 leave the plain encoding exactly as it is.
    One forward pass, whatever the length: all chunks, and the empty one where it is needed, form one batch.
    Raises UnusableField as `parse_weights` does.
    """
    return read_texts(text_model, tokenizer, (text,), device)[0].context_LD


def read_texts(
    text_model: nn.Module,
    tokenizer: AnyTokenizer,
    texts: Sequence[str],
    device: torch.device,
    facts: TextFacts | Reading = PLAIN_TEXT,
    *,
    embeddings: Embeddings = NO_VECTORS,
    negative: Sequence[bool] | None = None,
    images: Sequence[SeenImage] = (),
) -> tuple[ReadText, ...]:
    """Each of `texts` as `facts` say, all in one forward pass; they may differ in length and in weights.

    CLIP reads chunks, as `encode_prompt` says, and the pooled text is that of the first chunk, whatever its tokens
    weigh, as ComfyUI has it; `embeddings` are its learned tokens. `text_model` may have a projection. Other encoders
    read a text at once, cut to the most that they read; the empty prompt that weights move from is one in the same
    template. `pictures` stand where that has tokens for them (`pool.models.text.vision_prompt`), in each of `texts`. Of
    a
    CLIP whose states nobody is told, the first chunk alone is read. `negative` says which texts are
    what an image is not to show, where a family words those otherwise; where nobody says it, those that say nothing.
    A row knows nothing of the others in the batch. Kernels may round otherwise at another batch size.
    Raises UnusableField as `parse_weights` does and for more layers left out than there are, UnknownName for an
    embedding that is not there.
    """
    reading = reading_of(facts)
    check_layers(reading, _layers(text_model))
    sides = _sides(texts, reading, negative)
    counts = [len(image.states_LD) for image in images]
    prompts = _prompts(text_model, tokenizer, texts, reading, embeddings, sides, counts)
    rows = [row for prompt in prompts for row in prompt]
    side_of_row = [side for side, prompt in zip(sides, prompts, strict=True) for _ in prompt]
    empties = _empties(tokenizer, reading, rows, side_of_row, counts)
    batch = (*rows, *empties.values())
    ids_NT = torch.tensor([row.token_ids for row in batch], dtype=torch.long).to(device)
    mask_NT = torch.tensor([row.mask for row in batch], dtype=torch.long).to(device) if reading.is_masked else None
    with (
        torch.no_grad(),
        _learned(text_model, batch, embeddings),
        shown_among_words(text_model, batch, images),
    ):
        z_NTD, pooled_NV = _read(text_model, ids_NT, mask_NT, reading)
    if empties:
        weights_NT = torch.tensor([row.weights for row in rows], dtype=torch.float32).to(device)
        places = {side: len(rows) + place for place, side in enumerate(empties)}
        # rows of a side without an empty one weigh 1 throughout, and are moved from nothing
        from_N = [places.get(side, len(rows)) for side in side_of_row]
        empty_NTD = z_NTD[from_N] if len(empties) > 1 else z_NTD[len(rows) :]
        z_NTD = _weigh(z_NTD[: len(rows)], empty_NTD, weights_NT)
    read, first = [], 0
    for prompt in prompts:
        pooled_V = None if pooled_NV is None else pooled_NV[first]
        states = z_NTD[first : first + len(prompt)]
        kept = None
        if reading.images_every and isinstance(tokenizer, TextTokenizer):
            kept = told_places(prompt[0], reading, tokenizer, counts)
        read.append(_told(states, pooled_V, prompt, reading, kept))
        first += len(prompt)
    return tuple(read)


def _prompts(
    text_model: nn.Module,
    tokenizer: AnyTokenizer,
    texts: Sequence[str],
    reading: Reading,
    embeddings: Embeddings,
    sides: Sequence[bool],
    counts: Sequence[int],
) -> list[tuple[Chunk, ...]]:
    """The rows of each text, all of one length; the first alone where no states are told."""
    assert reading.is_clip == isinstance(tokenizer, ClipTokenizer), f"{reading.encoder} with another's tokenizer"
    if isinstance(tokenizer, ClipTokenizer):
        places = getattr(_config(text_model), "max_position_embeddings", reading.chunk_tokens)
        tokens = min(reading.chunk_tokens, places)
        known = {name: vectors.shape[0] for name, vectors in embeddings.items()}
        told = None if reading.tells_states else 1
        chunks = [split_prompt(tokenizer, text, known, tokens)[:told] for text in texts]
        return [tuple(_with_pads(chunk, reading.clip_pad_id) for chunk in prompt) for prompt in chunks]
    rows = [seeing_text(tokenizer, t, reading, counts, side) for t, side in zip(texts, sides, strict=True)]
    longest = max(len(row.token_ids) for row in rows)
    pad_id = pad_of(tokenizer, reading)
    return [(filled_up(row, longest, pad_id, left=reading.fills_left),) for row in rows]


def seeing_text(
    tokenizer: TextTokenizer, text: str, reading: Reading, counts: Sequence[int], is_negative: bool = False
) -> Chunk:
    """`text` as a row of tokens with so many for each image."""
    row = whole_text(tokenizer, text, reading, is_negative=is_negative)
    return with_images(row, tokenizer.id_of(reading.image_token), counts) if counts else row


def _sides(texts: Sequence[str], reading: Reading, negative: Sequence[bool] | None) -> list[bool]:
    """Which texts are put into the words for what an image is not to show."""
    if not reading.negative_template:
        return [False] * len(texts)
    return [not text.strip() for text in texts] if negative is None else list(negative)


def _empties(
    tokenizer: AnyTokenizer, reading: Reading, rows: Sequence[Chunk], sides: Sequence[bool], counts: Sequence[int]
) -> dict[bool, Chunk]:
    """The row of an empty prompt for each side whose rows have weights, in that side's words. None where no states are
    told: a weight moves nothing else."""
    weighted = dict.fromkeys(side for row, side in zip(rows, sides, strict=True) if row.is_weighted)
    if not reading.tells_states:
        return {}
    tokens = len(rows[0].token_ids)
    return {side: _empty(tokenizer, reading, tokens, counts, is_negative=side) for side in weighted}


def _empty(
    tokenizer: AnyTokenizer, reading: Reading, tokens: int, counts: Sequence[int], *, is_negative: bool
) -> Chunk:
    """The row of an empty prompt, so many tokens long."""
    if isinstance(tokenizer, ClipTokenizer):
        return _with_pads(empty_chunk(tokens), reading.clip_pad_id)
    row = seeing_text(tokenizer, "", reading, counts, is_negative)
    return cut_down(filled_up(row, tokens, pad_of(tokenizer, reading), left=reading.fills_left), tokens)


def _read(
    text_model: nn.Module, ids_NT: Tensor, mask_NT: Tensor | None, reading: Reading
) -> tuple[Tensor, Tensor | None]:
    """The states of all tokens, and the pooled text of each row, in float32."""
    given: dict[str, Any] = {"input_ids": ids_NT}
    if mask_NT is not None:
        given["attention_mask"] = mask_NT
    asked = getattr(text_model, "text_model", text_model) if reading.pooled is Pooled.PLAIN else text_model
    layers = _layers(text_model)
    left_out = reading.left_out(layers)
    if reading.layers or reading.every_layer or left_out or not reading.final_norm:
        deepest = max(reading.layers, default=layers - left_out)
        with _first_layers(text_model, deepest + 1):  # the state after the last that runs would be normed
            found = asked(**given, output_hidden_states=True)
        z = _chosen(text_model, found.hidden_states, reading, left_out)
    else:
        found = asked(**given)
        z = found.last_hidden_state
    return z.float(), _pooled(found, reading.pooled)


@contextmanager
def _first_layers(text_model: nn.Module, count: int) -> Iterator[None]:
    """A language model runs no more than its first `count` layers while this is open; others run all of theirs."""
    config = _config(text_model)
    whole = _layers(text_model)
    if not isinstance(getattr(text_model, "layers", None), nn.ModuleList) or count >= whole:
        yield
        return
    config.num_hidden_layers = count
    try:
        yield
    finally:
        config.num_hidden_layers = whole


def _chosen(text_model: nn.Module, states: Sequence[Tensor], reading: Reading, left_out: int) -> Tensor:
    """The states that are read of those after each layer, of which the first is what the first layer takes."""
    if reading.every_layer:
        return torch.stack(tuple(states[1:]), dim=1)
    if reading.layers:
        return torch.cat([states[layer] for layer in reading.layers], dim=-1)
    layers = _layers(text_model)
    z = states[layers - left_out if layers else -1 - left_out]
    if reading.final_norm and left_out:
        inner: Any = getattr(text_model, "text_model", text_model)
        z = inner.final_layer_norm(z)
    return z


def _pooled(found: Any, pooled: Pooled) -> Tensor | None:
    if pooled is Pooled.NONE:
        return None
    projected = getattr(found, "text_embeds", None) if pooled is Pooled.PROJECTED else None
    vector: Tensor = found.pooler_output if projected is None else projected
    return vector.float()


def _told(
    z_NTD: Tensor, pooled_V: Tensor | None, prompt: tuple[Chunk, ...], reading: Reading, kept: Sequence[int] | None
) -> ReadText:
    """What is told of one text's rows: states without those of the template and, it may be, of what fills it up; those
    of the places that are `kept`, where they are said."""
    if reading.is_clip:
        return ReadText(z_NTD.flatten(0, 1), pooled_V)
    (row,), z = prompt, z_NTD[0]
    if not row.tokens:
        z = torch.zeros_like(z)
    elif reading.padding is Padding.ZEROED:
        z = z * torch.tensor(row.mask, dtype=z.dtype).to(z.device)[:, None]
    places: Sequence[int] = range(reading.dropped_tokens, len(row.token_ids))
    mask = told_mask(row, extra=1 if reading.mask is MaskTold.ONE_MORE else 0)
    if reading.padding is Padding.DROPPED:
        real = list(kept_places(row, reading.dropped_tokens))  # they follow each other
        places = range(real[0], real[-1] + 1) if real else range(0)
    if kept is not None:
        places = kept
    told = [mask[place] for place in places]
    is_told = reading.mask is not MaskTold.NOTHING and not all(told)
    mask_L = torch.tensor(told, dtype=torch.bool).to(z.device) if is_told else None
    if isinstance(places, range):
        return ReadText(z[..., places.start : places.stop, :], pooled_V, mask_L, row.cut)
    return ReadText(z[..., torch.tensor(places).to(z.device), :], pooled_V, mask_L, row.cut)


@contextmanager
def _learned(text_model: nn.Module, batch: Sequence[Chunk], embeddings: Embeddings) -> Iterator[None]:
    """Learned tokens have their own vectors, of `embeddings`, while this is open."""
    places = [(i, place, token) for i, row in enumerate(batch) for place, token in row.learned]
    if not places:
        yield
        return

    def put(_: nn.Module, __: Any, x_NTD: Tensor) -> Tensor:
        mine_NTD = x_NTD.clone()
        for i, place, token in places:
            mine_NTD[i, place] = embeddings[token.name][token.row].to(x_NTD)
        return mine_NTD

    table: Any = text_model.get_input_embeddings()  # type: ignore[operator] # transformers is not typed
    handle = table.register_forward_hook(put)
    try:
        yield
    finally:
        handle.remove()


def _config(text_model: nn.Module) -> Any:
    return getattr(text_model, "config", None)


def _layers(text_model: nn.Module) -> int:
    """How many layers a text encoder has; 0 where it does not tell."""
    config = _config(text_model)
    return getattr(config, "num_hidden_layers", 0) or 0


def _with_pads(chunk: Chunk, pad_id: int) -> Chunk:
    """CLIP's `chunk` with `pad_id` after the token that ends its text."""
    if pad_id == END_ID:
        return chunk
    return replace(chunk, token_ids=_filled_up(chunk, pad_id))


def _filled_up(chunk: Chunk, pad_id: int) -> tuple[int, ...]:
    """The tokens of a chunk, with `pad_id` after the token that ends its text."""
    if pad_id == END_ID:
        return chunk.token_ids
    return chunk.token_ids[: chunk.tokens] + (pad_id,) * (len(chunk.token_ids) - chunk.tokens)


def matched_length(a: int, b: int) -> int | None:
    """Tokens of each of two texts of `a` and `b` tokens when one batch holds both, their least common multiple.

    None when that is more than `MOST_REPEATED` times the longer one: those run apart, each at its own length.
    """
    length = math.lcm(a, b)
    return length if length <= MOST_REPEATED * max(a, b) else None


def match_lengths(a_LD: Tensor, b_LD: Tensor) -> tuple[Tensor, Tensor]:
    """Both conditionings at one length, so that one batch can hold them: each repeated as a whole.

    The length is `matched_length`; where there is none, both are returned as they are.
    Attention over keys that are all repeated equally often gives what attention over them once gives, so repeating
    changes no image; filling the shorter one up with empty chunks would.
    """
    length = matched_length(a_LD.shape[0], b_LD.shape[0])
    if length is None:
        return a_LD, b_LD
    return a_LD.repeat(length // a_LD.shape[0], 1), b_LD.repeat(length // b_LD.shape[0], 1)


def _weigh(z_NTD: Tensor, empty_1TD: Tensor, weights_NT: Tensor) -> Tensor:
    weights = weights_NT.unsqueeze(-1) if z_NTD.dim() == 3 else weights_NT[:, None, :, None]
    moved_NTD = empty_1TD + (z_NTD - empty_1TD) * weights
    return torch.where(weights == 1.0, z_NTD, moved_NTD)
