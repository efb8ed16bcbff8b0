"""What a model is told of the picture that its film begins with, by the names of `pool.diffusion_models.architecture`.

Knows the forms in which models were trained to read one; not where the picture's latent comes from.

Shape legend: B batch, C latent channels, T cells of time, H W height and width of a latent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pool.checkpoints.sampling_facts import Beginning, FilmFacts
from pool.sampling.extras import IMAGE

IMAGE_MASK = "image_mask"


def told_of_beginning(film: FilmFacts, picture_BC: Tensor, cells: int, ends: bool = False) -> dict[str, Tensor]:
    """What a model of `film` is told, for a film of so many cells of time: of a picture's own latent, [B, C, H, W],
    where it is kept; of that of a film of it and of grey, [B, C, T, H, W], where that is joined. `ends` says that the
    last frame of that is a picture too."""
    match film.begins:
        case Beginning.KEPT:
            whole = picture_BC.unsqueeze(2).expand(-1, -1, cells, -1, -1)
            return {IMAGE: whole.contiguous(), IMAGE_MASK: _first_cell(whole, 1)}
        case Beginning.JOINED:
            assert picture_BC.shape[2] == cells, f"a film of {picture_BC.shape[2]} cells begins one of {cells}"
            # a mask for each frame that a cell stands for; the first cell is the first frame, so many times
            mask = _first_cell(picture_BC, film.multiple)
            if ends:
                mask[:, -1, -1] = 1.0
            return {IMAGE: torch.cat([mask, picture_BC], dim=1)}
        case Beginning.REPEATED | None:
            raise AssertionError("this model is told of no picture in its first frame")


def beginning_shape(film: FilmFacts, latent_CTHW: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the latent that a film with such a latent begins with."""
    channels, _, *sides = latent_CTHW
    return (channels, *sides) if film.begins is Beginning.KEPT else latent_CTHW


def _first_cell(like_BCTHW: Tensor, channels: int) -> Tensor:
    """1 in the first cell of time, 0 after it."""
    batch, _, *cells = like_BCTHW.shape
    mask = like_BCTHW.new_zeros(batch, channels, *cells)
    mask[:, :, :1] = 1.0
    return mask
