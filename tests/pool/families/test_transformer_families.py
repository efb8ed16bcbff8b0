"""Families that run on transformers, whole: equal to diffusers on the same weights, texts and noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, StableDiffusion3Pipeline
from torch import Tensor
from torch.nn import functional

from modelpool.pool.inference.pixels.latent_pixels import latent_shape
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.values.core.stage_params import Encoded
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.families.whole_transformer import FRAME_RATE, HEIGHT, SEED, STEPS, WIDTH, Whole

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    # Mochi's own attention wants half precision of the CPU
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),
]


def _told(text: Encoded) -> tuple[Tensor, Tensor | None]:
    pooled = None if text.pooled_V is None else torch.from_numpy(text.pooled_V)[None]
    return torch.from_numpy(text.context_LD)[None], pooled


def _cfg(whole: Whole) -> float:
    assert whole.family.sampling.defaults is not None
    return whole.family.sampling.defaults.cfg


def _noise(whole: Whole) -> Tensor:
    return ImageNoise(SEED).draw((1, *latent_shape(WIDTH, HEIGHT, whole.frames, whole.opened.latent)))


def _sd3(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    pipeline = StableDiffusion3Pipeline(
        whole.module(Role.DIFFUSION_MODEL), FlowMatchEulerDiscreteScheduler(shift=3.0), whole.module(Role.VAE),
        None, None, None, None, None, None,
    )  # fmt: skip
    (context, pooled), (negative, negative_pooled) = map(_told, texts)
    found: Tensor = pipeline(
        prompt_embeds=context, pooled_prompt_embeds=pooled, negative_prompt_embeds=negative,
        negative_pooled_prompt_embeds=negative_pooled, height=HEIGHT, width=WIDTH, num_inference_steps=STEPS,
        guidance_scale=_cfg(whole), latents=_noise(whole), output_type="latent",
    ).images  # fmt: skip
    return found


def _flux(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    is_schnell = whole.family.name == "flux_schnell"
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=not is_schnell, max_shift=1.15, base_shift=0.5)
    pipeline = FluxPipeline(
        scheduler, whole.module(Role.VAE), None, None, None, None, whole.module(Role.DIFFUSION_MODEL)
    )
    ((context, pooled),) = map(_told, texts)
    noise = _noise(whole)
    packed = pipeline._pack_latents(noise, 1, noise.shape[1], *noise.shape[2:])
    found = pipeline(
        prompt_embeds=context, pooled_prompt_embeds=pooled, height=HEIGHT, width=WIDTH, num_inference_steps=STEPS,
        guidance_scale=_cfg(whole), latents=packed, output_type="latent",
    ).images  # fmt: skip
    unpacked: Tensor = pipeline._unpack_latents(found, HEIGHT, WIDTH, pipeline.vae_scale_factor)
    return unpacked


def _masked(texts: tuple[Encoded, ...]) -> dict[str, Tensor]:
    """Texts with their masks, under the names that most pipelines have."""
    given: dict[str, Tensor] = {}
    for side, text in zip(("", "negative_"), texts, strict=False):
        given[f"{side}prompt_embeds"] = torch.from_numpy(text.context_LD)[None]
        mask = text.others.get("context_mask", np.ones(len(text.context_LD), bool))
        given[f"{side}prompt_attention_mask"] = torch.from_numpy(mask)[None]
    return given


def _typical_call(whole: Whole) -> dict[str, Any]:
    return {"height": HEIGHT, "width": WIDTH, "num_inference_steps": STEPS, "output_type": "latent"}


def _flow(**more: Any) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(**more)


def _flux2_klein(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    pipeline = diffusers.Flux2KleinPipeline(
        _flow(use_dynamic_shifting=True), whole.module(Role.VAE), None, None, whole.module(Role.DIFFUSION_MODEL), True
    )
    ((context, _),) = map(_told, texts)
    noise = _noise(whole)
    found = pipeline(prompt_embeds=context, latents=noise, guidance_scale=1.0, **_typical_call(whole)).images
    return _latent_of_flux2(pipeline, found)


def _latent_of_flux2(pipeline: Any, found: Tensor) -> Tensor:
    """The pipeline gives what its VAE reads: statistics and patches undone."""
    patches = pipeline._patchify_latents(found)
    norm = pipeline.vae.bn
    deviation = torch.sqrt(norm.running_var.view(1, -1, 1, 1) + pipeline.vae.config.batch_norm_eps)
    result: Tensor = (patches - norm.running_mean.view(1, -1, 1, 1)) / deviation
    return result


def _chroma(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    pipeline = diffusers.ChromaPipeline(_flow(), whole.module(Role.VAE), None, None, whole.module(Role.DIFFUSION_MODEL))
    noise = _noise(whole)
    packed = pipeline._pack_latents(noise, 1, noise.shape[1], *noise.shape[2:])
    found = pipeline(**_masked(texts), latents=packed, guidance_scale=_cfg(whole), **_typical_call(whole)).images
    unpacked: Tensor = pipeline._unpack_latents(found, HEIGHT, WIDTH, pipeline.vae_scale_factor)
    return unpacked


def _qwen_image(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    scheduler = _flow(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    pipeline = diffusers.QwenImagePipeline(
        scheduler, whole.module(Role.VAE), None, None, whole.module(Role.DIFFUSION_MODEL)
    )
    noise = _noise(whole)
    packed = pipeline._pack_latents(noise.unsqueeze(2), 1, noise.shape[1], *noise.shape[2:])
    given = {name.replace("attention_mask", "embeds_mask"): value for name, value in _masked(texts).items()}
    given = {name: value.long() if name.endswith("mask") else value for name, value in given.items()}
    found = pipeline(**given, latents=packed, true_cfg_scale=_cfg(whole), **_typical_call(whole)).images
    unpacked: Tensor = pipeline._unpack_latents(found, HEIGHT, WIDTH, pipeline.vae_scale_factor)
    return unpacked[:, :, 0]


def _z_image(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    pipeline = diffusers.ZImagePipeline(
        _flow(shift=3.0), whole.module(Role.VAE), None, None, whole.module(Role.DIFFUSION_MODEL)
    )
    sides = [[torch.from_numpy(text.context_LD)] for text in texts]
    found: Tensor = pipeline(
        prompt_embeds=sides[0], negative_prompt_embeds=sides[1] if len(sides) > 1 else None, latents=_noise(whole),
        guidance_scale=_cfg(whole) - 1.0, **_typical_call(whole),
    ).images  # fmt: skip
    return found


def _lumina2(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    pipeline = diffusers.Lumina2Pipeline(
        whole.module(Role.DIFFUSION_MODEL), _flow(shift=6.0), whole.module(Role.VAE), None, None
    )
    found: Tensor = pipeline(
        **_masked(texts), latents=_noise(whole), guidance_scale=_cfg(whole),
        **_typical_call(whole),
    ).images  # fmt: skip
    return found


def _auraflow(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    pipeline = diffusers.AuraFlowPipeline(
        None, None, whole.module(Role.VAE), whole.module(Role.DIFFUSION_MODEL), _flow(shift=1.73)
    )
    found: Tensor = pipeline(
        **_masked(texts), latents=_noise(whole), guidance_scale=_cfg(whole), **_typical_call(whole)
    ).images
    return found


def _pixart(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    scheduler = diffusers.EulerDiscreteScheduler(beta_start=0.0001, beta_end=0.02, beta_schedule="linear")
    cls = diffusers.PixArtAlphaPipeline if whole.family.name == "pixart_alpha" else diffusers.PixArtSigmaPipeline
    pipeline = cls(None, None, whole.module(Role.VAE), whole.module(Role.DIFFUSION_MODEL), scheduler)
    found: Tensor = pipeline(
        **_masked(texts), negative_prompt=None, latents=_noise(whole), guidance_scale=_cfg(whole),
        use_resolution_binning=False, **_typical_call(whole),
    ).images  # fmt: skip
    return found


def _hunyuan_dit(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    last = 0.018 if whole.family.name == "hunyuan_dit" else 0.03  # of 1.1
    scheduler = diffusers.EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=last, beta_schedule="scaled_linear", prediction_type="v_prediction"
    )
    pipeline = diffusers.HunyuanDiTPipeline(
        whole.module(Role.VAE), None, None, whole.module(Role.DIFFUSION_MODEL), scheduler, None, None, False
    )
    given = _masked(texts)
    for side, text in zip(("", "negative_"), texts, strict=True):
        given[f"{side}prompt_embeds_2"] = torch.from_numpy(text.others["context_2"])[None]
        mask = text.others.get("context_2_mask", np.ones(256, bool))
        given[f"{side}prompt_attention_mask_2"] = torch.from_numpy(mask)[None]
    found: Tensor = pipeline(
        **{name: value.long() if "mask" in name else value for name, value in given.items()}, latents=_noise(whole),
        guidance_scale=_cfg(whole), use_resolution_binning=False, **_typical_call(whole),
    ).images  # fmt: skip
    return found


def _hidream(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    pipeline = diffusers.HiDreamImagePipeline(
        _flow(shift=3.0), whole.module(Role.VAE), *[None] * 8, whole.module(Role.DIFFUSION_MODEL)
    )
    pipeline.default_sample_size = math.sqrt(WIDTH * HEIGHT) / 8 + 1e-3  # it makes every image about so large
    given = {}
    for side, text in zip(("", "negative_"), texts, strict=True):
        given[f"{side}prompt_embeds_t5"] = torch.from_numpy(text.context_LD)[None]
        given[f"{side}prompt_embeds_llama3"] = torch.from_numpy(text.others["context_2"])[:, None]
        assert text.pooled_V is not None
        given[f"{side}pooled_prompt_embeds"] = torch.from_numpy(text.pooled_V)[None]
    found: Tensor = pipeline(**given, latents=_noise(whole), guidance_scale=_cfg(whole), **_typical_call(whole)).images
    return found


def _video_call(whole: Whole) -> dict[str, Any]:
    return _typical_call(whole) | {"num_frames": whole.frames, "latents": _noise(whole), "guidance_scale": _cfg(whole)}


def _wan(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    pipeline = diffusers.WanPipeline(
        None, None, whole.module(Role.VAE), _flow(shift=8.0), whole.module(Role.DIFFUSION_MODEL)
    )
    (context, _), (negative, _) = map(_told, texts)
    found: Tensor = pipeline(prompt_embeds=context, negative_prompt_embeds=negative, **_video_call(whole)).frames
    return found


def _hunyuan_video(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    pipeline = diffusers.HunyuanVideoPipeline(
        None, None, whole.module(Role.DIFFUSION_MODEL), whole.module(Role.VAE), _flow(shift=7.0), None, None
    )
    given = _masked(texts) | {"pooled_prompt_embeds": _told(texts[0])[1]}
    found: Tensor = pipeline(**given, **_video_call(whole)).frames
    return found


def _ltx(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    scheduler = _flow(
        use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, max_image_seq_len=4096,
        shift_terminal=0.1,
    )  # fmt: skip
    vae, model = whole.module(Role.VAE), whole.module(Role.DIFFUSION_MODEL)
    pipeline = diffusers.LTXPipeline(scheduler, vae, None, None, model)
    noise = _noise(whole)
    call = _video_call(whole) | {"latents": pipeline._pack_latents(noise, 1, 1), "frame_rate": FRAME_RATE}
    found = pipeline(**_masked(texts), **call).frames
    unpacked: Tensor = pipeline._unpack_latents(found, *noise.shape[2:], 1, 1)
    return unpacked


def _mochi(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    scheduler = _flow(invert_sigmas=True)
    vae, model = whole.module(Role.VAE), whole.module(Role.DIFFUSION_MODEL)
    pipeline = diffusers.MochiPipeline(scheduler, vae, None, None, model)
    found: Tensor = pipeline(**_masked(texts), **_video_call(whole)).frames
    return found


#: diffusers takes one function of torchvision, which is not needed here
_RESIZING = SimpleNamespace(
    functional=SimpleNamespace(resize=lambda x, size, **_: functional.interpolate(x, size=size, mode="nearest")),
    InterpolationMode=SimpleNamespace(NEAREST=0),
)


def _cosmos(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    scheduler = diffusers.EDMEulerScheduler(sigma_min=0.002, sigma_max=80, sigma_data=0.5)
    vae, model = whole.module(Role.VAE), FAMILIES["cosmos_t2v"].model().eval()
    model.load_state_dict(whole.module(Role.DIFFUSION_MODEL).state_dict())  # ours reads the mask of padding otherwise
    with mock.patch("diffusers.models.transformers.transformer_cosmos.transforms", _RESIZING, create=True):
        pipeline = diffusers.CosmosTextToWorldPipeline(None, None, model, vae, scheduler, safety_checker=_Harmless())
        (context, _), (negative, _) = map(_told, texts)
        # it counts the strength from 1 more, and begins with the noise alone
        own = {"guidance_scale": _cfg(whole) - 1.0, "latents": _noise(whole) * math.hypot(80.0, 1.0) / 80.0}
        found: Tensor = pipeline(
            prompt_embeds=context, negative_prompt_embeds=negative, fps=FRAME_RATE, **_video_call(whole) | own
        ).frames
    return found


def _cosmos_predict_2(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    """But that it ends without noise: the pipeline leaves the last 500th of it in."""
    vae, model = whole.module(Role.VAE), FAMILIES["cosmos2_t2i"].model().eval()
    model.load_state_dict(whole.module(Role.DIFFUSION_MODEL).state_dict())  # ours reads the mask of padding otherwise
    scheduler = _flow(use_karras_sigmas=True)
    with mock.patch("diffusers.models.transformers.transformer_cosmos.transforms", _RESIZING, create=True):
        pipeline = diffusers.Cosmos2TextToImagePipeline(None, None, model, vae, scheduler, safety_checker=_Harmless())
        scheduler.register_to_config(final_sigmas_type="zero")
        (context, _), (negative, _) = map(_told, texts)
        found: Tensor = pipeline(
            prompt_embeds=context, negative_prompt_embeds=negative, latents=_noise(whole).unsqueeze(2),
            guidance_scale=_cfg(whole) - 1.0, **_typical_call(whole),
        ).images  # fmt: skip
    return found


class _Harmless:
    """Finds nothing wrong."""

    def to(self, *_: object) -> _Harmless:
        return self

    def check_text_safety(self, _: str) -> bool:
        return True


PIPELINES: Mapping[str, Callable[[Whole, tuple[Encoded, ...]], Tensor]] = {
    "sd3": _sd3,
    "sd35_large": _sd3,
    "flux_dev": _flux,
    "flux_schnell": _flux,
    "flux2_klein": _flux2_klein,
    "chroma": _chroma,
    "qwen_image": _qwen_image,
    "z_image": _z_image,
    "lumina2": _lumina2,
    "auraflow": _auraflow,
    "pixart_sigma": _pixart,
    "pixart_alpha": _pixart,
    "hunyuan_dit": _hunyuan_dit,
    "hidream_i1": _hidream,
    "wan_t2v": _wan,
    "hunyuan_video": _hunyuan_video,
    "ltxv": _ltx,
    "mochi": _mochi,
    "cosmos_t2v": _cosmos,
    "cosmos2_t2i": _cosmos_predict_2,
}


def _decoded(whole: Whole, latent: Tensor) -> Tensor:
    """What the VAE of diffusers makes of the latent, as its pipelines scale it."""
    facts, vae = whole.opened.latent, whole.module(Role.VAE)
    found: Tensor
    match facts.vae:
        case "flux2":
            norm = vae.bn
            deviation = torch.sqrt(norm.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
            scaled = latent * deviation + norm.running_mean.view(1, -1, 1, 1)
            found = vae.decode(diffusers.Flux2Pipeline._unpatchify_latents(scaled)).sample
        case "wan21":
            is_flat, video = latent.dim() == 4, latent.unsqueeze(2) if latent.dim() == 4 else latent
            means, deviations = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (facts.means, facts.deviations))
            found = vae.decode(video * deviations + means).sample
            found = found[:, :, 0] if is_flat else found
        case "mochi":
            means, deviations = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (facts.means, facts.deviations))
            found = vae.decode(latent * deviations + means).sample
        case "ltx_v0":
            means, deviations = (v.view(1, -1, 1, 1, 1) for v in (vae.latents_mean, vae.latents_std))
            found = vae.decode(latent * deviations + means).sample
        case "cosmos":
            means, deviations = (torch.tensor(v) for v in (vae.config.latents_mean, vae.config.latents_std))
            cells = latent.shape[2]
            means, deviations = (v.view(1, 16, -1, 1, 1)[:, :, :cells] for v in (means, deviations))
            found = vae.decode(latent * deviations / 0.5 + means).sample
        case _:
            found = vae.decode(latent / facts.scaling_factor + facts.shift).sample
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_a_image_is_that_of_diffusers(name: str, tmp_path: Path) -> None:
    whole = Whole(tmp_path, FAMILIES[name])
    assert whole.family.name == name
    texts = whole.texts()
    latent = whole.latent(texts)
    with torch.no_grad():
        expected = PIPELINES[name](whole, texts)
    np.testing.assert_allclose(latent.samples_CHW, expected[0], atol=1e-4 * max(1.0, float(expected.std())))
    with torch.no_grad():
        decoded = _decoded(whole, expected)
    pixels = (decoded[0].movedim(0, -1) / 2 + 0.5).clamp(0, 1).numpy()
    made = whole.pixels(latent)
    assert made.shape == pixels.shape
    assert np.abs(made / 255 - pixels).max() <= 1 / 255
    whole.engine.close()
