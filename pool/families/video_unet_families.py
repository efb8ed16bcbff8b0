"""The families of UNets that make films of a picture and read no text, as values. Torch-free.

As `pool.families.family`, whose rows read texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelpool.pool.core.sampling_facts import FilmFacts, FilmNumbers, NoiseFacts, SamplingFacts, UsualRun
from modelpool.pool.families.family import SD1, Architecture, Family
from modelpool.pool.families.unet_facts import UNET_FACTS
from modelpool.pool.specs.spec import Role


def _film_unet(name: str, title: str, numbers: FilmNumbers, vae_prefix: str, usual: Mapping[str, Any]) -> Family:
    """A UNet of frames, which reads no text: it is told of a picture, by its latent and by a vision encoder."""
    facts = UNET_FACTS[name]
    assert isinstance(facts.noise, NoiseFacts)
    film = FilmFacts(facts.frames, facts.frame_multiple, facts.frame_rate, facts.begins, numbers)
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
            film=film,
            usual=UsualRun(facts.steps, facts.cfg, "euler", "karras", facts.guidance, **usual),
            sight=facts.sight,
        ),
    )


#: makes a film of a picture. Source: stabilityai/stable-video-diffusion-img2vid-xt, and diffusers' pipeline
SVD = _film_unet(
    "svd", "Stable Video Diffusion", FilmNumbers.MOTION, "first_stage_model.", {"image_noise": 0.02, "motion": 127}
)
#: goes around the thing in a picture. Their files have a whole VAE of pictures where the picture is encoded, and the
#: decoder of p elsewhere (`pool.models.common.spliced_vae`). Source: stabilityai/sv3d; sv3d_u.yaml and sv3d_p.yaml of
#: Stability-AI/generative-models
_SV3D_VAE, _SV3D_USUAL = "conditioner.embedders.1.encoder.", {"image_noise": 1e-5}
SV3D_U = _film_unet("sv3d_u", "SV3D u", FilmNumbers.NOISE, _SV3D_VAE, _SV3D_USUAL)
SV3D_P = _film_unet("sv3d_p", "SV3D p", FilmNumbers.VIEWS, _SV3D_VAE, _SV3D_USUAL)

FILM_UNETS = (SVD, SV3D_U, SV3D_P)
