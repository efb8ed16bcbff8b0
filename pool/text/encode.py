"""A prompt's chunks through a text model: the conditioning that the diffusion model reads.

Knows how chunks and weights become one tensor. Runs on whatever the modules run on: call it inside the compute context
of `pool.ops` when their weights are cast on the way.

Shape legend: N chunks, T tokens of a chunk (77), L tokens in all (N * T), D text width, V width of a pooled text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pool.checkpoints.families import PLAIN_TEXT, TextFacts
from pool.text.chunks import Chunk, empty_chunk, split_prompt
from pool.text.tokenizer import END_ID, ClipTokenizer

#: repeating texts to a common length pays while that is at most so many times the longer one: up to four chunks beside
#: up to four always, 5 chunks beside 6 (30) not
MOST_REPEATED = 4


@dataclass(frozen=True, slots=True, eq=False)
class ReadText:
    """A text as one text encoder reads it, float32. `pooled_V` is None unless the encoder gives it."""

    context_LD: Tensor
    pooled_V: Tensor | None = None


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
    tokenizer: ClipTokenizer,
    texts: Sequence[str],
    device: torch.device,
    facts: TextFacts = PLAIN_TEXT,
) -> tuple[ReadText, ...]:
    """`encode_prompt` of each of `texts`, all in one forward pass, as `facts` say; they may differ in length and in
    weights. `text_model` may be a `transformers.CLIPTextModelWithProjection` too.

    The pooled text is that of the first chunk, whatever its tokens weigh, as ComfyUI has it.
    A chunk knows nothing of the others in the batch. Kernels may round otherwise at another batch size.
    """
    prompts = [split_prompt(tokenizer, text) for text in texts]
    chunks = [chunk for prompt in prompts for chunk in prompt]
    weighted = any(chunk.is_weighted for chunk in chunks)
    batch = (*chunks, empty_chunk()) if weighted else chunks
    ids_NT = torch.tensor([_filled_up(chunk, facts.pad_id) for chunk in batch], dtype=torch.long).to(device)
    with torch.no_grad():
        z_NTD, pooled_NV = _read(text_model, ids_NT, facts)
    if weighted:
        weights_NT = torch.tensor([chunk.weights for chunk in chunks], dtype=torch.float32).to(device)
        z_NTD = _weigh(z_NTD[:-1], z_NTD[-1:], weights_NT)
    read, first = [], 0
    for prompt in prompts:
        pooled_V = None if pooled_NV is None else pooled_NV[first]
        read.append(ReadText(z_NTD[first : first + len(prompt)].flatten(0, 1), pooled_V))
        first += len(prompt)
    return tuple(read)


def _read(text_model: nn.Module, ids_NT: Tensor, facts: TextFacts) -> tuple[Tensor, Tensor | None]:
    """The states of all tokens, and the pooled text of each chunk, in float32."""
    if not facts.layers_left_out and facts.final_norm:
        found = text_model(input_ids=ids_NT)
        z_NTD: Tensor = found.last_hidden_state
    else:
        found = text_model(input_ids=ids_NT, output_hidden_states=True)
        z_NTD = found.hidden_states[-1 - facts.layers_left_out]
        if facts.final_norm:
            inner: nn.Module = getattr(text_model, "text_model", text_model)
            final_norm: nn.Module = inner.final_layer_norm  # type: ignore[assignment] # transformers is not typed
            z_NTD = final_norm(z_NTD)
    return z_NTD.float(), found.text_embeds.float() if facts.gives_pooled else None


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
    changes no picture; filling the shorter one up with empty chunks would.
    """
    length = matched_length(a_LD.shape[0], b_LD.shape[0])
    if length is None:
        return a_LD, b_LD
    return a_LD.repeat(length // a_LD.shape[0], 1), b_LD.repeat(length // b_LD.shape[0], 1)


def _weigh(z_NTD: Tensor, empty_1TD: Tensor, weights_NT: Tensor) -> Tensor:
    weights_NT1 = weights_NT.unsqueeze(-1)
    moved_NTD = empty_1TD + (z_NTD - empty_1TD) * weights_NT1
    return torch.where(weights_NT1 == 1.0, z_NTD, moved_NTD)
