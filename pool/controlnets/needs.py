"""How many bytes ControlNets hold on the device beside weights, by dry runs of the code that calls them.

Shape legend: B batch, H W height and width of a latent, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pool.checkpoints.infer import SIZE_NUMBERS
from pool.checkpoints.sampling_facts import SizeConditions
from pool.controlnets.call import call_controlnet
from pool.dry_run import META
from pool.sampling.extras import Residuals

if TYPE_CHECKING:
    from pool.activation_needs import StageModule

#: height and width of a latent, and length of a text, of a run of a usual size
USUAL_CELLS, USUAL_TOKENS = (64, 64), 3 * 77
#: pixels along one side of one latent cell: a ControlNet halves its picture three times
PIXELS_PER_CELL = 8


@dataclass(frozen=True, slots=True)
class ControlBytes:
    """What the ControlNets of a run come to.

    peak_bytes  most at once while they are called
    held_bytes  what is there of them while the UNet is called: their pictures, and what they add
    """

    peak_bytes: int = 0
    held_bytes: int = 0


def control_bytes(
    controls: Sequence[StageModule], dtype: torch.dtype, batch: int, cells: tuple[int, int], tokens: int
) -> ControlBytes:
    """Of calls for `batch` texts of so many tokens, one ControlNet after the other, beside a UNet that computes in
    `dtype`."""
    picture_bytes = 4 * 3 * cells[0] * cells[1] * PIXELS_PER_CELL**2
    peak_bytes = said_bytes = 0
    for control in controls:
        called_bytes, made = _called(control, batch, cells, tokens)
        made_bytes = made * dtype.itemsize
        if dtype is not control.compute_dtype:
            called_bytes = max(called_bytes, made * control.compute_dtype.itemsize + made_bytes)
        # while it is called, its picture is there once for each text; then it is added to what others said
        added_bytes = 2 * said_bytes + made_bytes if said_bytes else 0
        peak_bytes = max(peak_bytes, said_bytes + batch * picture_bytes + called_bytes, added_bytes)
        said_bytes = made_bytes
    pictures_bytes = len(controls) * picture_bytes
    return ControlBytes(pictures_bytes + peak_bytes, pictures_bytes + said_bytes)


def _called(control: StageModule, batch: int, cells: tuple[int, int], tokens: int) -> tuple[int, int]:
    """The peak of one call beside its inputs, and how many numbers are made in it."""
    made: list[Residuals] = []
    call = _empty_call(control.module, control.compute_dtype, batch, cells, tokens)
    peak_bytes = control.peak_bytes(lambda module: made.append(call(module)))
    return peak_bytes, sum(one.numel() for one in made[0])


def usual_call(dtype: torch.dtype) -> Callable[[nn.Module], object]:
    """One call of a usual size, with inputs that have no values."""
    return lambda module: _empty_call(module, dtype, 2, USUAL_CELLS, USUAL_TOKENS)(module)


def _empty_call(
    module: nn.Module, dtype: torch.dtype, batch: int, cells: tuple[int, int], tokens: int
) -> Callable[[nn.Module], Residuals]:
    """A call with inputs that have no values, made now."""
    config: Any = module.config

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device=META)

    told = {}
    if config.addition_embed_type:
        numbers = SIZE_NUMBERS[SizeConditions.SIZES]
        width = config.projection_class_embeddings_input_dim - numbers * config.addition_time_embed_dim
        told = {"text_embeds": empty(batch, width), "time_ids": empty(batch, numbers, of=torch.float32)}
    inputs = (
        empty(batch, config.in_channels, *cells),
        empty(batch, of=torch.float32),
        empty(batch, tokens, config.cross_attention_dim),
        empty(batch, config.conditioning_channels, *(cell * PIXELS_PER_CELL for cell in cells)),
    )
    return lambda built: call_controlnet(built, *inputs, told)
