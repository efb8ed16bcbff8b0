"""Encodes prompts with a text encoder to the conditioning that a diffusion model reads.

Converts tokens and weights to tensors, as a `Reading` defines. Runs on the device of the modules: call it inside the
compute context of `pool.weights.ops` if their weights are cast.

Shape legend: N rows of tokens (a text's chunks, for CLIP), T tokens of a row, L tokens of the conditioning, D text
width, S states per token, V width of a pooled text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from modelpool.pool.families.parts.text_join import ReadText as ReadText
from modelpool.pool.families.parts.text_reading import MaskMode, Padding, Pooled, Reading, check_layers, reading_of
from modelpool.pool.families.parts.written_image import IMAGE_START
from modelpool.pool.models.text.chunks import Chunk, empty_chunk, split_prompt
from modelpool.pool.models.text.clip_tokenizer import END_ID, ClipTokenizer
from modelpool.pool.models.text.image_tokens import ImageStates, image_states_inserted, with_images
from modelpool.pool.models.text.templates import (
    end_positions,
    pad_id_of,
    padded,
    quoted_rows,
    real_positions,
    state_positions,
    token_mask,
    truncate,
    whole_text,
)
from modelpool.pool.models.text.text_tokenizer import TextTokenizer
from modelpool.pool.models.text.token_writer import TokenWriting, written
from modelpool.pool.values.core.family_facts import PLAIN_TEXT, TextFacts
from modelpool.pool.values.core.prompt_tokens import ClipTokens, PromptTokens, Tokens

#: largest ratio of the common length of two repeated texts to the longer one: always enough for up to four chunks each,
#: but not for 5 with 6 chunks (30)
MAX_REPEAT = 4
AnyTokenizer: TypeAlias = ClipTokenizer | TextTokenizer
#: rows of vectors of each learned token, by name
Embeddings: TypeAlias = Mapping[str, Tensor]
NO_VECTORS: Embeddings = MappingProxyType({})


def read_texts(
    text_model: nn.Module,
    tokenizer: AnyTokenizer,
    texts: Sequence[str],
    device: torch.device,
    facts: TextFacts | Reading = PLAIN_TEXT,
    *,
    embeddings: Embeddings = NO_VECTORS,
    negative: Sequence[bool] | None = None,
    images: Sequence[ImageStates] = (),
    tokens: Sequence[PromptTokens | None] | None = None,
    writing: TokenWriting | None = None,
) -> tuple[ReadText, ...]:
    """Encode each of `texts` as `facts` define, all in one forward pass; they may differ in length and weights.

    CLIP encodes chunks of 77 tokens separately; their last hidden states, after the final layer norm, are concatenated.
    The pooled text is the first chunk's, regardless of weights, as in ComfyUI. The state of a token with weight w other
    than 1 is moved relative to the state of an empty prompt at its position: z = empty + (z - empty) * w. Weights of 1
    leave the encoding exactly as it is. `embeddings` are learned tokens. `text_model` may have a projection.
    Other encoders read a text at once, truncated to their limit; the empty prompt for weights uses the same template.
    `images` replace the image tokens of the template (`pool.models.components.text.vision_prompt`), in each of `texts`.
    If only the pooled text of a CLIP is used, only the first chunk is encoded. `negative` marks negative prompts, for
    families with another template for them; by default, these are the empty texts. `tokens` has the tokens of texts, if
    known.
    An encoder that writes tokens of an image does so as `writing` says, for one text after the other.
    Rows of the batch are independent. Kernels may round differently at another batch size.
    Raises UnusableField as `parse_weights` does and for more skipped layers than the encoder has, UnknownName for an
    unknown embedding.
    """
    reading = reading_of(facts)
    check_layers(reading, layer_count(text_model))
    sides = _sides(texts, reading, negative)
    counts = [len(image.states_LD) for image in images]
    known_tokens = [None] * len(texts) if tokens is None else tokens
    prompts = _prompts(text_model, tokenizer, texts, reading, embeddings, sides, counts, known_tokens)
    if reading.writes_tokens:
        assert isinstance(tokenizer, TextTokenizer), f"{reading.encoder} with another kind of tokenizer"
        assert writing is not None, f"{reading.encoder} reads a text without an image to write"
        codes = min(tokenizer.id_of(IMAGE_START), _config(text_model).vision_vocab_size)
        with torch.no_grad():
            return tuple(written(text_model, row, writing, images, codes, device) for (row,) in prompts)
    rows = [row for prompt in prompts for row in prompt]
    side_of_row = [side for side, prompt in zip(sides, prompts, strict=True) for _ in prompt]
    empties = _empties(tokenizer, reading, rows, side_of_row, counts)
    batch = (*rows, *empties.values())
    ids_NT = torch.tensor([row.token_ids for row in batch], dtype=torch.long).to(device)
    mask_NT = torch.tensor([row.mask for row in batch], dtype=torch.long).to(device) if reading.is_masked else None
    with (
        torch.no_grad(),
        _learned(text_model, batch, embeddings),
        image_states_inserted(text_model, batch, images),
    ):
        z_NTD, pooled_NV = _read(text_model, ids_NT, mask_NT, reading)
    if empties:
        weights_NT = torch.tensor([row.weights for row in rows], dtype=torch.float32).to(device)
        places = {side: len(rows) + place for place, side in enumerate(empties)}
        # rows of a side without weights have weight 1 and are not moved
        from_N = [places.get(side, len(rows)) for side in side_of_row]
        empty_NTD = z_NTD[from_N] if len(empties) > 1 else z_NTD[len(rows) :]
        z_NTD = _weigh(z_NTD[: len(rows)], empty_NTD, weights_NT)
    read, first = [], 0
    for prompt, side in zip(prompts, sides, strict=True):
        pooled_V = None if pooled_NV is None else pooled_NV[first]
        states = z_NTD[first : first + len(prompt)]
        kept = None
        if reading.images_every and isinstance(tokenizer, TextTokenizer):
            kept = state_positions(prompt[0], reading, tokenizer, counts)
        elif reading.keeps_ends and isinstance(tokenizer, TextTokenizer):
            kept = end_positions(tokenizer, reading, side)
        read.append(_read_text(states, pooled_V, prompt, reading, kept))
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
    tokens: Sequence[PromptTokens | None],
) -> list[tuple[Chunk, ...]]:
    """Return the rows of each text, all of one length; only the first row if no states are read."""
    assert reading.is_clip == isinstance(tokenizer, ClipTokenizer), f"{reading.encoder} with another kind of tokenizer"
    if isinstance(tokenizer, ClipTokenizer):
        places = getattr(_config(text_model), "max_position_embeddings", reading.chunk_tokens)
        length = min(reading.chunk_tokens, places)
        known = {name: vectors.shape[0] for name, vectors in embeddings.items()}
        limit = None if reading.reads_states else 1
        clip = [found if isinstance(found, ClipTokens) else None for found in tokens]
        chunks = [split_prompt(tokenizer, t, known, length, own)[:limit] for t, own in zip(texts, clip, strict=True)]
        return [tuple(_with_pads(chunk, reading.clip_pad_id) for chunk in prompt) for prompt in chunks]
    if reading.quotes_apart:
        found = [quoted_rows(tokenizer, text, reading) for text in texts]
    else:
        found = [
            (text_with_images(tokenizer, text, reading, counts, side, own if isinstance(own, Tokens) else None),)
            for text, side, own in zip(texts, sides, tokens, strict=True)
        ]
    if reading.writes_tokens:
        return found
    longest = max(len(row.token_ids) for rows in found for row in rows)
    pad_id = pad_id_of(tokenizer, reading)
    return [tuple(padded(row, longest, pad_id, left=reading.pads_left) for row in rows) for rows in found]


def text_with_images(
    tokenizer: TextTokenizer,
    text: str,
    reading: Reading,
    counts: Sequence[int],
    is_negative: bool = False,
    tokens: Tokens | None = None,
) -> Chunk:
    """Return `text` as a row of tokens, with `counts` tokens for each image. `tokens` as in `whole_text`."""
    row = whole_text(tokenizer, text, reading, is_negative=is_negative, tokens=tokens)
    return with_images(row, tokenizer.id_of(reading.image_token), counts) if counts else row


def _sides(texts: Sequence[str], reading: Reading, negative: Sequence[bool] | None) -> list[bool]:
    """Return which texts use the template of negative prompts."""
    if not reading.negative_template:
        return [False] * len(texts)
    return [not text.strip() for text in texts] if negative is None else list(negative)


def _empties(
    tokenizer: AnyTokenizer, reading: Reading, rows: Sequence[Chunk], sides: Sequence[bool], counts: Sequence[int]
) -> dict[bool, Chunk]:
    """Return the row of an empty prompt for each side with weighted rows, in the template of that side; no rows if no
    states are read: weights change nothing else."""
    weighted = dict.fromkeys(side for row, side in zip(rows, sides, strict=True) if row.is_weighted)
    if not reading.reads_states:
        return {}
    tokens = len(rows[0].token_ids)
    return {side: _empty(tokenizer, reading, tokens, counts, is_negative=side) for side in weighted}


def _empty(
    tokenizer: AnyTokenizer, reading: Reading, tokens: int, counts: Sequence[int], *, is_negative: bool
) -> Chunk:
    """Return the row of an empty prompt of `tokens` tokens."""
    if isinstance(tokenizer, ClipTokenizer):
        return _with_pads(empty_chunk(tokens), reading.clip_pad_id)
    row = text_with_images(tokenizer, "", reading, counts, is_negative)
    return truncate(padded(row, tokens, pad_id_of(tokenizer, reading), left=reading.pads_left), tokens)


def _read(
    text_model: nn.Module, ids_NT: Tensor, mask_NT: Tensor | None, reading: Reading
) -> tuple[Tensor, Tensor | None]:
    """Return the states of all tokens, and the pooled text of each row, in float32."""
    inputs: dict[str, Any] = {"input_ids": ids_NT}
    if mask_NT is not None:
        inputs["attention_mask"] = mask_NT
    module = getattr(text_model, "text_model", text_model) if reading.pooled is Pooled.PLAIN else text_model
    layers = layer_count(text_model)
    left_out = reading.left_out(layers)
    if not (reading.layers or reading.every_layer or left_out or reading.final_norm) and _is_decoder(text_model):
        with _without_norm(text_model):
            found = module(**inputs)
        z = found.last_hidden_state
    elif reading.layers or reading.every_layer or left_out or not reading.final_norm:
        deepest = max(reading.layers, default=layers - left_out)
        # the state after the last layer that runs would be normalised
        is_last = bool(reading.layers) and deepest == layers
        with _first_layers(text_model, deepest + 1), _without_norm(text_model) if is_last else nullcontext():
            found = module(**inputs, output_hidden_states=True)
        z = _chosen(text_model, found.hidden_states, reading, left_out)
    else:
        found = module(**inputs)
        z = found.last_hidden_state
    return z.float(), _pooled(found, reading.pooled)


def _is_decoder(text_model: nn.Module) -> bool:
    """Return whether it is a language model."""
    return isinstance(getattr(text_model, "layers", None), nn.ModuleList)


@contextmanager
def _without_norm(text_model: nn.Module) -> Iterator[None]:
    """Leave out the final norm of a language model."""
    norm: Any = text_model.norm
    handle = norm.register_forward_hook(lambda _, args, __: args[0])
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _first_layers(text_model: nn.Module, count: int) -> Iterator[None]:
    """Limit a language model to its first `count` layers; other encoders run all of theirs."""
    config = _config(text_model)
    whole = layer_count(text_model)
    if not _is_decoder(text_model) or count >= whole:
        yield
        return
    config.num_hidden_layers = count
    try:
        yield
    finally:
        config.num_hidden_layers = whole


def _chosen(text_model: nn.Module, states: Sequence[Tensor], reading: Reading, left_out: int) -> Tensor:
    """Select the states that are read from those after each layer; the first are the input of the first layer."""
    if reading.every_layer:
        return torch.stack(tuple(states if reading.first_state else states[1:]), dim=1)
    if reading.layers:
        return torch.cat([states[layer] for layer in reading.layers], dim=-1)
    layers = layer_count(text_model)
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


def _read_text(
    z_NTD: Tensor, pooled_V: Tensor | None, prompt: tuple[Chunk, ...], reading: Reading, kept: Sequence[int] | None
) -> ReadText:
    """Return the conditioning from one text's rows: states without the template's and, by the reading, without
    padding; the states at the positions `kept` if that is set."""
    if reading.is_clip:
        return ReadText(z_NTD.flatten(0, 1), pooled_V)
    if reading.quotes_apart:
        parts = [z_TD[row.first : row.first + row.tokens] for row, z_TD in zip(prompt, z_NTD, strict=True)]
        return ReadText(torch.cat(parts), cut_tokens=sum(row.cut for row in prompt))
    (row,), z = prompt, z_NTD[0]
    if not row.tokens:
        z = torch.zeros_like(z)
    elif reading.padding is Padding.ZEROED:
        z = z * torch.tensor(row.mask, dtype=z.dtype).to(z.device)[:, None]
    places: Sequence[int] = range(reading.dropped_tokens, len(row.token_ids))
    mask = token_mask(row, extra=1 if reading.mask is MaskMode.ONE_MORE else 0)
    if reading.padding is Padding.DROPPED:
        real = list(real_positions(row, reading.dropped_tokens))  # they are consecutive
        places = range(real[0], real[-1] + 1) if real else range(0)
    if kept is not None:
        places = kept
    mask_values = [mask[place] for place in places]
    has_mask = reading.mask is not MaskMode.NOTHING and not all(mask_values)
    mask_L = torch.tensor(mask_values, dtype=torch.bool).to(z.device) if has_mask else None
    if isinstance(places, range):
        images_K2 = None
        if reading.names_images:
            named = [(place - places.start, number) for place, number in row.named_images]
            images_K2 = torch.tensor(named, dtype=torch.long).reshape(-1, 2)
        return ReadText(z[..., places.start : places.stop, :], pooled_V, mask_L, row.cut, image_places_K2=images_K2)
    return ReadText(z[..., torch.tensor(places).to(z.device), :], pooled_V, mask_L, row.cut)


@contextmanager
def _learned(text_model: nn.Module, batch: Sequence[Chunk], embeddings: Embeddings) -> Iterator[None]:
    """Insert the vectors of learned tokens, from `embeddings`."""
    places = [(i, place, token) for i, row in enumerate(batch) for place, token in row.learned]
    if not places:
        yield
        return

    def put(_: nn.Module, __: Any, x_NTD: Tensor) -> Tensor:
        changed_NTD = x_NTD.clone()
        for i, place, token in places:
            changed_NTD[i, place] = embeddings[token.name][token.row].to(x_NTD)
        return changed_NTD

    table: Any = text_model.get_input_embeddings()  # type: ignore[operator] # transformers is not typed
    handle = table.register_forward_hook(put)
    try:
        yield
    finally:
        handle.remove()


def _config(text_model: nn.Module) -> Any:
    return getattr(text_model, "config", None)


def layer_count(text_model: nn.Module) -> int:
    """Return the number of layers of a text encoder; 0 if its configuration does not have it."""
    config = _config(text_model)
    return getattr(config, "num_hidden_layers", 0) or 0


def _with_pads(chunk: Chunk, pad_id: int) -> Chunk:
    """Return CLIP's `chunk` with `pad_id` as padding."""
    if pad_id == END_ID:
        return chunk
    return replace(chunk, token_ids=_filled_up(chunk, pad_id))


def _filled_up(chunk: Chunk, pad_id: int) -> tuple[int, ...]:
    """Return the tokens of a chunk, with `pad_id` as padding."""
    if pad_id == END_ID:
        return chunk.token_ids
    return chunk.token_ids[: chunk.tokens] + (pad_id,) * (len(chunk.token_ids) - chunk.tokens)


def matched_length(a: int, b: int) -> int | None:
    """Return the common length of two texts of `a` and `b` tokens in one batch, their least common multiple.

    None if that is more than `MAX_REPEAT` times the longer one: they run separately, each at its own length.
    """
    length = math.lcm(a, b)
    return length if length <= MAX_REPEAT * max(a, b) else None


def match_lengths(a_LD: Tensor, b_LD: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat both conditionings to a common length, so that they can share a batch.

    The length is `matched_length`; without one, both are returned unchanged.
    Attention over keys that are all repeated equally often equals attention over them once, so repeating changes no
    image; padding the shorter one with empty chunks would.
    """
    length = matched_length(a_LD.shape[0], b_LD.shape[0])
    if length is None:
        return a_LD, b_LD
    return a_LD.repeat(length // a_LD.shape[0], 1), b_LD.repeat(length // b_LD.shape[0], 1)


def _weigh(z_NTD: Tensor, empty_1TD: Tensor, weights_NT: Tensor) -> Tensor:
    weights = weights_NT.unsqueeze(-1) if z_NTD.dim() == 3 else weights_NT[:, None, :, None]
    moved_NTD = empty_1TD + (z_NTD - empty_1TD) * weights
    return torch.where(weights == 1.0, z_NTD, moved_NTD)
