"""diffusers' pipelines for the cases of `video_cases`: how each takes a step, with encoders of images replaced by
what the case says that they gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from diffusers.guiders import ClassifierFreeGuidance
from diffusers.pipelines.stable_audio.modeling_stable_audio import StableAudioProjectionModel
from PIL import Image
from torch import Tensor
from torch.nn import functional

from tests.pool.models.components.diffusion.video_cases import ModelKwargs

Given = dict[str, Any]


class Flow(diffusers.FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """Begins half-way, so that shares of noise and of the rest are not the same as none."""

    first = 0.5

    def set_timesteps(
        self,
        num_inference_steps: Any = None,
        device: Any = None,
        sigmas: Any = None,
        mu: Any = None,
        timesteps: Any = None,
    ) -> None:
        super().set_timesteps(sigmas=[self.first, 0.25], device=device)


class ByRatio(Flow):
    """The same for pipelines that count noise by what there is of it beside the image."""

    first = 1.0


class Part:
    """A part of a pipeline that is asked for some figures, and does nothing."""

    def __init__(self, **figures: Any) -> None:
        vars(self).update(figures)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How a pipeline of diffusers takes a step with a case's model.

    name       of the case
    cls        the pipeline
    given      what it is called with, from the latent and what the model is told
    part       what it calls the model
    scheduler  makes its scheduler
    parts      its other parts
    stubs      methods of it that are replaced, from the latent and what the model is told
    level      the number of our call, from the scheduler's timestep
    answer     what the model gave, as a latent
    image_as_seen  whether the image is told as noisy and as scaled as the pipeline made it
    off        how far our answer may be, where sums are in another order; not at all elsewhere
    kept       whether frames of an image are kept, where our answer leads to the image and is not the model's
    """

    name: str
    cls: Any
    given: Callable[[Tensor, ModelKwargs], Given]
    part: str = "transformer"
    scheduler: Callable[[], Any] = Flow
    parts: Mapping[str, Any] = field(default_factory=dict)
    stubs: Callable[[Tensor, ModelKwargs], dict[str, Any]] = lambda x, told: {}
    level: Callable[[Tensor], Tensor] = lambda timestep: timestep / 1000
    answer: Callable[[Tensor, Tensor], Tensor] = lambda raw, x: raw
    kept: bool = False
    off: float = 0.0
    image_as_seen: bool = False


def _size(x: Tensor, cell: int = 8, frames: int = 4) -> Given:
    return {"height": x.shape[-2] * cell, "width": x.shape[-1] * cell, "num_frames": (x.shape[2] - 1) * frames + 1}


def _texts(told: ModelKwargs) -> Tensor:
    """As a pipeline's own encoding leaves them: zeros for padding, up to 512 tokens."""
    words = told["context"] * told["context_mask"].unsqueeze(-1) if "context_mask" in told else told["context"]
    return functional.pad(words, (0, 0, 0, 512 - words.shape[1]))


def _wan(x: Tensor, told: ModelKwargs) -> Given:
    return {"prompt_embeds": _texts(told), "guidance_scale": 1.0, "latents": x, **_size(x)}


def _wan_image(x: Tensor, told: ModelKwargs) -> Given:
    states = told.get("image_context")
    if states is not None and states.shape[1] == 514:
        states = states.reshape(2, 257, -1)  # as it encodes two images
    return _wan(x, told) | {"image": torch.zeros(1, 3, 32, 48), "image_embeds": states}


def _wan_5b_image(x: Tensor, told: ModelKwargs) -> Given:
    return _wan_image(x, told) | _size(x, 16)


def _prepared(*names: str) -> Callable[[Tensor, ModelKwargs], dict[str, Any]]:
    """A pipeline's latents: ours, and after them what is told under `names`. Of two inputs it would take one."""

    def stubs(x: Tensor, told: ModelKwargs) -> dict[str, Any]:
        latents = (x, *(told[name] for name in names)) if names else x
        return {"prepare_latents": lambda *_, **__: latents, "check_inputs": lambda *_, **__: None}

    return stubs


def _wan_5b_prepared(x: Tensor, told: ModelKwargs) -> dict[str, Any]:
    return {"prepare_latents": lambda *_, **__: (x, told["image"][:, :, :1], 1 - told["image_mask"])}


def _wan_vace_prepared(x: Tensor, told: ModelKwargs) -> dict[str, Any]:
    return {
        "preprocess_conditions": lambda *_: (torch.zeros(1, 3, 9, 32, 48), torch.zeros(1, 3, 9, 32, 48), [[]]),
        "prepare_video_latents": lambda *_, **__: told["control"][:, :16],
        "prepare_masks": lambda *_, **__: told["control"][:, 16:],
    }


def _wan_vae(channels: int) -> Any:
    return Part(
        config=Part(z_dim=channels, scale_factor_temporal=4, scale_factor_spatial=8 if channels == 16 else 16),
        temperal_downsample=(False, True, True), dtype=torch.float32,
    )  # fmt: skip


def _hunyuan(x: Tensor, told: ModelKwargs) -> Given:
    return {
        "prompt_embeds": told["context"], "pooled_prompt_embeds": told["pooled"],
        "prompt_attention_mask": told["context_mask"].long(), "guidance_scale": 6.0, "latents": x, **_size(x),
    }  # fmt: skip


def _skyreels(x: Tensor, told: ModelKwargs) -> Given:
    return _hunyuan(x, told) | {"image": torch.zeros(1, 3, 32, 48), "true_cfg_scale": 1.0, "guidance_scale": 1.0}


def _hunyuan_15(x: Tensor, told: ModelKwargs) -> Given:
    return {
        "prompt_embeds": told["context"], "prompt_embeds_mask": told["context_mask"].long(), "latents": x,
        "prompt_embeds_2": told["context_2"], "prompt_embeds_mask_2": told["context_2_mask"].long(), **_size(x, 16),
    }  # fmt: skip


def _hunyuan_image(x: Tensor, told: ModelKwargs) -> Given:
    return _hunyuan(x, told) | {"image": torch.zeros(1, 3, 32, 48)}


def _hunyuan_15_image(x: Tensor, told: ModelKwargs) -> Given:
    words = torch.ones(told["context_2"].shape[:2], dtype=torch.long)
    given = _hunyuan_15(x, {"context_2_mask": words, **told}) | {"image": Image.new("RGB", (96, 64))}
    return {key: value for key, value in given.items() if key not in ("height", "width")}


def _hunyuan_15_prepared(x: Tensor, told: ModelKwargs) -> dict[str, Any]:
    return {
        "prepare_cond_latents_and_mask": lambda *_, **__: (told["image"][:, :-1], told["image"][:, -1:]),
        "encode_image": lambda *_, **__: told["image_context"],
        "prepare_latents": lambda *_, **__: x,
        "video_processor": _Images(),
        "check_inputs": lambda *_, **__: None,
    }


def _ltx(x: Tensor, told: ModelKwargs) -> Given:
    rows = x.flatten(2).transpose(1, 2)
    return {
        "prompt_embeds": told["context"], "prompt_attention_mask": told["context_mask"], "guidance_scale": 1.0,
        "frame_rate": 24, "latents": rows, **_size(x, 32, 8),
    }  # fmt: skip


def _ltx_image(x: Tensor, told: ModelKwargs) -> Given:
    return _ltx(x, told) | {"image": torch.zeros(1, 3, 128, 192)}


def _ltx_conditioned(x: Tensor, told: ModelKwargs) -> Given:
    return {key: value for key, value in _ltx(x, told).items() if key != "latents"}


def _ltx_placed(x: Tensor, told: ModelKwargs) -> dict[str, Any]:
    """Latents that are ours, at the places that the pipeline gives them; no images to go on from."""
    pipeline = diffusers.LTXConditionPipeline
    places = pipeline._scale_video_ids(pipeline._prepare_video_ids(1, *x.shape[2:]), 32, 8)
    latents = (x.flatten(2).transpose(1, 2), None, places, 0)
    return {"prepare_latents": lambda *_, **__: latents, "check_inputs": lambda *_, **__: None}


def _ltx_prepared(x: Tensor, told: ModelKwargs) -> dict[str, Any]:
    mask = told["image_mask"].expand(-1, -1, *x.shape[2:])
    latents = torch.where(mask.bool(), told["image"], x)
    return {"prepare_latents": lambda *_, **__: (latents.flatten(2).transpose(1, 2), mask[:, 0].flatten(1))}


def _mochi(x: Tensor, told: ModelKwargs) -> Given:
    return {
        "prompt_embeds": told["context"], "prompt_attention_mask": told["context_mask"], "guidance_scale": 1.0,
        "latents": x, **_size(x, 8, 6),
    }  # fmt: skip


def _cosmos(x: Tensor, told: ModelKwargs) -> Given:
    rate = {"fps": 24, **_size(x, frames=8)} if "frame_rate" in told else {"height": 32, "width": 48}
    return {"prompt_embeds": told["context"], "guidance_scale": 1.0, "latents": x, **rate}


def _cosmos_image(x: Tensor, told: ModelKwargs) -> Given:
    return _cosmos(x, told) | {"image": torch.zeros(1, 3, 32, 48), **_size(x)}


def _cosmos_prepared(x: Tensor, told: ModelKwargs) -> dict[str, Any]:
    frames = told["image_mask"][..., :1, :1]
    mask = told["image_mask"].expand(-1, -1, *x.shape[2:])
    given = (x, told["image"], frames, None, mask, None)
    return {"prepare_latents": lambda *_, **__: given, "video_processor": _Images()}


class _Images:
    """Images that nobody looks at."""

    def preprocess(self, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(1, 3, 32, 48)

    preprocess_video = preprocess

    def calculate_default_height_width(self, **_: Any) -> tuple[int, int]:
        return 64, 96

    def resize(self, image: Any, *_: Any, **__: Any) -> Any:
        return image


def _stable_audio(x: Tensor, told: ModelKwargs) -> Given:
    return {
        "prompt_embeds": told["context"], "attention_mask": told["context_mask"].long(), "guidance_scale": 1.0,
        "latents": x, "audio_start_in_s": 0.0, "audio_end_in_s": 1.0,
    }  # fmt: skip


def _audioed(x: Tensor, told: ModelKwargs) -> dict[str, Any]:
    return {"encode_duration": lambda *_, **__: (told["seconds"][:, :1], told["seconds"][:, 1:])}


def _cascade_c(x: Tensor, told: ModelKwargs) -> Given:
    images = {"image_embeds": told["image_context"]} if "image_context" in told else {}
    return {
        "prompt_embeds": told["context"], "prompt_embeds_pooled": told["pooled"].unsqueeze(1), "latents": x,
        "guidance_scale": 1.0, "height": 256, "width": 320, **images,
    }  # fmt: skip


def _cascade_b(x: Tensor, told: ModelKwargs) -> Given:
    return {
        "image_embeddings": told["prior"], "prompt_embeds": torch.zeros(1, 7, 12), "guidance_scale": 1.0,
        "prompt_embeds_pooled": told["pooled"].unsqueeze(1), "latents": x,
    }  # fmt: skip


def _text(x: Tensor, told: ModelKwargs) -> Given:
    """Of pipelines without a prompt that guide against nothing."""
    return {"prompt_embeds": told["context"], "guidance_scale": 1.0, "latents": x}


def _upscale(x: Tensor, told: ModelKwargs) -> Given:
    return _text(x, told) | {"image": told["image"], "noise_level": 3}


def _upscale_prepared(x: Tensor, told: ModelKwargs) -> dict[str, Any]:
    return {"low_res_scheduler": Part(add_noise=lambda image, *_: told["image"])}


def _svd(x: Tensor, told: ModelKwargs) -> Given:
    return {
        "image": torch.zeros(1, 3, 64, 96), "max_guidance_scale": 1.0, "num_frames": 3, "height": 64, "width": 96,
        "latents": x.transpose(1, 2),
    }  # fmt: skip


def _svd_prepared(x: Tensor, told: ModelKwargs) -> dict[str, Any]:
    return {
        "_encode_image": lambda *_, **__: told["image_context"],
        "_encode_vae_image": lambda *_, **__: told["image"],
        "_get_add_time_ids": lambda *_, **__: told["numbers"],
    }


def _hunyuan_vae(cell: int) -> Any:
    config = Part(scaling_factor=1.0, latent_channels=4, temporal_compression_ratio=8, spatial_compression_ratio=8)
    return Part(dtype=torch.float32, config=config, temporal_compression_ratio=4, spatial_compression_ratio=cell)


def _kl_vae() -> Any:
    config = Part(block_out_channels=(1,) * 4, latent_channels=4, scaling_factor=0.08333, force_upcast=False)
    return Part(config=config, dtype=torch.float32)


def _edm() -> Any:
    return diffusers.EDMEulerScheduler(sigma_data=0.5, sigma_max=80.0, sigma_min=0.002)


def _audio_scheduler() -> Any:
    return diffusers.EDMDPMSolverMultistepScheduler()


def _svd_scheduler() -> Any:
    return diffusers.EulerDiscreteScheduler(
        prediction_type="v_prediction", timestep_type="continuous", use_karras_sigmas=True, sigma_min=0.002,
        sigma_max=700.0, timestep_spacing="leading", steps_offset=1, interpolation_type="linear",
    )  # fmt: skip


def _ddim() -> Any:
    return diffusers.DDIMScheduler(steps_offset=1, clip_sample=False)


def _inverted() -> Any:
    return Flow(invert_sigmas=True)


def _as_told(timestep: Tensor) -> Tensor:
    return timestep


def _rest(timestep: Tensor) -> Tensor:
    """Of a pipeline that counts what there is of the image."""
    return 1 - timestep / 1000


def _half(timestep: Tensor) -> Tensor:
    """As much noise as image."""
    return torch.tensor(0.5)


def _cells(raw_BNC: Tensor, x: Tensor) -> Tensor:
    return raw_BNC.transpose(1, 2).reshape(x.shape)


def frames_last(raw_BTCHW: Tensor, x: Tensor) -> Tensor:
    """From frames of channels to channels of frames."""
    return raw_BTCHW.transpose(1, 2)


def _turned(raw: Tensor, x: Tensor) -> Tensor:
    return -raw


_GUARD = {"safety_checker": Part(to=lambda *_: None), "vae": _wan_vae(16)}
_AUDIO_VAE = Part(config=Part(sampling_rate=4, audio_channels=2), hop_length=1, dtype=torch.float32)

PIPELINES = (
    Pipeline("wan_t2v", diffusers.WanPipeline, _wan),
    Pipeline(
        "wan21_i2v", diffusers.WanImageToVideoPipeline, _wan_image, parts={"vae": _wan_vae(16)},
        stubs=_prepared("image"),
    ),
    Pipeline(
        "wan21_flf2v", diffusers.WanImageToVideoPipeline, _wan_image, parts={"vae": _wan_vae(16)},
        stubs=_prepared("image"),
    ),
    Pipeline(
        "wan22_i2v", diffusers.WanImageToVideoPipeline, _wan_image, parts={"vae": _wan_vae(16)},
        stubs=_prepared("image"),
    ),
    Pipeline(
        "wan22_ti2v", diffusers.WanPipeline, lambda x, told: _wan(x, told) | _size(x, 16),
        parts={"expand_timesteps": True, "vae": _wan_vae(48)}, off=1e-4,
    ),
    Pipeline(
        "wan22_ti2v of an image", diffusers.WanImageToVideoPipeline, _wan_5b_image,
        parts={"expand_timesteps": True, "vae": _wan_vae(48)}, stubs=_wan_5b_prepared, kept=True,
    ),
    Pipeline(
        "wan_vace", diffusers.WanVACEPipeline, _wan, parts={"vae": _wan_vae(16)}, stubs=_wan_vace_prepared
    ),
    Pipeline("hunyuan_video", diffusers.HunyuanVideoPipeline, _hunyuan),
    Pipeline("hunyuan_video like Flux", diffusers.HunyuanVideoPipeline, _hunyuan),
    Pipeline(
        "skyreels_i2v", diffusers.HunyuanSkyreelsImageToVideoPipeline, _skyreels,
        parts={"vae": _hunyuan_vae(8)},
        stubs=_prepared("image"),
    ),
    Pipeline(
        "hunyuan_video_15", diffusers.HunyuanVideo15Pipeline, _hunyuan_15,
        parts={"guider": ClassifierFreeGuidance(guidance_scale=1.0), "vae": _hunyuan_vae(16)},
    ),
    Pipeline(
        "hunyuan_video_i2v",
        diffusers.HunyuanVideoImageToVideoPipeline,
        _hunyuan_image,
        parts={"vae": _hunyuan_vae(8)},
        stubs=lambda x, told: _prepared()(x, told)
        | {"prepare_latents": lambda *_, **__: (x, told["image"][:, :16].clone())},
    ),
    Pipeline(
        "hunyuan_video_15 of an image",
        diffusers.HunyuanVideo15ImageToVideoPipeline,
        _hunyuan_15_image,
        parts={"guider": ClassifierFreeGuidance(guidance_scale=1.0), "vae": _hunyuan_vae(16)},
        stubs=_hunyuan_15_prepared,
    ),
    Pipeline("ltxv", diffusers.LTXPipeline, _ltx, answer=_cells),
    Pipeline(
        "ltxv since 0.9.5", diffusers.LTXConditionPipeline, _ltx_conditioned, stubs=_ltx_placed, answer=_cells,
        parts={"vae": Part(dtype=torch.float32, spatial_compression_ratio=32, temporal_compression_ratio=8)},
    ),
    Pipeline(
        "ltxv of an image", diffusers.LTXImageToVideoPipeline, _ltx_image, stubs=_ltx_prepared, answer=_cells,
        kept=True,
    ),
    Pipeline("mochi", diffusers.MochiPipeline, _mochi, scheduler=_inverted, level=_rest, answer=_turned),
    Pipeline(
        "cosmos_t2v", diffusers.CosmosTextToWorldPipeline, _cosmos, scheduler=_edm, level=_as_told,
        parts={**_GUARD, "vae": None},
    ),
    Pipeline(
        "cosmos_i2v", diffusers.CosmosVideoToWorldPipeline, _cosmos_image, scheduler=_edm, level=_as_told,
        parts={**_GUARD, "vae": _hunyuan_vae(8)}, stubs=_cosmos_prepared, image_as_seen=True,
    ),
    Pipeline(
        "cosmos2_t2i", diffusers.Cosmos2TextToImagePipeline, _cosmos, scheduler=ByRatio, level=_half, parts=_GUARD,
        stubs=_prepared(),
    ),
    Pipeline(
        "cosmos2_i2v", diffusers.Cosmos2VideoToWorldPipeline, _cosmos_image, scheduler=ByRatio, level=_half,
        parts=_GUARD, stubs=_cosmos_prepared, kept=True,
    ),
    Pipeline(
        "stable_audio_1", diffusers.StableAudioPipeline, _stable_audio, scheduler=_audio_scheduler, level=_as_told,
        parts={"vae": _AUDIO_VAE, "projection_model": StableAudioProjectionModel(12, 12, 0, 512)}, stubs=_audioed,
    ),
    Pipeline(
        "cascade_c", diffusers.StableCascadePriorPipeline, _cascade_c, "prior", diffusers.DDPMWuerstchenScheduler,
        {"text_encoder": Part(dtype=torch.float32)}, level=_as_told,
    ),
    Pipeline(
        "cascade_c apart", diffusers.StableCascadePriorPipeline, _cascade_c, "prior",
        diffusers.DDPMWuerstchenScheduler, {"text_encoder": Part(dtype=torch.float32)}, level=_as_told,
    ),
    Pipeline(
        "cascade_b", diffusers.StableCascadeDecoderPipeline, _cascade_b, "decoder", diffusers.DDPMWuerstchenScheduler,
        {"text_encoder": Part(dtype=torch.float32)}, _prepared(), _as_told,
    ),
    Pipeline(
        "sd_x4", diffusers.StableDiffusionUpscalePipeline, _upscale, "unet", _ddim, {"vae": _kl_vae()},
        _upscale_prepared, _as_told,
    ),
    Pipeline(
        "svd", diffusers.StableVideoDiffusionPipeline, _svd, "unet", _svd_scheduler, {"vae": _kl_vae()},
        _svd_prepared, _as_told, frames_last,
    ),
)  # fmt: skip
