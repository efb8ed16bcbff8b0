"""The table of ControlNet kinds: the models that each is for, how it is detected, built and called.

One row for each kind. Knows neither files nor the use of residuals (`pool.inference.controlnets.block_samples`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from diffusers import (
    ControlNetModel,
    ControlNetUnionModel,
    FluxControlNetModel,
    HunyuanDiT2DControlNetModel,
    QwenImageControlNetModel,
    SD3ControlNetModel,
    T2IAdapter,
    ZImageControlNetModel,
)
from torch import Tensor, nn

from modelpool.pool.families.definitions import defined_families
from modelpool.pool.families.detection.other_files import CONTROL_SIGNS, control_kind
from modelpool.pool.families.parts.arguments import PATCH
from modelpool.pool.families.parts.family import BFLOAT16_FIRST, HALF_FIRST, NO_FLOAT16
from modelpool.pool.families.parts.latent_formats import LATENT_FORMATS
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.inference.controlnets import calls
from modelpool.pool.inference.controlnets.blockwise import BlockwiseControlNet, call_blockwise_control
from modelpool.pool.inference.controlnets.cascade_controlnets import (
    CascadeControlNet,
    call_cascade_control,
    cascade_control_config,
)
from modelpool.pool.inference.controlnets.config import Config, controlnet_config, union_config
from modelpool.pool.inference.controlnets.controlnet_names import sd35_to_diffusers, xlabs_to_diffusers
from modelpool.pool.inference.controlnets.t2i_adapters import call_t2i_adapter, t2i_adapter_config, t2i_names
from modelpool.pool.inference.controlnets.transformer_configs import (
    blockwise_control_config,
    flux_control_config,
    hunyuan_dit_control_config,
    qwen_image_control_config,
    sd3_control_config,
    z_image_control_config,
)
from modelpool.pool.models.components.common.diffusers_private import controlnet_converter
from modelpool.pool.models.components.common.efficientnet_config import EFFICIENTNET_CELL

Shapes: TypeAlias = Mapping[str, Shape]
Convert: TypeAlias = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
#: (block, number of residuals, blocks of the model) -> the residual of the block
Spread: TypeAlias = Callable[[int, int, int], int]


def evenly(block: int, count: int, blocks: int) -> int:
    """Each residual for the same number of consecutive blocks, the last one for the rest. Source: diffusers'
    FluxTransformer2DModel and QwenImageTransformer2DModel."""
    return block // -(-blocks // count)


def in_proportion(block: int, count: int, blocks: int) -> int:
    """The residual at the relative position of the block. Source: diffusers' SD3Transformer2DModel."""
    return int(block / (blocks / count))


def in_turn(block: int, count: int, blocks: int) -> int:
    """All residuals in turn, repeatedly. Source: diffusers' FluxTransformer2DModel for ControlNets of XLabs."""
    return block % count


@dataclass(frozen=True, slots=True)
class ControlKind:
    """One kind of ControlNet.

    name      its row in `pool.families.detection.other_files.CONTROL_SIGNS`, which has the keys of its files
    models    these, by `pool.values.core.sampling_facts.SamplingFacts.model`; "" is UNets
    module    the class
    config    arguments of the class, from the shapes of its parameters
    convert   returns the converter to the module's parameters for a file with these shapes
    call      one call
    reads_latent  it reads the VAE latent of its image, else pixels
    reads_prompt_only  it reads only the prompt, and its residuals are used for other texts too, as in diffusers'
              pipelines
    blocks    blocks of the model for each kind of residual; empty if residuals have fixed places
    spread    how residuals are spread over the blocks; None: over some of them, evenly spaced
    modes     names of the modes of a ControlNet with several, by number
    patch     latent positions per patch in its channel counts; 1 if it counts channels of latents
    channels  latent channels, if its configuration does not have them
    borrows   it uses layers of the diffusion model, and cannot be called without it
    reads_image_only  its residuals depend on nothing but its image: it is called once in a run
    is_blockwise  its blocks run behind the blocks of the model (`pool.inference.controlnets.blockwise`); a call returns
              what they read
    cell_side  it reads pixels of its image in another size than the output's, so many along a side for each cell of the
              latent (`pool.inference.controlnets.cascade_controlnets`); 0: in the size of the output
    """

    name: str
    models: frozenset[str]
    module: type[nn.Module]
    config: Callable[[Shapes], Config]
    convert: Callable[[Shapes], Convert]
    call: calls.ControlCall
    reads_latent: bool = True
    reads_prompt_only: bool = False
    blocks: Mapping[str, str] = field(default_factory=dict)
    spread: Spread | None = evenly
    dtypes: tuple[str, ...] = HALF_FIRST
    modes: tuple[str, ...] = ()
    patch: int = 1
    channels: int = 0
    borrows: bool = False
    reads_image_only: bool = False
    is_blockwise: bool = False
    cell_side: int = 0

    @property
    def title(self) -> str:
        """The models that it is for, for display."""
        return CONTROL_SIGNS[self.name].models

    @property
    def signs(self) -> tuple[frozenset[str], ...]:
        """Sets of keys, without prefix: a file of this kind has all keys of one of them."""
        return CONTROL_SIGNS[self.name].signs

    def latent_channels(self, module: nn.Module) -> int:
        """Return the channels of the noisy latents that it reads."""
        config: Any = module.config
        return self.channels or int(config.in_channels) // self.patch

    def extra_channels(self, module: nn.Module) -> int:
        """Return the input channels other than the latent of its image: `patch` of them for a mask, 0 without one."""
        config: Any = module.config
        return int(config.get("extra_conditioning_channels", 0) or config.get("extra_condition_channels", 0))

    def reads_masked_latent(self, module: nn.Module) -> bool:
        """Whether it can read the masked latent of another image, and a mask. Source: diffusers'
        ZImageControlNetInpaintPipeline."""
        config: Any = module.config
        return self.module is ZImageControlNetModel and config.control_in_dim == 2 * self.latent_channels(module) + 1

    def image_channels(self, module: nn.Module, has_hole: bool = False) -> int:
        """Return the channels of its control image's latent, including those for an inpaint mask."""
        others = self.latent_channels(module) + 1 if has_hole and self.reads_masked_latent(module) else 0
        return self.latent_channels(module) + self.extra_channels(module) // self.patch + others

    def pixel_channels(self, module: nn.Module) -> int:
        """Return the channels of its control image, if it reads pixels."""
        config: Any = module.config
        return int(config.in_channels) if self.cell_side else 3

    def mode_count(self, module: nn.Module) -> int | None:
        """Return its number of modes; None for a ControlNet without a mode input."""
        config: Any = module.config
        count: int | None = config.get("num_mode") or config.get("num_control_type")
        return count

    def reads_rows(self, module: nn.Module) -> bool:
        """Whether it has no patch embedding: it reads the diffusion model's."""
        config: Any = module.config
        return self.module is SD3ControlNetModel and not config.use_pos_embed

    def reads_unshifted(self, module: nn.Module) -> bool:
        """Whether it was trained with latents that are scaled without subtracting the shift. Source: diffusers'
        StableDiffusion3ControlNetPipeline; inpainting ControlNets were not, by its
        StableDiffusion3ControlNetInpaintingPipeline."""
        config: Any = module.config
        is_unshifted = self.module is SD3ControlNetModel and bool(config.force_zeros_for_pooled_projection)
        return is_unshifted and not self.extra_channels(module)


def _models(name: str) -> frozenset[str]:
    """Return the families that call their ControlNets `name`."""
    return frozenset(family.name for family in defined_families() if family.options.controlnets == name)


def _as_it_is(shapes: Shapes) -> Convert:
    return lambda tensors: tensors


def _flux_names(shapes: Shapes) -> Convert:
    return xlabs_to_diffusers if "double_blocks.0.img_attn.qkv.weight" in shapes else _as_it_is(shapes)


def _sd3_names(shapes: Shapes) -> Convert:
    return sd35_to_diffusers if "transformer_blocks.0.attn.qkv.weight" in shapes else _as_it_is(shapes)


_FLUX_BLOCKS = {calls.DOUBLE: "transformer_blocks", calls.SINGLE: "single_transformer_blocks"}
#: Source: the card of InstantX/FLUX.1-dev-Controlnet-Union
FLUX_MODES = ("canny", "tile", "depth", "blur", "pose", "gray", "low_quality")

#: Source: the card of xinsir/controlnet-union-sdxl-1.0; only its "promax" version has the last two
UNION_MODES = ("pose", "depth", "scribble", "canny", "normal", "segment", "tile", "repaint")

KINDS: tuple[ControlKind, ...] = (
    ControlKind(
        name="flux_xlabs",
        models=_models("flux"),
        module=FluxControlNetModel,
        config=flux_control_config,
        convert=_flux_names,
        call=calls.call_flux_control,
        reads_latent=False,
        reads_prompt_only=True,
        blocks=_FLUX_BLOCKS,
        spread=in_turn,
        dtypes=BFLOAT16_FIRST,
        patch=PATCH,
    ),
    ControlKind(
        name="flux",
        models=_models("flux"),
        module=FluxControlNetModel,
        config=flux_control_config,
        convert=_as_it_is,
        call=calls.call_flux_control,
        reads_prompt_only=True,
        blocks=_FLUX_BLOCKS,
        dtypes=BFLOAT16_FIRST,
        modes=FLUX_MODES,
        patch=PATCH,
    ),
    ControlKind(
        name="sd3",
        models=_models("sd3"),
        module=SD3ControlNetModel,
        config=sd3_control_config,
        convert=_sd3_names,
        call=calls.call_sd3_control,
        blocks={calls.SD3_BLOCKS: "transformer_blocks"},
        spread=in_proportion,
    ),
    ControlKind(
        name="qwen_image",
        models=_models("qwen_image"),
        module=QwenImageControlNetModel,
        config=qwen_image_control_config,
        convert=_as_it_is,
        call=calls.call_qwen_image_control,
        reads_prompt_only=True,
        blocks={calls.DOUBLE: "transformer_blocks"},
        dtypes=NO_FLOAT16,
        patch=PATCH,
    ),
    ControlKind(
        name="qwen_image_blockwise",
        models=_models("qwen_image"),
        module=BlockwiseControlNet,
        config=blockwise_control_config,
        convert=_as_it_is,
        call=call_blockwise_control,
        blocks={calls.DOUBLE: "transformer_blocks"},
        dtypes=NO_FLOAT16,
        patch=PATCH,
        is_blockwise=True,
    ),
    ControlKind(
        name="hunyuan_dit",
        models=_models("hunyuan_dit"),
        module=HunyuanDiT2DControlNetModel,
        config=hunyuan_dit_control_config,
        convert=_as_it_is,
        call=calls.call_hunyuan_dit_control,
    ),
    ControlKind(
        name="z_image",
        models=_models("z_image"),
        module=ZImageControlNetModel,
        config=z_image_control_config,
        convert=_as_it_is,
        call=calls.call_z_image_control,
        blocks={calls.DOUBLE: "layers"},
        spread=None,
        dtypes=BFLOAT16_FIRST,
        channels=16,
        borrows=True,
    ),
    ControlKind(
        name="sdxl_union",
        models=frozenset({""}),
        module=ControlNetUnionModel,
        config=union_config,
        convert=_as_it_is,
        call=calls.call_union_control,
        reads_latent=False,
        modes=UNION_MODES,
    ),
    ControlKind(
        name="unet",
        models=frozenset({""}),
        module=ControlNetModel,
        config=controlnet_config,
        convert=controlnet_converter,
        call=calls.call_unet_control,
        reads_latent=False,
    ),
    ControlKind(
        name="t2i",
        models=frozenset({""}),
        module=T2IAdapter,
        config=t2i_adapter_config,
        convert=t2i_names,
        call=call_t2i_adapter,
        reads_latent=False,
        reads_image_only=True,
    ),
    ControlKind(
        name="cascade",
        models=frozenset({"cascade_c", "cascade_c_lite"}),
        module=CascadeControlNet,
        config=cascade_control_config,
        convert=_as_it_is,
        call=call_cascade_control,
        reads_latent=False,
        dtypes=NO_FLOAT16,
        channels=LATENT_FORMATS["cascade_c"].channels,
        reads_image_only=True,
        cell_side=EFFICIENTNET_CELL,
    ),
)


def kind_among(keys: Collection[str]) -> ControlKind | None:
    """Return the kind of ControlNet of a file with these keys (without prefix); None if it is none."""
    name = control_kind(keys)
    return next((kind for kind in KINDS if kind.name == name), None)


def kind_of(module: nn.Module) -> ControlKind:
    """Return the kind of a built ControlNet; another module is a bug."""
    kinds = [kind for kind in KINDS if isinstance(module, kind.module)]
    if len(kinds) > 1:  # one of them has convolutions over pixels
        reads_latent = getattr(module, "input_hint_block", None) is None
        kinds = [kind for kind in kinds if kind.reads_latent == reads_latent]
    (found,) = kinds
    return found
