"""Maps families to diffusers pipelines and the settings of their folders. Torch-free.

Facts that no tensor determines. Writes nothing. Source: scheduler_config.json of the published folders of each family.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from modelpool.pool.families.definitions import defined_unets
from modelpool.pool.families.parts.located_family import LocatedFamily
from modelpool.pool.families.parts.pipeline_form import PipelineFacts, SchedulerFacts
from modelpool.pool.models.saving.transformer_pipelines import transformer_pipeline, transformer_scheduler
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.sampling_facts import PLAIN_NOISE, NoiseFacts, NoiseKind, Prediction

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
#: pipelines of UNets and of Stable Cascade
_PIPELINES: Mapping[str, PipelineFacts] = MappingProxyType(
    {unet.name: unet.pipeline for unet in defined_unets() if unet.pipeline is not None}
)


def pipeline_facts(family: LocatedFamily) -> PipelineFacts:
    """Return the pipeline of `family`, or of the family that it is a variant of. Raises UnknownArchitecture for a
    family without a known pipeline."""
    found = _PIPELINES.get(family.name) or _PIPELINES.get(family.relative) or transformer_pipeline(family)
    if found is None:
        raise UnknownArchitecture(
            f"{family.title} cannot be saved as a folder of diffusers yet, expected one of {', '.join(_PIPELINES)}, or "
            f"a transformer family"
        )
    return found


def scheduler_facts(family: LocatedFamily) -> SchedulerFacts:
    """Return the scheduler for `family`: Euler steps over its noise levels, or its pipeline's scheduler.

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


def noisy_scheduler_facts(family: LocatedFamily) -> SchedulerFacts:
    """Return the scheduler that adds noise to the input image of a model of `family`, at the levels that it knows, or
    to its embedding."""
    if family.sampling.image_labels is not None:
        return SchedulerFacts("DDPMScheduler", {"beta_schedule": "squaredcos_cap_v2", "num_train_timesteps": 1000})
    return SchedulerFacts("DDPMScheduler", _betas(family.sampling.noise))


def _betas(noise: NoiseFacts) -> dict[str, Any]:
    schedule = "linear" if noise.kind is NoiseKind.LINEAR else "scaled_linear"
    ends = {"beta_start": noise.beta_start, "beta_end": noise.beta_end}
    return {"beta_schedule": schedule, **ends, "num_train_timesteps": 1000}
