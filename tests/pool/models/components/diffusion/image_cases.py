"""Tiny diffusion models for images of every kind that is built: how diffusers makes one, the layout that it is
published in, and the pipeline of diffusers that calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from tests.pool.models.components.diffusion import image_published as layouts
from tests.pool.models.components.diffusion.image_published import File, State
from tests.pool.zoo.case import quiet_libraries

BATCH, WORDS = 2, 7
ModelKwargs = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of diffusion model.

    name      what it is recognised as
    make      diffusers' own module
    publish   its state in the single file's layout
    latent    channels and cells of the latent, with frames between them where it has any
    told      the shape of what it is told, by name; masks leave out the last word of the second image
    golden    the list of published keys that has this layout; empty for none
    unused    keys of the file that are no part of the module
    hints     what the shapes of diffusers' own naming do not tell, as its config.json does
    """

    name: str
    make: Callable[[], Any]
    publish: Callable[[State], File]
    latent: tuple[int, ...]
    told: Mapping[str, tuple[int, ...]]
    golden: str = ""
    unused: tuple[str, ...] = ()
    hints: Mapping[str, Any] = field(default_factory=dict)

    def module(self) -> Any:
        """diffusers' module with weights of its own that are nowhere zero, so that every one of them counts."""
        with quiet_libraries():
            torch.manual_seed(0)
            module = self.make().eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(len(self.name))
        for name, value in sorted(module.state_dict().items()):
            if name != "pos_embed.pos_embed" or self.name.startswith(("sd3", "auraflow")):
                value.copy_(random(value.shape, generator))
        return module

    def empty(self) -> Any:
        """The same without weights."""
        with quiet_libraries(), torch.device("meta"):
            return self.make()

    def file(self, module: nn.Module) -> File:
        """Its state as published."""
        return {key: tensor.contiguous().clone() for key, tensor in self.publish(module.state_dict()).items()}

    def inputs(self) -> tuple[Tensor, ModelKwargs]:
        """A noisy latent, and everything that the model is told."""
        generator = torch.Generator().manual_seed(5)
        told = {name: torch.randn(BATCH, *shape, generator=generator) for name, shape in self.told.items()}
        for name in [name for name in told if name.endswith("_mask")]:
            told[name] = torch.ones(told[name].shape, dtype=torch.bool)
            told[name][1, -1] = False
        if "guidance" in told:
            told["guidance"] = torch.full((BATCH,), 3.5)
        if "next_level" in told:
            told["next_level"] = torch.tensor([0.5, 0.125])
        if "size" in told:
            told["size"] = torch.tensor([[self.latent[1] * 8.0, self.latent[2] * 8.0]]).repeat(BATCH, 1)
        return torch.randn(BATCH, *self.latent, generator=generator), told


def random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers around 0, so small that many layers stay finite; around 1 for vectors, which are often norms."""
    if len(shape) == 1:
        return 1 + torch.randn(shape, generator=generator) * 0.1
    return torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) == 2 else 0.3)


def _sd3(**more: Any) -> Any:
    sizes = {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_attention_heads": 2,
        "attention_head_dim": 64, "joint_attention_dim": 12, "caption_projection_dim": 128,
        "pooled_projection_dim": 10, "pos_embed_max_size": 6,
    }  # fmt: skip
    return diffusers.SD3Transformer2DModel(**sizes, **more)


def _flux(**more: Any) -> Any:
    sizes = {
        "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32,
        "joint_attention_dim": 12, "pooled_projection_dim": 10, "axes_dims_rope": (4, 14, 14),
    }  # fmt: skip
    return diffusers.FluxTransformer2DModel(**{**sizes, **more})


def _flux2(**more: Any) -> Any:
    sizes = {
        "in_channels": 8, "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32,
        "joint_attention_dim": 12, "axes_dims_rope": (8, 8, 8, 8),
    }  # fmt: skip
    return diffusers.Flux2Transformer2DModel(**{**sizes, **more})


def _chroma() -> Any:
    return diffusers.ChromaTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, num_attention_heads=2, attention_head_dim=32,
        joint_attention_dim=12, axes_dims_rope=(4, 14, 14), approximator_num_channels=64, approximator_hidden_dim=16,
        approximator_layers=2,
    )  # fmt: skip


def _qwen_image() -> Any:
    return diffusers.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=32,
        joint_attention_dim=12, axes_dims_rope=(4, 14, 14),
    )  # fmt: skip


def _qwen_image_layered() -> Any:
    return diffusers.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=32,
        joint_attention_dim=12, axes_dims_rope=(4, 14, 14), use_additional_t_cond=True, use_layer3d_rope=True,
    )  # fmt: skip


def _z_image() -> Any:
    return diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=64, n_layers=2, n_refiner_layers=2, n_heads=2, n_kv_heads=2, cap_feat_dim=12,
        axes_dims=[8, 12, 12], axes_lens=[64, 32, 32],
    )  # fmt: skip


def _lumina2() -> Any:
    return diffusers.Lumina2Transformer2DModel(
        sample_size=8, in_channels=4, hidden_size=48, num_layers=2, num_refiner_layers=2, num_attention_heads=4,
        num_kv_heads=2, multiple_of=20, axes_dim_rope=(4, 4, 4), axes_lens=(300, 512, 512), cap_feat_dim=12,
    )  # fmt: skip


def _auraflow() -> Any:
    return diffusers.AuraFlowTransformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, num_mmdit_layers=2, num_single_dit_layers=2,
        num_attention_heads=1, attention_head_dim=32, joint_attention_dim=12, caption_projection_dim=32,
        pos_embed_max_size=64,
    )  # fmt: skip


def _pixart(**more: Any) -> Any:
    sizes = {
        "num_attention_heads": 16, "attention_head_dim": 3, "in_channels": 4, "out_channels": 8, "num_layers": 2,
        "cross_attention_dim": 48, "caption_channels": 12,
    }  # fmt: skip
    return diffusers.PixArtTransformer2DModel(**sizes, **more)


def _publish_pixart(cells: int) -> Callable[[State], File]:
    """With the table of positions of a model for so many cells a side."""

    def publish(state: State) -> File:
        from diffusers.models.embeddings import get_2d_sincos_pos_embed

        side = cells // 2
        table = get_2d_sincos_pos_embed(
            48, side, base_size=side, interpolation_scale=max(1, cells // 64), output_type="pt"
        )
        return layouts.pixart(state) | {"pos_embed": table.float()[None]}

    return publish


def _hunyuan_dit(**more: Any) -> Any:
    return diffusers.HunyuanDiT2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=4, num_attention_heads=2, attention_head_dim=16,
        hidden_size=32, mlp_ratio=4.3637, cross_attention_dim=12, cross_attention_dim_t5=16, pooled_projection_dim=10,
        text_len=77, text_len_t5=6, **more,
    )  # fmt: skip


def _hidream() -> Any:
    return diffusers.HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, num_attention_heads=1,
        attention_head_dim=128, caption_channels=[12, 14], text_emb_dim=10, num_routed_experts=4,
        axes_dims_rope=(64, 32, 32), llama_layers=[0, 1],
    )  # fmt: skip


def _hunyuan_image(**more: Any) -> Any:
    sizes = {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 2,
        "num_single_layers": 2, "num_refiner_layers": 2, "text_embed_dim": 12, "text_embed_2_dim": 14,
        "rope_axes_dim": (16, 16),
    }  # fmt: skip
    return diffusers.HunyuanImageTransformer2DModel(**{**sizes, **more})


_TEXT = {"context": (WORDS, 12)}
_MASKED = _TEXT | {"context_mask": (WORDS,)}
_POOLED = _TEXT | {"pooled": (10,)}
_TWO_TEXTS = {
    "context": (77, 12), "context_mask": (77,), "context_2": (6, 16), "context_2_mask": (6,),
}  # fmt: skip
_PIXART_UNUSED = ("pos_embed", "y_embedder.y_embedding")

_ALL = (
    Case("sd3", lambda: _sd3(num_layers=2), layouts.sd3, (4, 8, 6), _POOLED, "sd3_medium"),
    Case(
        "sd35_medium", lambda: _sd3(num_layers=3, dual_attention_layers=(0,), qk_norm="rms_norm"), layouts.sd3,
        (4, 8, 6), _POOLED, "sd35_medium",
    ),
    Case("sd35_large", lambda: _sd3(num_layers=2, qk_norm="rms_norm"), layouts.sd3, (4, 6, 8), _POOLED),
    Case(
        "flux_dev", lambda: _flux(guidance_embeds=True), layouts.flux, (4, 8, 6), _POOLED | {"guidance": ()},
        "flux_dev",
    ),
    Case("flux_schnell", _flux, layouts.flux, (4, 8, 6), _POOLED, "flux_schnell"),
    Case(
        "flux_fill", lambda: _flux(in_channels=384, out_channels=64, guidance_embeds=True), layouts.flux, (16, 8, 6),
        _POOLED | {"guidance": (), "image": (80, 8, 6)}, "flux_dev",
    ),
    Case(
        "flux_control", lambda: _flux(in_channels=128, out_channels=64, guidance_embeds=True), layouts.flux,
        (16, 8, 6), _POOLED | {"guidance": (), "image": (16, 8, 6)}, "flux_dev",
    ),
    Case("flux2", _flux2, layouts.flux2, (8, 4, 3), _TEXT | {"guidance": ()}, "flux2_dev"),
    Case("flux2_klein", lambda: _flux2(guidance_embeds=False), layouts.flux2, (8, 4, 3), _TEXT, "flux2_dev"),
    Case("chroma", _chroma, layouts.chroma, (4, 8, 6), _MASKED, "chroma"),
    Case("qwen_image", _qwen_image, layouts.as_diffusers, (4, 8, 6), _MASKED, "qwen_image"),
    Case(
        "qwen_image_layered", _qwen_image_layered, layouts.as_diffusers, (4, 3, 8, 6),
        _MASKED | {"reference": (4, 6, 4)},
    ),
    Case("z_image", _z_image, layouts.z_image, (4, 8, 6), _MASKED, "z_image", ("norm_final.weight",)),
    Case("lumina2", _lumina2, layouts.lumina2, (4, 8, 6), _MASKED, "lumina2", ("norm_final.weight",)),
    Case("auraflow", _auraflow, layouts.auraflow, (4, 8, 6), _MASKED, "auraflow_0.3"),
    Case(
        "pixart_alpha", lambda: _pixart(sample_size=128, use_additional_conditions=True), _publish_pixart(128),
        (4, 8, 6), _MASKED | {"size": (2,)}, "", _PIXART_UNUSED,
    ),
    Case(
        "pixart_sigma", lambda: _pixart(sample_size=64, use_additional_conditions=False), _publish_pixart(64),
        (4, 8, 6), _MASKED, "pixart_sigma_1024", _PIXART_UNUSED, {"sample_size": 64},
    ),
    Case(
        "hunyuan_dit", lambda: _hunyuan_dit(use_style_cond_and_image_meta_size=False), layouts.hunyuan_dit, (4, 8, 6),
        _TWO_TEXTS, "hunyuan_dit_1.2",
    ),
    Case("hunyuan_dit with sizes", _hunyuan_dit, layouts.hunyuan_dit, (4, 8, 6), _TWO_TEXTS),
    Case(
        "hunyuan_image_21", _hunyuan_image, layouts.hunyuan_image, (4, 8, 6),
        _MASKED | {"context_2": (5, 14), "context_2_mask": (5,)}, "hunyuan_image_2.1",
    ),
    Case(
        "hunyuan_image_21 distilled", lambda: _hunyuan_image(guidance_embeds=True, use_meanflow=True),
        layouts.hunyuan_image, (4, 8, 6),
        _MASKED | {"context_2": (5, 14), "context_2_mask": (5,), "guidance": (), "next_level": ()},
    ),
    Case(
        "hidream_i1", _hidream, layouts.as_diffusers, (4, 8, 8),
        {"context": (WORDS, 12), "context_2": (3, WORDS, 14), "pooled": (10,)}, "hidream_i1",
    ),
)  # fmt: skip

CASES: Mapping[str, Case] = {case.name: case for case in _ALL}
