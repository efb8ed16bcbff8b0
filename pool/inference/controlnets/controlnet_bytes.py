"""Bytes that ControlNets hold on the device in addition to weights, by dry runs of the code that calls them.

Shape legend: B batch, C channels, H W height and width of a latent, N rows of patches, L tokens, D width of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from modelpool.pool.families.parts.arguments import PATCH
from modelpool.pool.inference.conditioning.micro_conditioning import GUIDANCE, POOLED, Residuals
from modelpool.pool.inference.controlnets.block_samples import ControlResiduals, blocks_of
from modelpool.pool.inference.controlnets.blockwise import all_layers
from modelpool.pool.inference.controlnets.calls import ControlInputs
from modelpool.pool.inference.controlnets.cascade_controlnets import BEFORE_BLOCKS
from modelpool.pool.inference.controlnets.controlnet_kinds import ControlKind, kind_of
from modelpool.pool.inference.guidance.controlled_transformer import RepeatedResiduals
from modelpool.pool.models.components.common.infer_config import SIZE_NUMBERS
from modelpool.pool.values.core.sampling_facts import MicroConditioning
from modelpool.pool.weights.tracing.dry_run import META

if TYPE_CHECKING:
    from modelpool.pool.weights.tracing.activation_bytes import StageModule

#: latent size and text length of a typical run
USUAL_CELLS, TYPICAL_TOKENS = (64, 64), 3 * 77
#: largest width of the time embedding of Z-Image's layers
ADALN_WIDTH = 256
#: pixels per latent position along one side: a ControlNet that reads pixels halves its image three times
PIXELS_PER_CELL = 8


@dataclass(frozen=True, slots=True)
class ControlStage:
    """A ControlNet as it is used in a run: with or without an inpaint mask."""

    stage: StageModule
    has_hole: bool = False


@dataclass(frozen=True, slots=True)
class ControlBytes:
    """The memory of the ControlNets of a run.

    peak_bytes  peak while they are called
    held_bytes  bytes held while the diffusion model is called: control images and residuals
    residuals   residuals for a diffusion model with these numbers of `blocks`, without values; None without ControlNets
    to_prompt   they were computed for the prompt only
    """

    peak_bytes: int = 0
    held_bytes: int = 0
    residuals: ControlResiduals | None = None
    blocks: Mapping[str, int] = field(default_factory=dict)
    to_prompt: bool = False

    def added(self, texts: int) -> Residuals | None:
        """Return the residuals for one call of the diffusion model with `texts` texts, as
        `pool.inference.controlnets.controlnet_run.RunControlNets` does."""
        if self.residuals is None:
            return None
        spread = self.residuals.spread(self.blocks)
        # residuals before blocks are no argument of the model
        spread = {name: samples for name, samples in spread.items() if name != BEFORE_BLOCKS}
        if not spread:
            return None
        return {name: RepeatedResiduals(inputs, texts) for name, inputs in spread.items()} if self.to_prompt else spread


def reads_prompt_only(controls: Sequence[ControlStage]) -> bool:
    """Whether any of these is called with the prompt only, whatever the batches of the diffusion model are."""
    return any(kind_of(control.stage.module).reads_prompt_only for control in controls)


def control_bytes(controls: Sequence[ControlStage], model: StageModule, control_inputs: ControlInputs) -> ControlBytes:
    """Return the memory of calls of ControlNets, one after the other, with `model` and the inputs `control_inputs`
    except the images: all float32 and without values."""
    if not controls:
        return ControlBytes()
    dtype, batch, cells = (
        model.compute_dtype,
        len(control_inputs.x_BC),
        (control_inputs.x_BC.shape[-2], control_inputs.x_BC.shape[-1]),
    )
    total: ControlResiduals | None = None
    peak_bytes = images_bytes = 0
    for control in controls:
        kind = kind_of(control.stage.module)
        image_bytes = 4 * _empty_images(kind, control.stage.module, cells, 1, control.has_hole).numel()
        called_bytes, made = _called(control, model, kind, control_inputs, cells)
        made_bytes, said_bytes = made.to(dtype).held_bytes, 0 if total is None else total.held_bytes
        if dtype is not control.stage.compute_dtype:
            called_bytes = max(called_bytes, made.held_bytes + made_bytes)
        # during its call, its image exists once for each text; then its residuals are added to the others
        made = made.to(dtype)
        if kind.is_blockwise:  # a block needs less than the model's, behind which it runs
            images_bytes += image_bytes + made_bytes
            peak_bytes = max(peak_bytes, called_bytes)
            continue
        total = made if total is None else total.plus(made, blocks_of(kind, model.module))
        added_bytes = said_bytes + made_bytes + total.held_bytes if said_bytes else 0
        rows = 1 if kind.reads_image_only else batch
        peak_bytes = max(peak_bytes, said_bytes + rows * image_bytes + called_bytes, added_bytes)
        images_bytes += image_bytes
    if total is None:
        return ControlBytes(images_bytes + peak_bytes, images_bytes)
    residual_kinds = [found for each in controls if not (found := kind_of(each.stage.module)).is_blockwise]
    to_prompt, blocks = reads_prompt_only(controls), blocks_of(residual_kinds[0], model.module)
    held_bytes = images_bytes + (_prompt_bytes(control_inputs) if to_prompt else 0)
    return ControlBytes(held_bytes + peak_bytes, held_bytes + total.held_bytes, total, blocks, to_prompt)


def _prompt_bytes(control_inputs: ControlInputs) -> int:
    """Return the bytes of the copy of the prompt for ControlNets that read only it, and of their last latent."""
    return sum(
        one.numel() * one.itemsize
        for one in (control_inputs.x_BC, control_inputs.context_BLD, *control_inputs.model_kwargs.values())
    )


def _called(
    used: ControlStage, model: StageModule, kind: ControlKind, control_inputs: ControlInputs, cells: tuple[int, int]
) -> tuple[int, ControlResiduals]:
    """Return the peak of one call in addition to its inputs, and the residuals."""
    made: list[ControlResiduals] = []
    control = used.stage
    rows = 1 if kind.reads_image_only or kind.is_blockwise else len(control_inputs.x_BC)
    images = _empty_images(kind, control.module, cells, rows, used.has_hole).to(control.compute_dtype)
    inputs = replace(control_inputs, images_BC=images, mode=_first_mode(kind, control.module))
    if kind.reads_rows(control.module):
        inputs = replace(inputs, x_BC=_rows(control_inputs.x_BC, control.module))
    inputs = inputs.to(control.compute_dtype)

    def call(both: nn.Module) -> None:
        assert isinstance(both, _Both)
        found = kind.call(both.control, replace(inputs, model=both.model))
        made.append(ControlResiduals(found, kind))

    both = _Both(control.module, model.module if kind.borrows else None)
    return replace(control, module=both).peak_bytes(call), made[0]


class _Both(nn.Module):
    """A ControlNet, and the diffusion model if it uses layers of that."""

    def __init__(self, control: nn.Module, model: nn.Module | None) -> None:
        super().__init__()
        self.control, self.model = control, model


def _rows(x_BCHW: Tensor, control: Any) -> Tensor:
    """Return the shape of the diffusion model's patch embeddings, for a ControlNet that reads them."""
    config = control.config
    patches = x_BCHW.shape[-2] * x_BCHW.shape[-1] // config.patch_size**2
    return x_BCHW.new_empty(len(x_BCHW), patches, config.num_attention_heads * config.attention_head_dim)


def _first_mode(kind: ControlKind, control: nn.Module) -> int | None:
    return None if kind.mode_count(control) is None else 0


def _empty_images(
    kind: ControlKind, control: Any, cells: tuple[int, int], batch: int, has_hole: bool = False
) -> Tensor:
    if not kind.reads_latent:
        sides = tuple(cell * (kind.cell_side or PIXELS_PER_CELL) for cell in cells)
        return torch.empty((batch, kind.pixel_channels(control), *sides), dtype=torch.float32, device=META)
    return torch.empty((batch, kind.image_channels(control, has_hole), *cells), dtype=torch.float32, device=META)


def typical_call(control: nn.Module, dtype: torch.dtype) -> Callable[[nn.Module], object]:
    """Return one call of typical size, with inputs without values."""
    kind, batch = kind_of(control), 2

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=META)

    if kind.is_blockwise:
        image = _empty_images(kind, control, USUAL_CELLS, 1).to(dtype)
        return lambda module: all_layers(module, image)
    if kind.borrows:
        return partial(_own_layers, dtype=dtype)

    def call(module: nn.Module) -> object:
        config: Any = control.config  # diffusers is not typed
        width = config.get("joint_attention_dim") or config.get("cross_attention_dim") or 1
        x_BCHW = empty(batch, kind.latent_channels(control), *USUAL_CELLS)
        control_inputs = ControlInputs(
            _rows(x_BCHW, control) if kind.reads_rows(control) else x_BCHW,
            empty(batch),
            empty(batch, config.get("text_len") or TYPICAL_TOKENS, width),
            _empty_images(kind, control, USUAL_CELLS, batch),
            _told(config, empty, batch),
            mode=_first_mode(kind, control),
        )
        return kind.call(module, control_inputs.to(dtype))

    return call


def _own_layers(control: Any, dtype: torch.dtype) -> None:
    """Call the layers that a ControlNet of Z-Image has itself, one after the other, for a typical image size."""
    config, rows = control.config, USUAL_CELLS[0] * USUAL_CELLS[1] // PATCH

    def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device=META)

    x_BND, mask_BN = empty(1, rows, config.dim), empty(1, rows, of=torch.bool)
    others = (
        mask_BN,
        empty(1, rows, config.dim // config.n_heads // 2, of=torch.complex64),
        empty(1, min(config.dim, ADALN_WIDTH)),
    )
    image_BND = control.control_all_x_embedder["2-1"](empty(1, rows, config.control_in_dim * PATCH))
    refiners = control.control_noise_refiner or ()
    if config.add_control_noise_refiner is None:
        for layer in refiners:
            image_BND = layer(image_BND, *others)
        refiners = ()
    for layers in (refiners, control.control_layers):
        residual = image_BND
        for layer in layers:
            residual = layer(residual, x_BND, *others)


def _told(config: Any, empty: Callable[..., Tensor], batch: int) -> dict[str, Tensor]:
    """Return the other inputs of a model with this ControlNet's `config`."""
    if config.get("addition_embed_type"):
        numbers = SIZE_NUMBERS[MicroConditioning.SIZES]
        width = config.projection_class_embeddings_input_dim - numbers * config.addition_time_embed_dim
        return {"text_embeds": empty(batch, width), "time_ids": empty(batch, numbers)}
    if config.get("cross_attention_dim_t5"):
        return {"context_2": empty(batch, config.text_len_t5, config.cross_attention_dim_t5)}
    if config.get("pooled_projection_dim"):
        return {POOLED: empty(batch, config.pooled_projection_dim), GUIDANCE: empty(batch)}
    return {}
