"""Maps transformer families to diffusers pipelines and the settings of their folders.

Torch-free. Facts that no tensor determines, as in the published folders. Writes nothing. Source: model_index.json and
scheduler_config.json of the published folders of each family, and diffusers' `convert_*_to_diffusers.py`. Published
folders of Wan, HiDream and HunyuanVideo 1.5 have multistep schedulers, which are not part of the training: here they
have Euler's with the same shift. Sana's keep theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from modelpool.pool.families.definitions import defined_families
from modelpool.pool.families.parts.located_family import LocatedFamily
from modelpool.pool.families.parts.pipeline_form import PipelineFacts, SchedulerFacts
from modelpool.pool.families.transformer_families import DISTILLED, TEXT_VISION, TRANSFORMERS, UNCONDITIONAL
from modelpool.pool.files.formats.folder_header import (
    UNCONDITIONAL_FOLDER,
)
from modelpool.pool.models.loading.transformer_folder import (
    BOUNDARY,
    DISTILLED_KEY,
    LEVELS_KEY,
    SECOND,
    TRANSFORMER,
    VAE,
    VISION,
    text_folders,
)
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.sampling_facts import NoiseFacts, NoiseKind, ShiftBySize
from modelpool.pool.values.specs.spec import Role

#: the image processor of Wan's vision encoder
_WAN_PROCESSOR = "image_processor"
#: subpackages of diffusers with further models of a family, by folder
_LIBRARIES = {family.name: family.folder.libraries for family in defined_families() if family.folder.libraries}

#: class and entries of the index
_PIPELINES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        **{
            family.name: (family.folder.pipeline, family.folder.entries)
            for family in defined_families()
            if family.folder.pipeline
        },
    }
)
#: configuration entries that require another pipeline of the same class
_BY_CONFIG = {key: name for family in defined_families() for key, name in family.folder.config_pipelines.items()}
#: settings of flows with pipelines that define the noise levels, which a shift would change
_CUSTOM_SCHEDULES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {family.name: family.folder.scheduler_entries for family in defined_families() if family.folder.scheduler_entries}
)
#: flows with a multistep solver in their folders: their pipelines pass no levels, and Euler's would be others
_MULTISTEP = frozenset(family.name for family in defined_families() if family.folder.is_multistep)
#: schedulers of families with levels that none of the usual ones has
_SCHEDULERS = {
    family.name: family.folder.scheduler for family in defined_families() if family.folder.scheduler is not None
}
#: distilled models that their own configuration marks as such
_SAID_BY_CONFIG = frozenset(family.name for family in defined_families() if family.folder.distilled_entries)
_MISSING = {family.name: family.folder.missing for family in defined_families() if family.folder.missing}
_GUIDERS = {family.name: family.folder.guiders for family in defined_families() if family.folder.guiders}


def transformer_pipeline(family: LocatedFamily) -> PipelineFacts | None:
    """Return the pipeline of `family`; None if it is no transformer family, or has no pipeline."""
    found = _PIPELINES.get(family.name)
    complete = TRANSFORMERS.get(family.name)
    if found is None or complete is None:
        return None
    name, entries = found
    vision, mode = TEXT_VISION.get(family.name), family.sampling.reference_mode
    missing: Mapping[str, str] = _MISSING.get(family.name, {})
    if vision is not None and mode is not None and mode in vision.pipelines:
        name, missing = vision.pipelines[mode], vision.missing
    if family.name in UNCONDITIONAL and not family.sampling.has_unconditional:
        missing = {**missing, UNCONDITIONAL_FOLDER: "the checkpoint has no model that predicts without a text"}
    if family.sampling.low_noise is not None:
        kept = {key: value for key, value in entries.items() if key != SECOND}
        entries = {**kept, BOUNDARY: family.sampling.low_noise.boundary}
    is_distilled = family.name in DISTILLED and family.sampling.defaults == DISTILLED[family.name].sampling.defaults
    if is_distilled and family.name not in _SAID_BY_CONFIG:
        entries = {**entries, DISTILLED_KEY: True}
    if family.sampling.defaults is not None and family.sampling.defaults.sigmas:
        entries = {**entries, LEVELS_KEY: list(family.sampling.defaults.sigmas)}
    has_vision = Role.VISION_ENCODER in complete.prefixes
    separate = {role: folder for role, folder in text_folders(complete).items() if role not in complete.inside}
    folders = {**separate, Role.DIFFUSION_MODEL: TRANSFORMER, Role.VAE: VAE}
    folders |= {Role.DIFFUSION_MODEL_2: SECOND} if family.sampling.low_noise is not None else {}
    vision_use = complete.sampling.vision_use
    folders |= (
        {Role.VISION_ENCODER: VISION} if has_vision and vision_use is not None and vision_use.is_model_input else {}
    )
    return PipelineFacts(
        name,
        folders,
        entries,
        processor=_WAN_PROCESSOR if has_vision else "",
        libraries=_LIBRARIES.get(family.name, {}),
        guiders=_guiders(family),
        missing=missing,
    )


def pipeline_name(facts: PipelineFacts, config: Mapping[str, Any]) -> str:
    """Return the class of the pipeline for a diffusion model with the configuration `config`."""
    return next((name for key, name in _BY_CONFIG.items() if config.get(key)), facts.name)


def _guiders(family: LocatedFamily) -> dict[str, SchedulerFacts]:
    defaults = family.sampling.defaults
    strength = {} if defaults is None else {"guidance_scale": defaults.cfg}
    if family.name in _GUIDERS:
        return {
            folder: SchedulerFacts(guider.name, {**strength, **guider.settings})
            for folder, guider in _GUIDERS[family.name].items()
        }
    return {}


def transformer_scheduler(family: LocatedFamily) -> SchedulerFacts:
    """Return the scheduler of a family with a `transformer_pipeline`, with its shift, prediction and noise.

    Raises UnknownArchitecture for noise that none of these pipelines supports.
    """
    noise = family.sampling.noise
    if family.name in _SCHEDULERS:
        own = _SCHEDULERS[family.name]
        return replace(own, settings={**own.settings, "shift": noise.shift}) if "shift" in own.settings else own
    match noise.kind:
        case NoiseKind.FLOW if family.name in _MULTISTEP:
            settings = {"use_flow_sigmas": True, "flow_shift": noise.shift, "prediction_type": "flow_prediction"}
            return SchedulerFacts("DPMSolverMultistepScheduler", settings)
        case NoiseKind.FLOW:
            return SchedulerFacts("FlowMatchEulerDiscreteScheduler", _CUSTOM_SCHEDULES.get(family.name) or _flow(noise))
        case NoiseKind.EDM:
            ends = {"sigma_min": noise.sigma_min, "sigma_max": noise.sigma_max, "sigma_data": noise.sigma_data}
            kinds = {"sigma_schedule": "karras", "final_sigmas_type": "sigma_min"}
            return SchedulerFacts("EDMEulerScheduler", {**ends, **kinds})
        case NoiseKind.LINEAR:
            betas = {"beta_start": noise.beta_start, "beta_end": noise.beta_end, "beta_schedule": "linear"}
            return SchedulerFacts("DPMSolverMultistepScheduler", {**betas, "prediction_type": "epsilon"})
        case NoiseKind.SCALED_LINEAR:
            betas = {"beta_start": noise.beta_start, "beta_end": noise.beta_end, "beta_schedule": "scaled_linear"}
            steps = {"clip_sample": False, "steps_offset": 1, "timestep_spacing": "leading"}
            return SchedulerFacts("DDPMScheduler", {**betas, **steps, "prediction_type": "v_prediction"})
        case NoiseKind.ANGLE:
            ends = {"sigma_min": noise.sigma_min, "sigma_max": noise.sigma_max, "sigma_data": noise.sigma_data}
            settings = {"sigma_schedule": "exponential", "prediction_type": "v_prediction", "solver_order": 2}
            return SchedulerFacts("CosineDPMSolverMultistepScheduler", {**ends, **settings})
        case kind:
            raise UnknownArchitecture(
                f"{family.title} cannot be saved as a folder of diffusers: it has {kind.value} noise"
            )


def _flow(noise: NoiseFacts) -> dict[str, Any]:
    last = {"shift_terminal": noise.last_share} if noise.last_share else {}
    by_size = noise.shift_by_size
    if by_size is None:
        return {"shift": noise.shift, **last}
    if not isinstance(by_size, ShiftBySize):  # the pipeline computes it
        return {"use_dynamic_shifting": True, **last}
    return {
        "use_dynamic_shifting": True,
        "base_image_seq_len": by_size.tokens[0],
        "max_image_seq_len": by_size.tokens[1],
        "base_shift": by_size.exponents[0],
        "max_shift": by_size.exponents[1],
        **last,
    }
