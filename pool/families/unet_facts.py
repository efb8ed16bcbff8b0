"""Sampling facts of the UNets with inputs other than text. Torch-free; see `facts`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from modelpool.pool.core.sampling_facts import FirstFrameMode, NoiseFacts, NoiseKind, Prediction, VisionEncoderUse
from modelpool.pool.families.parts.model_facts import Guidance, Level, ModelFacts

_INPAINT = ModelFacts(
    prediction=Prediction.NOISE,
    noise=NoiseFacts(),
    level=Level.TIMESTEP,
    guidance=Guidance.CLASSIFIER_FREE,
    cfg=7.5,
    steps=50,
    width=512,
    height=512,
    frames=1,
    side_multiple=8,
    frame_multiple=0,
    frame_rate=0.0,
    reads=("context", "image"),
    sources="diffusers' StableDiffusionInpaintPipeline; concatenated: the mask, 1 to paint, and latents of the rest",
)
_INSTRUCT = replace(
    _INPAINT,
    guidance=Guidance.TEXT_AND_IMAGE,
    steps=100,
    sources="diffusers' StableDiffusionInstructPix2PixPipeline; concatenated: latents of the image as the VAE has "
    "them, unscaled; the image guidance scale is 1.5",
)


def _of_xl(facts: ModelFacts) -> ModelFacts:
    """Return the same for SDXL."""
    return replace(facts, width=1024, height=1024, reads=("context", "pooled", "numbers", "image"))


_SVD = ModelFacts(
    prediction=Prediction.VELOCITY,
    noise=NoiseFacts(NoiseKind.EDM, sigma_min=0.002, sigma_max=700.0),
    level=Level.LOGARITHM,
    guidance=Guidance.RISING_WITH_FRAMES,
    cfg=3.0,
    steps=25,
    width=1024,
    height=576,
    frames=25,
    side_multiple=64,
    frame_multiple=1,
    frame_rate=7.0,
    reads=("image", "image_context", "numbers"),
    begins=FirstFrameMode.REPEATED,
    vision_use=VisionEncoderUse.PROJECTED,
    sources="diffusers' StableVideoDiffusionPipeline: numbers are 6 (frames per second less one), 127 and 0.02; "
    "latents of the image are concatenated as the VAE has them, unscaled; the first model generates 14 frames",
)

#: by the name that `pool.detection` gives
UNET_FACTS: Mapping[str, ModelFacts] = {
    "sd1_inpaint": _INPAINT,
    "sd2_inpaint": _INPAINT,
    "sd2_depth": replace(
        _INPAINT, sources="diffusers' StableDiffusionDepth2ImgPipeline; concatenated: depth from -1 to 1, in cells"
    ),
    "sdxl_inpaint": _of_xl(_INPAINT),
    "sd1_ip2p": _INSTRUCT,
    "sdxl_ip2p": _of_xl(replace(_INSTRUCT, cfg=5.0)),
    "sd_x4": replace(
        _INPAINT,
        prediction=Prediction.VELOCITY,
        noise=NoiseFacts(beta_start=0.0001, beta_end=0.02),
        cfg=9.0,
        steps=75,
        width=2048,
        height=2048,
        side_multiple=4,
        reads=("context", "image", "noise_level"),
        sources="diffusers' StableDiffusionUpscalePipeline: concatenated is the image itself, -1 to 1, with noise; "
        "the default noise level is 20",
    ),
    "svd": _SVD,
    "sv3d_p": replace(
        _SVD,
        width=576,
        height=576,
        frames=21,
        cfg=2.5,
        steps=50,
        guidance=Guidance.RISING_AND_FALLING,
        sources="Stability-AI/generative-models, sv3d_p.yaml: the numbers of each frame are 1e-5, the angle from "
        "straight up and the direction, in radians; the scale rises to the middle frame and falls again",
    ),
    "sv3d_u": replace(
        _SVD,
        width=576,
        height=576,
        frames=21,
        cfg=2.5,
        steps=50,
        guidance=Guidance.RISING_AND_FALLING,
        sources="Stability-AI/generative-models, sv3d_u.yaml: the number is the noise on the image, 1e-5",
    ),
}
