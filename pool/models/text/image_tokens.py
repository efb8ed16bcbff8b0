"""Image tokens in a prompt: inserts the states of images into a language model, with their rotary positions.

A template has one token for each image, which is replaced by one for each state. The tokens of an image share one
position in time and have their row and column as the other positions; the text continues after the longer side.
Source: Qwen2-VL (Wang et al. 2024), "multimodal rotary position embedding", and `get_rope_index` of transformers'
Qwen2_5_VLModel.

Shape legend: N rows of tokens, T tokens of a row, L states of an image, D width of a state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.models.text.chunks import Chunk


@dataclass(frozen=True, slots=True, eq=False)
class ImageStates:
    """The states of an image, [L, D], row by row, and the number of rows and columns; 0 for states in a sequence like
    words. Rows longer than a state of the language model also have the additions to it after its first layers."""

    states_LD: Tensor
    rows: int
    columns: int


def with_images(row: Chunk, image_id: int, counts: Sequence[int]) -> Chunk:
    """Return `row` with `counts` tokens for each image instead of the first tokens `image_id`: the template's tokens,
    which precede the prompt."""
    if not counts:
        return row
    ids, weights, starts = list(row.token_ids), list(row.weights), list[int]()
    place = 0
    for count in counts:
        place = ids.index(image_id, place)
        ids[place : place + 1] = [image_id] * count
        weights[place : place + 1] = [1.0] * count
        starts.append(place)
        place += count
    added = len(ids) - len(row.token_ids)
    return replace(row, token_ids=tuple(ids), weights=tuple(weights), tokens=row.tokens + added, images=tuple(starts))


def places(row: Chunk, images: Sequence[ImageStates]) -> Tensor:
    """Return the rotary positions of each token in time, rows and columns: whole numbers, [3, T] on the CPU."""
    parts, now, done = list[Tensor](), 0, 0
    for start, image in zip(row.images, images, strict=True):
        words = torch.arange(start - done)
        grid = torch.cartesian_prod(torch.arange(image.rows), torch.arange(image.columns)).T
        parts += [now + words.expand(3, -1)]
        now += len(words)
        parts += [now + torch.cat([torch.zeros_like(grid[:1]), grid])]
        now += max(image.rows, image.columns)
        done = start + image.rows * image.columns
    return torch.cat([*parts, now + torch.arange(len(row.token_ids) - done).expand(3, -1)], dim=1)


@contextmanager
def image_states_inserted(
    text_model: nn.Module, rows: Sequence[Chunk], images: Sequence[ImageStates]
) -> Iterator[None]:
    """Replace the image tokens in `text_model` by the states of `images`, at their positions in `rows`, which must be
    its complete input."""
    if not images:
        yield
        return
    in_grids = all(image.rows for image in images)
    places_3NT = torch.stack([places(row, images) for row in rows], dim=1) if in_grids else torch.empty(0)

    def put(_: nn.Module, __: Any, x_NTD: Tensor) -> Tensor:
        changed_NTD = x_NTD.clone()
        for i, start, image in _placed(rows, images):
            changed_NTD[i, start : start + len(image.states_LD)] = image.states_LD[:, : x_NTD.shape[-1]].to(x_NTD)
        return changed_NTD

    def added_after(layer: int) -> Any:
        def add(_: nn.Module, __: Any, x_NTD: Tensor) -> Tensor:
            changed_NTD, width = x_NTD.clone(), x_NTD.shape[-1]
            for i, start, image in _placed(rows, images):
                more_LD = image.states_LD[:, (layer + 1) * width :][:, :width].to(x_NTD)
                changed_NTD[i, start : start + len(more_LD)] += more_LD
            return changed_NTD

        return add

    def turned(rotary: Any, args: tuple[Tensor, ...], _: Any) -> tuple[Tensor, ...]:
        like = args[0]
        if hasattr(rotary, "mrope_section"):  # it reads all three axes
            return tuple(rotary.forward(like, places_3NT.to(like.device)))
        by_axis = [rotary.forward(like, axis_NT.to(like.device)) for axis_NT in places_3NT]
        return tuple(_of_three(angles) for angles in zip(*by_axis, strict=True))

    model: Any = text_model  # transformers is not typed
    handles = [model.get_input_embeddings().register_forward_hook(put)]
    handles += [model.rotary_emb.register_forward_hook(turned)] if in_grids else []
    more = images[0].states_LD.shape[-1] // model.config.hidden_size - 1
    handles += [model.layers[layer].register_forward_hook(added_after(layer)) for layer in range(more)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _placed(rows: Sequence[Chunk], images: Sequence[ImageStates]) -> Iterator[tuple[int, int, ImageStates]]:
    """Yield the row and the first position of each image."""
    for number, row in enumerate(rows):
        for start, image in zip(row.images, images, strict=True):
            yield number, start, image


def _of_three(angles: Sequence[Tensor]) -> Tensor:
    """Combine the rotary angles of three axes: a quarter from time, three eighths each from rows and from columns.
    Source: `mrope_section` of Qwen/Qwen2.5-VL-7B-Instruct, 16, 24 and 24 of 64."""
    half = angles[0].shape[-1] // 2
    shares = half // 4, 3 * half // 8
    sizes = [*shares, half - sum(shares)] * 2
    parts = [each.split(sizes, dim=-1) for each in angles]
    return torch.cat([parts[number % 3][number] for number in range(len(sizes))], dim=-1)
