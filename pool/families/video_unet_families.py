"""The families of UNets that generate a video from an image and read no text, as values. Torch-free.

Like `pool.families.family`, whose rows read texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelpool.pool.core.sampling_facts import NoiseFacts, SamplingDefaults, SamplingFacts, VideoFacts, VideoNumbers
from modelpool.pool.families.family import SD1, Architecture, Family
from modelpool.pool.families.unet_facts import UNET_FACTS
from modelpool.pool.specs.spec import Role


def _video_unet(name: str, title: str, numbers: VideoNumbers, vae_prefix: str, defaults: Mapping[str, Any]) -> Family:
    """Return the family of a video UNet without text: it reads an image, as a latent and through a vision encoder."""
    facts = UNET_FACTS[name]
    assert isinstance(facts.noise, NoiseFacts)
    video = VideoFacts(facts.frames, facts.frame_multiple, facts.frame_rate, facts.begins, numbers)
    return Family(
        name=name,
        title=title,
        prefixes={
            Role.VISION_ENCODER: "conditioner.embedders.0.open_clip.model.visual.",
            Role.DIFFUSION_MODEL: "model.diffusion_model.",
            Role.VAE: vae_prefix,
        },
        architectures={
            Role.VISION_ENCODER: Architecture.VISION_MODEL,
            Role.DIFFUSION_MODEL: Architecture.DIFFUSION_TRANSFORMER,
            Role.VAE: Architecture.VAE,
        },
        texts={},
        native_pixels=facts.width,
        native_sides=(facts.width, facts.height),
        scaling_factor=SD1.scaling_factor,
        latent_format="sd1",
        sampling=SamplingFacts(
            facts.prediction,
            noise=facts.noise,
            model=name,
            reads=frozenset(facts.reads),
            side_multiple=facts.side_multiple,
            video=video,
            defaults=SamplingDefaults(facts.steps, facts.cfg, "euler", "karras", facts.guidance, **defaults),
            vision_use=facts.vision_use,
        ),
    )


#: image-to-video. Source: stabilityai/stable-video-diffusion-img2vid-xt, and diffusers' pipeline
SVD = _video_unet(
    "svd", "Stable Video Diffusion", VideoNumbers.MOTION, "first_stage_model.", {"image_noise": 0.02, "motion": 127}
)
#: Orbits of an object in an image. Their files have a complete image VAE as the image encoder, and the decoder of p
#: elsewhere (`pool.models.common.spliced_vae`). Source: stabilityai/sv3d; sv3d_u.yaml and sv3d_p.yaml of
#: Stability-AI/generative-models
_SV3D_VAE, _SV3D_USUAL = "conditioner.embedders.1.encoder.", {"image_noise": 1e-5}
SV3D_U = _video_unet("sv3d_u", "SV3D u", VideoNumbers.NOISE, _SV3D_VAE, _SV3D_USUAL)
SV3D_P = _video_unet("sv3d_p", "SV3D p", VideoNumbers.VIEWS, _SV3D_VAE, _SV3D_USUAL)

VIDEO_UNETS = (SVD, SV3D_U, SV3D_P)
