"""Images among the words of a text: which tokens stand for them, and how a language model is shown their states.

A template has one token for each image; it becomes as many as the image has states. The tokens of an image stand
at one place in time, and beside that at the places of their rows and columns; the text goes on behind the longer side.
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

from modelpool.pool.text.chunks import Chunk


@dataclass(frozen=True, slots=True, eq=False)
class SeenImage:
    """The states of an image, [L, D], row by row, and how many rows and columns they are; 0 for one whose states stand
    one after the other as words do."""

    states_LD: Tensor
    rows: int
    columns: int


def with_images(row: Chunk, image_id: int, counts: Sequence[int]) -> Chunk:
    """`row` with as many tokens for each image as `counts` say, in place of the first tokens `image_id`: those of
    its template, which stand before the prompt."""
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
    longer = len(ids) - len(row.token_ids)
    return replace(row, token_ids=tuple(ids), weights=tuple(weights), tokens=row.tokens + longer, images=tuple(starts))


def places(row: Chunk, images: Sequence[SeenImage]) -> Tensor:
    """Where each token stands in time, among rows and among columns: whole numbers, [3, T] on the CPU."""
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
def shown_among_words(text_model: nn.Module, rows: Sequence[Chunk], images: Sequence[SeenImage]) -> Iterator[None]:
    """While this is open `text_model` reads the states of `pictures` in the places that `rows`, which are all that it
    is given, have for them."""
    if not images:
        yield
        return
    in_grids = all(image.rows for image in images)
    places_3NT = torch.stack([places(row, images) for row in rows], dim=1) if in_grids else torch.empty(0)

    def put(_: nn.Module, __: Any, x_NTD: Tensor) -> Tensor:
        mine_NTD = x_NTD.clone()
        for i, row in enumerate(rows):
            for start, image in zip(row.images, images, strict=True):
                mine_NTD[i, start : start + len(image.states_LD)] = image.states_LD.to(x_NTD)
        return mine_NTD

    def turned(rotary: Any, given: tuple[Tensor, ...], _: Any) -> tuple[Tensor, ...]:
        like = given[0]
        by_axis = [rotary.forward(like, axis_NT.to(like.device)) for axis_NT in places_3NT]
        return tuple(_of_three(angles) for angles in zip(*by_axis, strict=True))

    model: Any = text_model  # transformers is not typed
    handles = [model.get_input_embeddings().register_forward_hook(put)]
    handles += [model.rotary_emb.register_forward_hook(turned)] if in_grids else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _of_three(angles: Sequence[Tensor]) -> Tensor:
    """What each of three axes turns, of what each would turn if it were the only one: a quarter by time, three eighths
    by rows and by columns. Source: `mrope_section` of Qwen/Qwen2.5-VL-7B-Instruct, 16, 24 and 24 of 64."""
    half = angles[0].shape[-1] // 2
    shares = half // 4, 3 * half // 8
    sizes = [*shares, half - sum(shares)] * 2
    parts = [each.split(sizes, dim=-1) for each in angles]
    return torch.cat([parts[number % 3][number] for number in range(len(sizes))], dim=-1)
