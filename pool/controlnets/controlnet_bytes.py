"""How many bytes ControlNets hold on the device beside weights, by dry runs of the code that calls them.

Shape legend: B batch, C channels, H W height and width of a latent, N rows of patches, L tokens, D width of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from modelpool.pool.conditioning.micro_conditioning import GUIDANCE, POOLED, Residuals
from modelpool.pool.controlnets.block_samples import Said, blocks_of
from modelpool.pool.controlnets.calls import Heard
from modelpool.pool.controlnets.kinds import ControlKind, kind_of
from modelpool.pool.core.sampling_facts import SizeConditions
from modelpool.pool.guidance.controlled_transformer import ForEachText
from modelpool.pool.models.common.infer_config import SIZE_NUMBERS
from modelpool.pool.models.diffusion.image_configs import PATCH
from modelpool.pool.tracing.dry_run import META

if TYPE_CHECKING:
    from modelpool.pool.tracing.activation_bytes import StageModule

#: height and width of a latent, and length of a text, of a run of a usual size
USUAL_CELLS, USUAL_TOKENS = (64, 64), 3 * 77
#: width of what the layers of Z-Image are told of time, at most
ADALN_WIDTH = 256
#: pixels along one side of one latent cell: a ControlNet that reads pixels halves its image three times
PIXELS_PER_CELL = 8


@dataclass(frozen=True, slots=True)
class ControlStage:
    """A ControlNet as it is used in a run: whether it is told a hole."""

    stage: StageModule
    has_hole: bool = False


@dataclass(frozen=True, slots=True)
class ControlBytes:
    """What the ControlNets of a run come to.

    peak_bytes  most at once while they are called
    held_bytes  what is there of them while the diffusion model is called: their images, and what they add
    said        what they add to a diffusion model with so many `blocks`, without values; None where there are none
    to_prompt   it was said to the prompt alone
    """

    peak_bytes: int = 0
    held_bytes: int = 0
    said: Said | None = None
    blocks: Mapping[str, int] = field(default_factory=dict)
    to_prompt: bool = False

    def added(self, texts: int) -> Residuals | None:
        """What one call of the diffusion model for so many texts is given of it:
        `pool.controlnets.controlnet_run.Controls`."""
        if self.said is None:
            return None
        spread = self.said.spread(self.blocks)
        return {name: ForEachText(own, texts) for name, own in spread.items()} if self.to_prompt else spread


def hears_prompt(controls: Sequence[ControlStage]) -> bool:
    """Whether these are asked about the prompt alone, in whatever batches the diffusion model is."""
    return any(kind_of(control.stage.module).hears_prompt for control in controls)


def control_bytes(controls: Sequence[ControlStage], model: StageModule, heard: Heard) -> ControlBytes:
    """Of calls of ControlNets, one after the other, beside `model`, which is told what is `heard` but for the images:
    all float32 and without values."""
    if not controls:
        return ControlBytes()
    dtype, batch, cells = model.compute_dtype, len(heard.x_BC), (heard.x_BC.shape[-2], heard.x_BC.shape[-1])
    total: Said | None = None
    peak_bytes = images_bytes = 0
    for control in controls:
        kind = kind_of(control.stage.module)
        image_bytes = 4 * _empty_images(kind, control.stage.module, cells, 1, control.has_hole).numel()
        called_bytes, made = _called(control, model, kind, heard, cells)
        made_bytes, said_bytes = made.to(dtype).held_bytes, 0 if total is None else total.held_bytes
        if dtype is not control.stage.compute_dtype:
            called_bytes = max(called_bytes, made.held_bytes + made_bytes)
        # while it is called, its image is there once for each text; then it is added to what others said
        made = made.to(dtype)
        total = made if total is None else total.plus(made, blocks_of(kind, model.module))
        added_bytes = said_bytes + made_bytes + total.held_bytes if said_bytes else 0
        peak_bytes = max(peak_bytes, said_bytes + batch * image_bytes + called_bytes, added_bytes)
        images_bytes += image_bytes
    assert total is not None
    to_prompt, blocks = hears_prompt(controls), blocks_of(kind_of(controls[0].stage.module), model.module)
    held_bytes = images_bytes + (_prompt_bytes(heard) if to_prompt else 0)
    return ControlBytes(held_bytes + peak_bytes, held_bytes + total.held_bytes, total, blocks, to_prompt)


def _prompt_bytes(heard: Heard) -> int:
    """Of the prompt, which is there once more for those that hear it alone, and of the latent that they heard last."""
    return sum(one.numel() * one.itemsize for one in (heard.x_BC, heard.context_BLD, *heard.told.values()))


def _called(
    used: ControlStage, model: StageModule, kind: ControlKind, heard: Heard, cells: tuple[int, int]
) -> tuple[int, Said]:
    """The peak of one call beside its inputs, and what is said in it."""
    made: list[Said] = []
    control = used.stage
    images = _empty_images(kind, control.module, cells, len(heard.x_BC), used.has_hole).to(control.compute_dtype)
    own = replace(heard, images_BC=images, mode=_first_mode(kind, control.module))
    if kind.reads_rows(control.module):
        own = replace(own, x_BC=_rows(heard.x_BC, control.module))
    own = own.to(control.compute_dtype)

    def call(both: nn.Module) -> None:
        assert isinstance(both, _Both)
        found = kind.call(both.control, replace(own, model=both.model))
        made.append(Said(found, kind))

    both = _Both(control.module, model.module if kind.borrows else None)
    return replace(control, module=both).peak_bytes(call), made[0]


class _Both(nn.Module):
    """A ControlNet, and the diffusion model where it borrows layers of that."""

    def __init__(self, control: nn.Module, model: nn.Module | None) -> None:
        super().__init__()
        self.control, self.model = control, model


def _rows(x_BCHW: Tensor, control: Any) -> Tensor:
    """What the diffusion model makes of a latent for a ControlNet that reads rows of patches."""
    config = control.config
    patches = x_BCHW.shape[-2] * x_BCHW.shape[-1] // config.patch_size**2
    return x_BCHW.new_empty(len(x_BCHW), patches, config.num_attention_heads * config.attention_head_dim)


def _first_mode(kind: ControlKind, control: nn.Module) -> int | None:
    return None if kind.mode_count(control) is None else 0


def _empty_images(
    kind: ControlKind, control: Any, cells: tuple[int, int], batch: int, has_hole: bool = False
) -> Tensor:
    if not kind.reads_latent:
        sides = tuple(cell * PIXELS_PER_CELL for cell in cells)
        return torch.empty((batch, 3, *sides), dtype=torch.float32, device=META)
    return torch.empty((batch, kind.image_channels(control, has_hole), *cells), dtype=torch.float32, device=META)


def usual_call(control: nn.Module, dtype: torch.dtype) -> Callable[[nn.Module], object]:
    """One call of a usual size, with inputs that have no values."""
    kind, batch = kind_of(control), 2

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=META)

    if kind.borrows:
        return partial(_own_layers, dtype=dtype)

    def call(module: nn.Module) -> object:
        config: Any = control.config  # diffusers is not typed
        width = config.get("joint_attention_dim") or config.get("cross_attention_dim") or 1
        x_BCHW = empty(batch, kind.latent_channels(control), *USUAL_CELLS)
        heard = Heard(
            _rows(x_BCHW, control) if kind.reads_rows(control) else x_BCHW,
            empty(batch),
            empty(batch, config.get("text_len") or USUAL_TOKENS, width),
            _empty_images(kind, control, USUAL_CELLS, batch),
            _told(config, empty, batch),
            mode=_first_mode(kind, control),
        )
        return kind.call(module, heard.to(dtype))

    return call


def _own_layers(control: Any, dtype: torch.dtype) -> None:
    """The layers that a ControlNet of Z-Image has itself, one after the other, over an image of a usual size."""
    config, rows = control.config, USUAL_CELLS[0] * USUAL_CELLS[1] // PATCH

    def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device=META)

    x_BND, mask_BN = empty(1, rows, config.dim), empty(1, rows, of=torch.bool)
    beside = (
        mask_BN,
        empty(1, rows, config.dim // config.n_heads // 2, of=torch.complex64),
        empty(1, min(config.dim, ADALN_WIDTH)),
    )
    image_BND = control.control_all_x_embedder["2-1"](empty(1, rows, config.control_in_dim * PATCH))
    speaking = control.control_noise_refiner or ()
    if config.add_control_noise_refiner is None:
        for layer in speaking:
            image_BND = layer(image_BND, *beside)
        speaking = ()
    for layers in (speaking, control.control_layers):
        said = image_BND
        for layer in layers:
            said = layer(said, x_BND, *beside)


def _told(config: Any, empty: Callable[..., Tensor], batch: int) -> dict[str, Tensor]:
    """What a model like that of `config` is told beside a text."""
    if config.get("addition_embed_type"):
        numbers = SIZE_NUMBERS[SizeConditions.SIZES]
        width = config.projection_class_embeddings_input_dim - numbers * config.addition_time_embed_dim
        return {"text_embeds": empty(batch, width), "time_ids": empty(batch, numbers)}
    if config.get("cross_attention_dim_t5"):
        return {"context_2": empty(batch, config.text_len_t5, config.cross_attention_dim_t5)}
    if config.get("pooled_projection_dim"):
        return {POOLED: empty(batch, config.pooled_projection_dim), GUIDANCE: empty(batch)}
    return {}
