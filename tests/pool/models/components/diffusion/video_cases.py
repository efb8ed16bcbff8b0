"""Tiny models for video and audio, of Stable Cascade and UNets that read something beside a text: how diffusers makes
one, and the layout that it is published in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from tests.pool.models.components.diffusion import video_published as layouts
from tests.pool.models.components.diffusion.image_cases import random
from tests.pool.models.components.diffusion.video_published import File, State
from tests.pool.zoo.case import quiet_libraries

WORDS = 7
ModelKwargs = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of diffusion model.

    name     what it is recognised as
    make     diffusers' own module
    publish  its state in the single file's layout
    latent   channels and cells of the latent
    told     the shape of what it is told, by name; masks leave out the last word
    golden   the list of published keys that has this layout; empty for none
    unused   keys of the file that are no part of the module
    level    the number that it is told of noise
    hints    what the shapes of diffusers' own naming do not tell, as its config.json does
    """

    name: str
    make: Callable[[], Any]
    publish: Callable[[State], File]
    latent: tuple[int, ...]
    told: Mapping[str, tuple[int, ...]]
    golden: str = ""
    unused: tuple[str, ...] = ()
    level: float = 0.75
    hints: Mapping[str, Any] = field(default_factory=dict)

    def module(self) -> Any:
        """diffusers' module with weights of its own that are nowhere zero, so that every one of them counts."""
        with quiet_libraries():
            torch.manual_seed(0)
            module = self.make().eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(len(self.name))
        for _, value in sorted(module.state_dict().items()):
            value.copy_(random(tuple(value.shape), generator))
        return module

    def empty(self) -> Any:
        """The same without weights."""
        with quiet_libraries(), torch.device("meta"):
            return self.make()

    def file(self, module: nn.Module) -> File:
        """Its state as published."""
        return {key: tensor.contiguous().clone() for key, tensor in self.publish(module.state_dict()).items()}

    def inputs(self) -> tuple[Tensor, Tensor, ModelKwargs]:
        """A noisy latent, its level, and everything that the model is told."""
        generator = torch.Generator().manual_seed(5)
        told = {name: torch.randn(1, *shape, generator=generator) for name, shape in self.told.items()}
        for name in [name for name in told if name in ("context_mask", "context_2_mask")]:
            told[name] = torch.ones(told[name].shape, dtype=torch.bool)
            told[name][0, -1] = False
        plain = {"guidance": 6.0, "frame_rate": 24.0}
        told |= {name: torch.full((1,), value) for name, value in plain.items() if name in told}
        if "noise_level" in told:
            told["noise_level"] = torch.tensor([3])
        if self.name == "hunyuan_video_i2v":  # latents of the first frame, and a mask that says so
            told["image"][:, :, 1:] = 0
            told["image"][:, -1:, :1] = 1
        if "image_mask" in told:
            told["image_mask"] = torch.zeros(1, 1, *self.latent[1:])
            told["image_mask"][:, :, 0] = 1
        return torch.randn(1, *self.latent, generator=generator), torch.full((1,), self.level), told

    def config(self, module: nn.Module) -> dict[str, Any]:
        """What a folder's config.json says of `module`."""
        named: dict[str, Any] = dict(module.config)  # type: ignore[arg-type]
        return named | {"_class_name": type(module).__name__}


def _wan(**more: Any) -> Any:
    sizes = {
        "num_attention_heads": 1, "attention_head_dim": 128, "in_channels": 16, "out_channels": 16, "text_dim": 12,
        "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 1024,
    }  # fmt: skip
    return diffusers.WanTransformer3DModel(**{**sizes, **more})


_WAN_IMAGE = {"image_dim": 10, "added_kv_proj_dim": 128}


def _wan_reference() -> Any:
    """diffusers has no class that reads a reference image."""
    from modelpool.pool.models.components.diffusion.adapted_modules import WanReferenceTransformer3DModel

    own = {key: value for key, value in _wan(in_channels=52).config.items() if key[0] != "_"}
    return WanReferenceTransformer3DModel(**own, reference_channels=16)


def _wan_camera() -> Any:
    """diffusers has no class that reads a camera."""
    from modelpool.pool.models.components.diffusion.adapted_modules import WanCameraTransformer3DModel

    return WanCameraTransformer3DModel(
        **{key: value for key, value in _wan(in_channels=36).config.items() if key[0] != "_"}
    )


def _wan_vace() -> Any:
    return diffusers.WanVACETransformer3DModel(
        num_attention_heads=1, attention_head_dim=128, in_channels=16, out_channels=16, text_dim=12, freq_dim=16,
        ffn_dim=32, num_layers=4, vace_layers=[0, 2], vace_in_channels=24,
    )  # fmt: skip


def _hunyuan(**more: Any) -> Any:
    sizes = {
        "in_channels": 16, "out_channels": 16, "num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 2,
        "num_single_layers": 2, "num_refiner_layers": 2, "text_embed_dim": 12, "pooled_projection_dim": 10,
        "rope_axes_dim": (4, 14, 14),
    }  # fmt: skip
    return diffusers.HunyuanVideoTransformer3DModel(**{**sizes, **more})


def _hunyuan_15() -> Any:
    return diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=2,
        num_refiner_layers=1, text_embed_dim=12, text_embed_2_dim=14, image_embed_dim=1152, rope_axes_dim=(4, 14, 14),
    )  # fmt: skip


def _ltx(of: Any = diffusers.LTXVideoTransformer3DModel, **more: Any) -> Any:
    return of(
        in_channels=8, out_channels=8, num_attention_heads=32, attention_head_dim=8, cross_attention_dim=256,
        num_layers=2, caption_channels=12, **more,
    )  # fmt: skip


def _ltx_since_095() -> Any:
    """diffusers' class is told of it by a pipeline."""
    from modelpool.pool.models.components.diffusion.adapted_modules import LTXVideoTransformer3DModel

    return _ltx(LTXVideoTransformer3DModel, causal_temporal_positioning=True)


def _mochi() -> Any:
    return diffusers.MochiTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, num_layers=3, pooled_projection_dim=24, in_channels=6,
        text_embed_dim=16, time_embed_dim=8, max_sequence_length=WORDS,
    )  # fmt: skip


def _cosmos(**more: Any) -> Any:
    sizes = {
        "in_channels": 16, "out_channels": 16, "num_attention_heads": 2, "attention_head_dim": 24, "num_layers": 2,
        "mlp_ratio": 2.0, "text_embed_dim": 12, "adaln_lora_dim": 8, "max_size": (4, 8, 8),
    }  # fmt: skip
    return diffusers.CosmosTransformer3DModel(**{**sizes, **more})


def _cosmos_predict_2(**more: Any) -> Any:
    largest = {"max_size": (128, 240, 240), "extra_pos_embed_type": None}
    return _cosmos(**{"rope_scale": (1.0, 4.0, 4.0), **largest, **more})


_COSMOS_25 = {"use_crossattn_projection": True, "crossattn_proj_in_channels": 20, "encoder_hidden_states_channels": 12}


def _stable_audio() -> Any:
    return diffusers.StableAudioDiTModel(
        in_channels=8, out_channels=8, num_layers=2, attention_head_dim=64, num_attention_heads=2,
        num_key_value_attention_heads=1, cross_attention_dim=64, time_proj_dim=16, global_states_input_dim=24,
        cross_attention_input_dim=12,
    )  # fmt: skip


def _stable_audio_without_offsets() -> Any:
    """Offsets of zero are none."""
    from modelpool.pool.models.components.diffusion.adapted_modules import StableAudioDiTModel

    return StableAudioDiTModel(**{k: v for k, v in _stable_audio().config.items() if k[0] != "_"}, norm_bias=False)


_CASCADE_LAYER = ("SDCascadeResBlock", "SDCascadeTimestepBlock")


def _cascade_c() -> Any:
    return diffusers.StableCascadeUNet(
        in_channels=4, out_channels=4, conditioning_dim=32, block_out_channels=(64, 128), num_attention_heads=(1, 2),
        down_num_layers_per_block=(1, 2), up_num_layers_per_block=(2, 1), clip_text_in_channels=12,
        clip_text_pooled_in_channels=10, clip_image_in_channels=14, switch_level=(False,),
    )  # fmt: skip


def _cascade_b() -> Any:
    return diffusers.StableCascadeUNet(
        in_channels=4, out_channels=4, patch_size=2, conditioning_dim=32, block_out_channels=(32, 64),
        num_attention_heads=(-1, 1), down_num_layers_per_block=(2, 3), up_num_layers_per_block=(3, 2),
        down_blocks_repeat_mappers=(1, 1), up_blocks_repeat_mappers=(3, 2),
        block_types_per_layer=(_CASCADE_LAYER, (*_CASCADE_LAYER, "SDCascadeAttnBlock")),
        clip_text_pooled_in_channels=10, effnet_in_channels=6, pixel_mapper_in_channels=3,
        timestep_conditioning_type=("sca",),
    )  # fmt: skip


def _unet(**more: Any) -> Any:
    sizes = {
        "in_channels": 9, "sample_size": 64, "block_out_channels": (32, 64), "layers_per_block": 1,
        "norm_num_groups": 8,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 12, "attention_head_dim": 8,
    }  # fmt: skip
    return diffusers.UNet2DConditionModel(**{**sizes, **more})


_LINEAR = {"use_linear_projection": True, "attention_head_dim": (1, 2), "block_out_channels": (64, 128)}


def _x4() -> Any:
    return _unet(
        **{**_LINEAR, "attention_head_dim": 8}, in_channels=7, num_class_embeds=5, norm_num_groups=16,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"), only_cross_attention=(True, False),
    )  # fmt: skip


def _unet_video(numbers: int = 3) -> Any:
    return diffusers.UNetSpatioTemporalConditionModel(
        in_channels=8, out_channels=4, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=12,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), num_attention_heads=(1, 1),
        projection_class_embeddings_input_dim=256 * numbers,
    )  # fmt: skip


def _viewed() -> Any:
    """diffusers has no class that is told of each frame."""
    from modelpool.pool.models.components.diffusion.adapted_modules import ViewedUNet

    return ViewedUNet(**{key: value for key, value in _unet_video(5).config.items() if key[0] != "_"})


_TEXT = {"context": (WORDS, 12), "context_mask": (WORDS,)}
_VIDEO = (16, 3, 4, 6)

CASES: dict[str, Case] = {
    "wan_t2v": Case("wan_t2v", _wan, layouts.wan, _VIDEO, _TEXT, "wan21_t2v_1.3b"),
    "wan21_i2v": Case(
        "wan21_i2v", lambda: _wan(in_channels=36, **_WAN_IMAGE), layouts.wan, _VIDEO,
        {**_TEXT, "image": (20, 3, 4, 6), "image_context": (5, 10)}, "wan21_fun_control_14b",
    ),
    "wan21_flf2v": Case(
        "wan21_flf2v", lambda: _wan(in_channels=36, pos_embed_seq_len=514, **_WAN_IMAGE), layouts.wan, _VIDEO,
        {**_TEXT, "image": (20, 3, 4, 6), "image_context": (514, 10)}, "wan21_flf2v_14b",
    ),
    "wan22_i2v": Case(
        "wan22_i2v", lambda: _wan(in_channels=36), layouts.wan, _VIDEO, {**_TEXT, "image": (20, 3, 4, 6)}
    ),
    "wan22_ti2v": Case(
        "wan22_ti2v", lambda: _wan(in_channels=48, out_channels=48), layouts.wan, (48, 3, 4, 6), _TEXT, "wan22_ti2v_5b"
    ),
    "wan22_ti2v of an image": Case(
        "wan22_ti2v", lambda: _wan(in_channels=48, out_channels=48), layouts.wan, (48, 3, 4, 6),
        {**_TEXT, "image": (48, 3, 4, 6), "image_mask": (1,)},
    ),
    "wan22_fun_control": Case(
        "wan22_fun_control", _wan_reference, layouts.wan, _VIDEO,
        {**_TEXT, "followed": (16, 3, 4, 6), "image": (16, 4, 6)},
    ),
    "wan22_camera": Case(
        "wan22_camera", _wan_camera, layouts.wan, _VIDEO, {**_TEXT, "image": (20, 3, 4, 6), "camera": (9, 16)},
        "wan22_camera_14b",
    ),
    "wan_vace": Case("wan_vace", _wan_vace, layouts.wan, _VIDEO, {**_TEXT, "control": (24, 3, 4, 6)}),
    "hunyuan_video": Case(
        "hunyuan_video", _hunyuan, layouts.hunyuan, _VIDEO, {**_TEXT, "pooled": (10,), "guidance": ()}
    ),
    "hunyuan_video like Flux": Case(
        "hunyuan_video", _hunyuan, layouts.hunyuan_like_flux, _VIDEO, {**_TEXT, "pooled": (10,), "guidance": ()},
        "hunyuan_video",
    ),
    "hunyuan_video_i2v": Case(
        "hunyuan_video_i2v",
        lambda: _hunyuan(in_channels=33, guidance_embeds=False, image_condition_type="latent_concat"),
        layouts.hunyuan, _VIDEO, {**_TEXT, "pooled": (10,), "image": (17, 3, 4, 6)},
    ),
    "skyreels_i2v": Case(
        "skyreels_i2v", lambda: _hunyuan(in_channels=32), layouts.hunyuan_like_flux, _VIDEO,
        {**_TEXT, "pooled": (10,), "image": _VIDEO}, "hunyuan_video_skyreels_i2v",
    ),
    "hunyuan_video_15": Case(
        "hunyuan_video_15", _hunyuan_15, layouts.hunyuan_like_flux, (4, 3, 4, 6),
        {**_TEXT, "context_2": (4, 14), "context_2_mask": (4,)}, "hunyuan_video_1.5",
    ),
    "hunyuan_video_15 of an image": Case(
        "hunyuan_video_15", _hunyuan_15, layouts.hunyuan_like_flux, (4, 3, 4, 6),
        {**_TEXT, "context_2": (4, 14), "image": (5, 3, 4, 6), "image_context": (5, 1152)}, "hunyuan_video_1.5",
    ),
    "ltxv": Case("ltxv", _ltx, layouts.ltx, (8, 3, 4, 6), {**_TEXT, "frame_rate": ()}, "ltxv_2b"),
    "ltxv since 0.9.5": Case(
        "ltxv", _ltx_since_095, layouts.ltx, (8, 3, 4, 6), {**_TEXT, "frame_rate": ()}, "ltxv_2b",
        hints={"causal_temporal_positioning": True},
    ),
    "ltxv of an image": Case(
        "ltxv", _ltx, layouts.ltx, (8, 3, 4, 6),
        {**_TEXT, "frame_rate": (), "image": (8, 3, 4, 6), "image_mask": (1,)},
    ),
    "mochi": Case(
        "mochi", _mochi, layouts.mochi, (6, 3, 4, 6), {"context": (WORDS, 16), "context_mask": (WORDS,)}, "mochi"
    ),
    "cosmos_t2v": Case(
        "cosmos_t2v", lambda: _cosmos(rope_scale=(2.0, 1.0, 1.0)), layouts.cosmos, _VIDEO,
        {"context": (WORDS, 12), "frame_rate": ()}, "cosmos_7b_t2v",
    ),
    "cosmos_i2v": Case(
        "cosmos_i2v", lambda: _cosmos(in_channels=17, rope_scale=(2.0, 1.0, 1.0)), layouts.cosmos, _VIDEO,
        {"context": (WORDS, 12), "frame_rate": (), "image": _VIDEO, "image_mask": (1,)}, "cosmos_7b_i2v",
    ),
    "cosmos2_t2i": Case(
        "cosmos2_t2i", _cosmos_predict_2, layouts.cosmos_predict_2, (16, 1, 4, 6), {"context": (WORDS, 12)},
        "cosmos_predict2_2b_t2i",
    ),
    "cosmos2_i2v": Case(
        "cosmos2_i2v", lambda: _cosmos_predict_2(in_channels=17, rope_scale=(1.0, 3.0, 3.0)),
        layouts.cosmos_predict_2, _VIDEO,
        {"context": (WORDS, 12), "frame_rate": (), "image": _VIDEO, "image_mask": (1,)}, "cosmos_predict2_2b_i2v",
    ),
    "cosmos2_i2v of texts alone, through a projection": Case(
        "cosmos2_i2v", lambda: _cosmos_predict_2(in_channels=17, rope_scale=(1.0, 3.0, 3.0), **_COSMOS_25),
        layouts.cosmos_predict_2, _VIDEO, {"context": (WORDS, 20), "frame_rate": ()},
    ),
    "stable_audio_1": Case(
        "stable_audio_1", _stable_audio, layouts.stable_audio, (8, 9), {**_TEXT, "seconds": (2, 12)}, "",
        ("transformer.rotary_pos_emb.inv_freq",),
    ),
    "stable_audio_1 without offsets": Case(
        "stable_audio_1", _stable_audio_without_offsets, layouts.stable_audio_without_offsets, (8, 9),
        {**_TEXT, "seconds": (2, 12)}, "stable_audio_1", ("transformer.rotary_pos_emb.inv_freq",),
    ),
    "cascade_c": Case(
        "cascade_c", _cascade_c, layouts.cascade, (4, 6, 8), {"context": (WORDS, 12), "pooled": (10,)}
    ),
    "cascade_c apart": Case(
        "cascade_c", _cascade_c, layouts.cascade_apart, (4, 6, 8),
        {"context": (WORDS, 12), "pooled": (10,), "image_context": (1, 14)}, "stable_cascade_c",
    ),
    "cascade_b": Case(
        "cascade_b", _cascade_b, layouts.cascade_apart, (4, 16, 24), {"pooled": (10,), "prior": (6, 4, 6)},
        "stable_cascade_b",
    ),
    "sd_x4": Case(
        "sd_x4", _x4, layouts.unet, (4, 8, 12), {"context": (WORDS, 12), "image": (3, 8, 12), "noise_level": ()},
        "sd_x4_upscaler", level=741.0,
    ),
    "svd": Case(
        "svd", _unet_video, layouts.unet, (4, 3, 8, 12),
        {"image": (4, 8, 12), "image_context": (1, 12), "numbers": (3,)}, "svd_img2vid", level=0.4,
    ),
    "sv3d_p": Case(
        "sv3d_p", _viewed, layouts.unet, (4, 3, 8, 12),
        {"image": (4, 8, 12), "image_context": (1, 12), "numbers": (3, 3)}, "sv3d_p", level=0.4,
    ),
    "sv3d_u": Case(
        "sv3d_u", lambda: _unet_video(1), layouts.unet, (4, 3, 8, 12),
        {"image": (4, 3, 8, 12), "image_context": (1, 12), "numbers": (1,)}, "sv3d_u", level=0.4,
    ),
}  # fmt: skip
