"""The table of the ControlNets that are built: which models each kind speaks to, how it is told from the others, built
and called.

A row a kind. Does not know files, nor what is done with what they say (`pool.controlnets.block_samples`).
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
    ZImageControlNetModel,
)
from torch import Tensor, nn

from modelpool.pool.controlnets import calls
from modelpool.pool.controlnets.config import Config, controlnet_config, union_config
from modelpool.pool.controlnets.other_names import sd35_to_diffusers, xlabs_to_diffusers
from modelpool.pool.controlnets.transformer_configs import (
    flux_control_config,
    hunyuan_dit_control_config,
    qwen_image_control_config,
    sd3_control_config,
    z_image_control_config,
)
from modelpool.pool.formats.safetensors_file import Shape
from modelpool.pool.models.common.diffusers_private import controlnet_converter
from modelpool.pool.models.diffusion.image_configs import PATCH

Shapes: TypeAlias = Mapping[str, Shape]
Convert: TypeAlias = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
#: (block, samples that were said, blocks of the model) -> the sample that goes behind it
Spread: TypeAlias = Callable[[int, int, int], int]

#: floating point numbers that a model may compute in, the best first. Source: as of the models that they speak to
_HALF_FIRST, _BFLOAT16_FIRST = ("float16", "bfloat16", "float32"), ("bfloat16", "float16", "float32")
_NO_FLOAT16 = ("bfloat16", "float32")


def evenly(block: int, said: int, blocks: int) -> int:
    """Each sample behind so many blocks that all get one, the last behind those that are left. Source: diffusers'
    FluxTransformer2DModel and QwenImageTransformer2DModel."""
    return block // -(-blocks // said)


def in_proportion(block: int, said: int, blocks: int) -> int:
    """The sample that stands as far along as the block. Source: diffusers' SD3Transformer2DModel."""
    return int(block / (blocks / said))


def in_turn(block: int, said: int, blocks: int) -> int:
    """All samples, then again from the first. Source: the same for ControlNets of XLabs."""
    return block % said


@dataclass(frozen=True, slots=True)
class ControlKind:
    """One kind of ControlNet.

    title     the models that it speaks to, for people
    models    these, as `pool.core.sampling_facts.SamplingFacts.model` calls them; "" is plain UNets
    module    the class
    signs     keys (without prefix) of which a file of the kind has all, in one of these spellings
    config    arguments of the class, from the shapes of its parameters
    convert   for a file with tensors of these shapes, what makes the module's parameters of them
    call      one call
    reads_latent  it reads its image's latent, as the model's VAE makes it; else its pixels
    hears_prompt  it is told the prompt alone, and what it says is for the other texts too, as diffusers' pipelines do
    blocks    of what it says, behind which of the model's blocks it goes; empty for what has a place for each
    spread    how that is spread over them; None goes behind some of them alone, all equally far apart
    modes     names of the modes of those that have several, by number
    patch     cells of its rows of patches, whose channels it counts; 1 for one that counts those of latents
    channels  of latents, where it does not say them
    borrows   layers of the diffusion model do what it has none of its own for: no call without that
    """

    title: str
    models: frozenset[str]
    module: type[nn.Module]
    signs: tuple[frozenset[str], ...]
    config: Callable[[Shapes], Config]
    convert: Callable[[Shapes], Convert]
    call: calls.ControlCall
    reads_latent: bool = True
    hears_prompt: bool = False
    blocks: Mapping[str, str] = field(default_factory=dict)
    spread: Spread | None = evenly
    dtypes: tuple[str, ...] = _HALF_FIRST
    modes: tuple[str, ...] = ()
    patch: int = 1
    channels: int = 0
    borrows: bool = False

    def latent_channels(self, module: nn.Module) -> int:
        """Of the noisy latents that it is told."""
        config: Any = module.config
        return self.channels or int(config.in_channels) // self.patch

    def beside_channels(self, module: nn.Module) -> int:
        """Of what it is told beside the latent of its image, as many as its `patch` for a mask; 0 where it has no
        place for that."""
        config: Any = module.config
        return int(config.get("extra_conditioning_channels", 0) or config.get("extra_condition_channels", 0))

    def is_told_beside(self, module: nn.Module) -> bool:
        """It may be told, beside its own image, of another with a hole and of a mask. Source: diffusers'
        ZImageControlNetInpaintPipeline."""
        config: Any = module.config
        return self.module is ZImageControlNetModel and config.control_in_dim == 2 * self.latent_channels(module) + 1

    def image_channels(self, module: nn.Module, has_hole: bool = False) -> int:
        """Of the latent that it reads as its image, with what it is told of a hole in one."""
        beside = self.latent_channels(module) + 1 if has_hole and self.is_told_beside(module) else 0
        return self.latent_channels(module) + self.beside_channels(module) // self.patch + beside

    def mode_count(self, module: nn.Module) -> int | None:
        """How many modes it has; None for one alone, of which it is not told."""
        config: Any = module.config
        count: int | None = config.get("num_mode") or config.get("num_control_type")
        return count

    def reads_rows(self, module: nn.Module) -> bool:
        """It has no layer that makes rows of patches of a latent: the diffusion model's makes them."""
        config: Any = module.config
        return self.module is SD3ControlNetModel and not config.use_pos_embed

    def reads_unshifted(self, module: nn.Module) -> bool:
        """It was trained with latents that nothing is taken away from before they are scaled. Source: diffusers'
        StableDiffusion3ControlNetPipeline; its StableDiffusion3ControlNetInpaintingPipeline for those that fill
        holes, which were not."""
        config: Any = module.config
        is_unshifted = self.module is SD3ControlNetModel and bool(config.force_zeros_for_pooled_projection)
        return is_unshifted and not self.beside_channels(module)


def _as_it_is(shapes: Shapes) -> Convert:
    return lambda tensors: tensors


def _flux_names(shapes: Shapes) -> Convert:
    return xlabs_to_diffusers if "double_blocks.0.img_attn.qkv.weight" in shapes else _as_it_is(shapes)


def _sd3_names(shapes: Shapes) -> Convert:
    return sd35_to_diffusers if "transformer_blocks.0.attn.qkv.weight" in shapes else _as_it_is(shapes)


_SPEAKS = "controlnet_blocks.0.weight"
_FLUX_BLOCKS = {calls.DOUBLE: "transformer_blocks", calls.SINGLE: "single_transformer_blocks"}
_FLUX = frozenset({"flux_dev", "flux_schnell"})
#: Source: the card of InstantX/FLUX.1-dev-Controlnet-Union
FLUX_MODES = ("canny", "tile", "depth", "blur", "pose", "gray", "low_quality")

#: Source: the card of xinsir/controlnet-union-sdxl-1.0; the last two are those of its "promax" alone
UNION_MODES = ("pose", "depth", "scribble", "canny", "normal", "segment", "tile", "repaint")

#: the first that fits counts
KINDS: tuple[ControlKind, ...] = (
    ControlKind(
        title="Flux, of XLabs",
        models=_FLUX,
        module=FluxControlNetModel,
        signs=(
            frozenset({_SPEAKS, "input_hint_block.0.weight", "double_blocks.0.img_attn.qkv.weight"}),
            frozenset({_SPEAKS, "input_hint_block.conv_in.weight", "context_embedder.weight"}),
        ),
        config=flux_control_config,
        convert=_flux_names,
        call=calls.call_flux_control,
        reads_latent=False,
        hears_prompt=True,
        blocks=_FLUX_BLOCKS,
        spread=in_turn,
        dtypes=_BFLOAT16_FIRST,
        patch=PATCH,
    ),
    ControlKind(
        title="Flux",
        models=_FLUX,
        module=FluxControlNetModel,
        signs=(frozenset({_SPEAKS, "controlnet_x_embedder.weight", "x_embedder.weight", "context_embedder.weight"}),),
        config=flux_control_config,
        convert=_as_it_is,
        call=calls.call_flux_control,
        hears_prompt=True,
        blocks=_FLUX_BLOCKS,
        dtypes=_BFLOAT16_FIRST,
        modes=FLUX_MODES,
        patch=PATCH,
    ),
    ControlKind(
        title="Stable Diffusion 3",
        models=frozenset({"sd3", "sd35_medium", "sd35_large"}),
        module=SD3ControlNetModel,
        signs=(frozenset({_SPEAKS, "pos_embed_input.proj.weight"}),),
        config=sd3_control_config,
        convert=_sd3_names,
        call=calls.call_sd3_control,
        blocks={calls.SD3_BLOCKS: "transformer_blocks"},
        spread=in_proportion,
    ),
    ControlKind(
        title="Qwen-Image",
        models=frozenset({"qwen_image"}),
        module=QwenImageControlNetModel,
        signs=(frozenset({_SPEAKS, "controlnet_x_embedder.weight", "img_in.weight", "txt_in.weight"}),),
        config=qwen_image_control_config,
        convert=_as_it_is,
        call=calls.call_qwen_image_control,
        hears_prompt=True,
        blocks={calls.DOUBLE: "transformer_blocks"},
        dtypes=_NO_FLOAT16,
        patch=PATCH,
    ),
    ControlKind(
        title="HunyuanDiT",
        models=frozenset({"hunyuan_dit", "hunyuan_dit_1"}),
        module=HunyuanDiT2DControlNetModel,
        signs=(frozenset({_SPEAKS, "input_block.weight", "text_embedding_padding"}),),
        config=hunyuan_dit_control_config,
        convert=_as_it_is,
        call=calls.call_hunyuan_dit_control,
    ),
    ControlKind(
        title="Z-Image",
        models=frozenset({"z_image"}),
        module=ZImageControlNetModel,
        signs=(frozenset({"control_all_x_embedder.2-1.weight", "control_layers.0.before_proj.weight"}),),
        config=z_image_control_config,
        convert=_as_it_is,
        call=calls.call_z_image_control,
        blocks={calls.DOUBLE: "layers"},
        spread=None,
        dtypes=_BFLOAT16_FIRST,
        channels=16,
        borrows=True,
    ),
    ControlKind(
        title="Stable Diffusion XL, of several modes",
        models=frozenset({""}),
        module=ControlNetUnionModel,
        signs=(frozenset({"controlnet_cond_embedding.conv_in.weight", "task_embedding", "spatial_ch_projs.weight"}),),
        config=union_config,
        convert=_as_it_is,
        call=calls.call_union_control,
        reads_latent=False,
        modes=UNION_MODES,
    ),
    ControlKind(
        title="Stable Diffusion 1, 2 and XL",
        models=frozenset({""}),
        module=ControlNetModel,
        signs=(frozenset({"controlnet_cond_embedding.conv_in.weight"}), frozenset({"input_hint_block.0.weight"})),
        config=controlnet_config,
        convert=controlnet_converter,
        call=calls.call_unet_control,
        reads_latent=False,
    ),
)


def kind_among(keys: Collection[str]) -> ControlKind | None:
    """The kind of ControlNet that a file with these keys (without prefix) is; None where it is none."""
    known = set(keys)
    return next((kind for kind in KINDS if any(signs <= known for signs in kind.signs)), None)


def kind_of(module: nn.Module) -> ControlKind:
    """The kind of a ControlNet that is built; another module is our mistake."""
    kinds = [kind for kind in KINDS if isinstance(module, kind.module)]
    if len(kinds) > 1:  # one has convolutions over pixels
        reads_latent = getattr(module, "input_hint_block", None) is None
        kinds = [kind for kind in kinds if kind.reads_latent == reads_latent]
    (found,) = kinds
    return found
