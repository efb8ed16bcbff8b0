"""Writes the tokens of an image with a language model, one after the other.

Each is drawn from what the model predicts after those before it, on the CPU, by random numbers of its own seed: the
result does not depend on other images of a batch. Source: diffusers' GlmImagePipeline, which has transformers draw; and
`get_rope_index` of transformers' GlmImageModel.

Shape legend: T tokens of the prompt, N tokens to write, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, TemperatureLogitsWarper, TopPLogitsWarper

from modelpool.pool.families.parts.text_join import ReadText
from modelpool.pool.families.parts.written_image import written_grids
from modelpool.pool.models.text.chunks import Chunk
from modelpool.pool.models.text.image_tokens import ImageStates, places
from modelpool.pool.values.core.written_tokens import WrittenTokens

#: from generation_config.json of zai-org/GLM-Image, which keeps all tokens otherwise
TEMPERATURE, TOP_P = 0.9, 0.75
#: cells of a patch of the latent that a token stands for, along a side
_PATCHES = 2


@dataclass(frozen=True, slots=True)
class TokenWriting:
    """The `tokens` to write for a text; `on_token` is called after each with (tokens written, all tokens)."""

    tokens: WrittenTokens
    on_token: Callable[[int, int], None] = lambda written, tokens: None


def written(
    text_model: nn.Module,
    row: Chunk,
    writing: TokenWriting,
    images: Sequence[ImageStates],
    codes: int,
    device: torch.device,
) -> ReadText:
    """Return the tokens that `text_model` writes after the prompt `row`, and the tokens of `images`, which are their
    states: one for each patch of a latent, row by row, on the CPU. Tokens of images are below `codes`.

    Other tokens, which would end the image early, are never taken: the next best one of the same draw is instead. On
    the meta device, the first and the last step run.
    """
    grids = written_grids(writing.tokens, len(images))
    ids_T, places_3T = torch.tensor(row.token_ids), places(row, images)
    seen = [image.states_LD[:, 0].long() for image in images]
    for start, tokens_L in zip(row.images, seen, strict=True):
        if not tokens_L.is_meta:
            ids_T[start : start + len(tokens_L)] = tokens_L
    wide = [_for_patches(each.view(image.rows, image.columns)) for each, image in zip(seen, images, strict=True)]
    seen_N = torch.cat(wide) if wide else None
    following_3N = _following(int(places_3T[:, -1].max()) + 1, grids)
    rows, columns = grids[-1]
    writer = _Writer(text_model, device)
    if device.type == "meta":
        writer.logits(ids_T, places_3T)
        writer.fill(following_3N.shape[1] - 1)
        writer.logits(ids_T[-1:], following_3N[:, -1:])
        return _read(torch.empty((rows, columns), dtype=torch.long, device=device), seen_N)
    generator = torch.Generator(device="cpu").manual_seed(writing.tokens.seed)
    logits_V, tokens = writer.logits(ids_T, places_3T), list[int]()
    count = following_3N.shape[1]
    for number in range(count):
        tokens.append(drawn(logits_V, codes, generator))
        writing.on_token(number + 1, count)
        if number + 1 < count:
            logits_V = writer.logits(torch.tensor(tokens[-1:]), following_3N[:, number : number + 1])
    return _read(torch.tensor(tokens[-rows * columns :]).view(rows, columns), seen_N)


def drawn(logits_V: Tensor, codes: int, generator: torch.Generator) -> int:
    """Draw a token below `codes`, as transformers draws one of all tokens from the same random numbers, unless that is
    none of them."""
    no_ids: Any = None  # only other processors read the tokens before
    scores_1V = TopPLogitsWarper(TOP_P)(no_ids, TemperatureLogitsWarper(TEMPERATURE)(no_ids, logits_V[None]))
    chances_V = torch.softmax(scores_1V[0], dim=-1)
    # as `torch.multinomial` draws
    rank_V = chances_V / torch.empty_like(chances_V).exponential_(1, generator=generator)
    allowed = rank_V[:codes] if bool(chances_V[:codes].any()) else logits_V[:codes]
    return int(allowed.argmax())


class _Writer:
    """A language model, and the keys and values of what it has read."""

    def __init__(self, text_model: nn.Module, device: torch.device) -> None:
        self._model: Any = text_model  # transformers is not typed
        self._device = device
        self._cache: Any = DynamicCache(config=self._model.config)

    def logits(self, ids_T: Tensor, places_3T: Tensor) -> Tensor:
        """Read tokens at these rotary positions; return the predictions after the last one, [V] in float32 on the
        CPU."""
        read = self._model(
            input_ids=ids_T[None].to(self._device),
            position_ids=places_3T[:, None].to(self._device),
            past_key_values=self._cache,
            use_cache=True,
        )
        logits_V: Tensor = self._model.lm_head(read.last_hidden_state[:, -1])[0].float()
        return logits_V if logits_V.is_meta else logits_V.to("cpu")

    def fill(self, tokens: int) -> None:
        """Hold keys and values of this many more tokens, without reading them."""
        for layer in self._cache.layers:
            for name in ("keys", "values"):
                held = getattr(layer, name)
                more = held.new_empty((*held.shape[:2], tokens, held.shape[-1]))
                setattr(layer, name, torch.cat((held, more), dim=-2))


def _following(now: int, grids: Sequence[tuple[int, int]]) -> Tensor:
    """Return the rotary positions of the tokens of images with these `grids` that follow each other from `now` on: of
    time, which stands still in an image, rows and columns, [3, N]."""
    parts = []
    for rows, columns in grids:
        grid_2N = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).T
        parts.append(now + torch.cat([torch.zeros_like(grid_2N[:1]), grid_2N]))
        now += max(rows, columns)
    return torch.cat(parts, dim=1)


def _read(tokens_HW: Tensor, seen_N: Tensor | None) -> ReadText:
    return ReadText(torch.empty((0, 0), device=tokens_HW.device), tokens_N=_for_patches(tokens_HW), seen_N=seen_N)


def _for_patches(tokens_HW: Tensor) -> Tensor:
    """Return the tokens of an image, each for as many patches as it stands for."""
    return tokens_HW.repeat_interleave(_PATCHES, dim=0).repeat_interleave(_PATCHES, dim=1).flatten()
