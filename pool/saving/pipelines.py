"""Maps families to diffusers pipelines and the settings of their folders. Torch-free.

Facts that no tensor determines, as in the published folders. Writes nothing. Source: model_index.json and
scheduler_config.json of the published folders of each family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.core.sampling_facts import PLAIN_NOISE, NoiseFacts, NoiseKind, Prediction
from modelpool.pool.families.family import (
    COSXL_EDIT,
    SD1,
    SD1_INPAINT,
    SD1_INSTRUCT,
    SD2,
    SD2_INPAINT,
    SD_X4,
    SDXL,
    SDXL_INPAINT,
    SDXL_INSTRUCT,
    SDXL_REFINER,
    Family,
)
from modelpool.pool.families.parts.definition import NOTHING
from modelpool.pool.families.video_unet_families import SVD
from modelpool.pool.saving.pipeline_form import PipelineFacts, SchedulerFacts
from modelpool.pool.saving.transformer_pipelines import transformer_pipeline, transformer_scheduler
from modelpool.pool.specs.spec import Role

#: schedule of video UNets between two noise levels; the table of levels is stored too but not read. Source:
#: scheduler_config.json of stabilityai/stable-video-diffusion-img2vid-xt
_VIDEO_STEPS = {
    "timestep_type": "continuous",
    "use_karras_sigmas": True,
    "timestep_spacing": "leading",
    "steps_offset": 1,
}

#: schedulers' names of predictions; those with a range of noise levels use different names
_PREDICTIONS: Mapping[Prediction, str] = MappingProxyType(
    {Prediction.NOISE: "epsilon", Prediction.VELOCITY: "v_prediction"}
)
_EDM_PREDICTIONS: Mapping[Prediction, str] = MappingProxyType(
    {Prediction.EDM: "epsilon", Prediction.VELOCITY: "v_prediction"}
)


_MODELS = {Role.DIFFUSION_MODEL: "unet", Role.VAE: "vae"}
_PLAIN = PipelineFacts(
    "StableDiffusionPipeline",
    {Role.TEXT_ENCODER: "text_encoder", **_MODELS},
    {
        "safety_checker": NOTHING,
        "feature_extractor": NOTHING,
        "image_encoder": NOTHING,
        "requires_safety_checker": False,
    },
)
_XL = PipelineFacts(
    "StableDiffusionXLPipeline",
    {Role.TEXT_ENCODER: "text_encoder", Role.TEXT_ENCODER_2: "text_encoder_2", **_MODELS},
    {"feature_extractor": NOTHING, "image_encoder": NOTHING, "force_zeros_for_empty_prompt": True},
)
_CASCADE_C = PipelineFacts(
    "StableCascadePriorPipeline",
    {Role.TEXT_ENCODER: "text_encoder", Role.DIFFUSION_MODEL: "prior"},
    {"feature_extractor": NOTHING, "image_encoder": NOTHING, "resolution_multiple": 42.67},
)
# published folders name "wuerstchen" for the VAE, which newer versions of diffusers refuse even if one is passed; with
# this name they take it from the caller: `from_pretrained(folder, vqgan=PaellaVQModel.from_pretrained(...))`
_CASCADE_B = PipelineFacts(
    "StableCascadeDecoderPipeline",
    {Role.TEXT_ENCODER: "text_encoder", Role.DIFFUSION_MODEL: "decoder", Role.VAE: "vqgan"},
    {"text_encoder": NOTHING, "tokenizer": NOTHING, "latent_dim_scale": 10.67},
    libraries={"vqgan": "stable_cascade"},
)
_XL_INSTRUCT = replace(
    _XL,
    name="StableDiffusionXLInstructPix2PixPipeline",
    entries={"force_zeros_for_empty_prompt": True, "is_cosxl_edit": False},
)
_PIPELINES: Mapping[str, PipelineFacts] = MappingProxyType(
    {
        **dict.fromkeys(("cascade_c", "cascade_c_lite"), _CASCADE_C),
        **dict.fromkeys(("cascade_b", "cascade_b_lite"), _CASCADE_B),
        SVD.name: PipelineFacts(
            "StableVideoDiffusionPipeline",
            {Role.VISION_ENCODER: "image_encoder", **_MODELS},
            processor="feature_extractor",
        ),
        SD1.name: _PLAIN,
        SD2.name: _PLAIN,
        SDXL.name: _XL,
        SD1_INPAINT.name: replace(_PLAIN, name="StableDiffusionInpaintPipeline"),
        SD2_INPAINT.name: replace(_PLAIN, name="StableDiffusionInpaintPipeline"),
        SDXL_INPAINT.name: replace(_XL, name="StableDiffusionXLInpaintPipeline"),
        SD1_INSTRUCT.name: replace(_PLAIN, name="StableDiffusionInstructPix2PixPipeline"),
        SDXL_INSTRUCT.name: _XL_INSTRUCT,
        COSXL_EDIT.name: replace(_XL_INSTRUCT, entries={**_XL_INSTRUCT.entries, "is_cosxl_edit": True}),
        SD_X4.name: PipelineFacts(
            "StableDiffusionUpscalePipeline",
            _PLAIN.folders,
            {
                "safety_checker": NOTHING,
                "feature_extractor": NOTHING,
                "watermarker": NOTHING,
                "max_noise_level": 350,
            },
            noisy="low_res_scheduler",
        ),
        # the refiner's one text encoder is the second one of SDXL
        SDXL_REFINER.name: PipelineFacts(
            "StableDiffusionXLImg2ImgPipeline",
            {Role.TEXT_ENCODER: "text_encoder_2", **_MODELS},
            {
                "text_encoder": NOTHING,
                "tokenizer": NOTHING,
                "feature_extractor": NOTHING,
                "image_encoder": NOTHING,
                "force_zeros_for_empty_prompt": False,
                "requires_aesthetics_score": True,
            },
        ),
    }
)


def pipeline_facts(family: Family) -> PipelineFacts:
    """Return the pipeline of `family`, or of the family that it is a variant of. Raises UnknownArchitecture for a
    family without a known pipeline."""
    found = _PIPELINES.get(family.name) or _PIPELINES.get(family.relative) or transformer_pipeline(family)
    if found is None:
        raise UnknownArchitecture(
            f"{family.title} cannot be saved as a folder of diffusers yet, expected one of {', '.join(_PIPELINES)}, or "
            f"a transformer family"
        )
    return found


def scheduler_facts(family: Family) -> SchedulerFacts:
    """Return the scheduler for `family`: Euler steps over its noise levels, or that of its pipeline.

    Raises UnknownArchitecture for a prediction that no diffusers scheduler supports with that noise.
    """
    if transformer_pipeline(family) is not None:
        return transformer_scheduler(family)
    noise, prediction = family.sampling.noise, family.sampling.prediction
    if noise.kind is NoiseKind.COSINE:
        return SchedulerFacts("DDPMWuerstchenScheduler", {})
    names = _EDM_PREDICTIONS if noise.kind is NoiseKind.EDM else _PREDICTIONS
    if prediction not in names:
        raise UnknownArchitecture(
            f"{family.title} cannot be saved as a folder of diffusers: it predicts {prediction.value} with "
            f"{noise.kind.value} noise, expected one of {', '.join(each.value for each in names)}"
        )
    if noise.kind is NoiseKind.EDM:
        ends = {"sigma_min": noise.sigma_min, "sigma_max": noise.sigma_max}
        if family.sampling.video is not None:
            settings = {**_betas(PLAIN_NOISE), **_VIDEO_STEPS, **ends, "prediction_type": names[prediction]}
            return SchedulerFacts("EulerDiscreteScheduler", settings)
        ends["sigma_data"] = noise.sigma_data
        schedule = "karras" if prediction is Prediction.EDM else "exponential"
        settings = {**ends, "prediction_type": names[prediction], "sigma_schedule": schedule}
        return SchedulerFacts("EDMEulerScheduler", settings)
    betas = _betas(noise)
    if noise.kind is NoiseKind.ZERO_TERMINAL:  # its first step begins at pure noise
        steps: dict[str, Any] = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    else:
        steps = {"steps_offset": 1, "timestep_spacing": "leading"}
    return SchedulerFacts("EulerDiscreteScheduler", {**betas, **steps, "prediction_type": names[prediction]})


def noisy_scheduler_facts(family: Family) -> SchedulerFacts:
    """Return the scheduler that adds noise to the input image of a model of `family`, at the levels that it knows."""
    return SchedulerFacts("DDPMScheduler", _betas(family.sampling.noise))


def _betas(noise: NoiseFacts) -> dict[str, Any]:
    schedule = "linear" if noise.kind is NoiseKind.LINEAR else "scaled_linear"
    ends = {"beta_start": noise.beta_start, "beta_end": noise.beta_end}
    return {"beta_schedule": schedule, **ends, "num_train_timesteps": 1000}
