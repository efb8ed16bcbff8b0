"""Maps transformer families to diffusers pipelines and the settings of their folders.

Torch-free. Facts that no tensor determines, as in the published folders. Writes nothing. Source: model_index.json and
scheduler_config.json of the published folders of each family, and diffusers' `convert_*_to_diffusers.py`. Published
folders of Wan, HiDream and HunyuanVideo 1.5 have multistep schedulers, which are not part of the training: here they
have Euler's with the same shift.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.core.sampling_facts import NoiseFacts, NoiseKind, ReferenceMode, ShiftBySize
from modelpool.pool.families.family import Family
from modelpool.pool.families.modules import defined_families
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.formats.folder_header import PROJECTION
from modelpool.pool.loading.transformer_folder import BOUNDARY, SECOND, TRANSFORMER, VAE, VISION, text_folders
from modelpool.pool.saving.pipeline_form import NOTHING, PipelineFacts, SchedulerFacts
from modelpool.pool.specs.spec import Role

#: the image processor of Wan's vision encoder
_WAN_PROCESSOR = "image_processor"
#: the subpackage of diffusers with the additional model of Stable Audio, which embeds seconds
PROJECTION_LIBRARY = "stable_audio"
_NO_IMAGES = {"image_encoder": NOTHING, "feature_extractor": NOTHING}
_HUNYUAN_DIT = {"safety_checker": NOTHING, "feature_extractor": NOTHING, "requires_safety_checker": False}

#: class and entries of the index
_PIPELINES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        **dict.fromkeys(("sd3", "sd35_medium", "sd35_large"), ("StableDiffusion3Pipeline", _NO_IMAGES)),
        **dict.fromkeys(("flux_dev", "flux_schnell"), ("FluxPipeline", _NO_IMAGES)),
        "flux_fill": ("FluxFillPipeline", {}),
        "flux_control": ("FluxControlPipeline", {}),
        **dict.fromkeys(("flux2", "flux2_dev"), ("Flux2Pipeline", {})),
        "flux2_klein": ("Flux2KleinPipeline", {"is_distilled": True}),
        "chroma": ("ChromaPipeline", _NO_IMAGES),
        "qwen_image": ("QwenImagePipeline", {}),
        "z_image": ("ZImagePipeline", {}),
        "lumina2": ("Lumina2Pipeline", {}),
        "auraflow": ("AuraFlowPipeline", {}),
        **dict.fromkeys(("pixart_alpha", "pixart_alpha_512"), ("PixArtAlphaPipeline", {})),
        "pixart_sigma": ("PixArtSigmaPipeline", {}),
        **dict.fromkeys(("hunyuan_dit", "hunyuan_dit_1"), ("HunyuanDiTPipeline", _HUNYUAN_DIT)),
        "hidream_i1": ("HiDreamImagePipeline", {}),
        "hunyuan_image_21": ("HunyuanImagePipeline", {}),
        **{family.name: (family.pipeline, family.pipeline_entries) for family in defined_families() if family.pipeline},
    }
)
#: pipelines whose text encoder reads the reference images, by mode
_EDIT_PIPELINES = {ReferenceMode.WHOLE: "QwenImageEditPipeline", ReferenceMode.NUMBERED: "QwenImageEditPlusPipeline"}
#: the image processor of those, which is no model
_PROCESSOR = {"processor": "a checkpoint has none, expected the processor of Qwen/Qwen-Image-Edit"}
#: configuration entries that require another pipeline of the same class
_BY_CONFIG = {key: name for family in defined_families() for key, name in family.config_pipelines.items()}
#: settings of flows whose pipelines define the noise levels, which a shift would change
_CUSTOM_SCHEDULES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {family.name: family.scheduler_entries for family in defined_families() if family.scheduler_entries}
)
#: last step of plain classifier-free guidance of HunyuanImage, zero-based: of an image, and of one with text in it.
#: Source: hunyuanvideo-community/HunyuanImage-2.1-Diffusers
_CFG_STEPS = {"guider": 5, "ocr_guider": 38}
_GUIDERS = {family.name: family.guiders for family in defined_families() if family.guiders}


def transformer_pipeline(family: Family) -> PipelineFacts | None:
    """Return the pipeline of `family`; None if it is no transformer family, or has no pipeline."""
    found = _PIPELINES.get(family.name)
    complete = TRANSFORMERS.get(family.name)
    if found is None or complete is None:
        return None
    name, entries = found
    if family.sampling.reference_mode in _EDIT_PIPELINES:
        name = _EDIT_PIPELINES[family.sampling.reference_mode]
    if family.sampling.low_noise is not None:
        kept = {key: value for key, value in entries.items() if key != SECOND}
        entries = {**kept, BOUNDARY: family.sampling.low_noise.boundary}
    has_vision = Role.VISION_ENCODER in complete.prefixes
    folders = {**text_folders(complete), Role.DIFFUSION_MODEL: TRANSFORMER, Role.VAE: VAE}
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
        libraries={PROJECTION: PROJECTION_LIBRARY},
        guiders=_guiders(family),
        missing=_PROCESSOR if family.sampling.reference_mode in _EDIT_PIPELINES else {},
    )


def pipeline_name(facts: PipelineFacts, config: Mapping[str, Any]) -> str:
    """Return the class of the pipeline for a diffusion model with the configuration `config`."""
    return next((name for key, name in _BY_CONFIG.items() if config.get(key)), facts.name)


def _guiders(family: Family) -> dict[str, SchedulerFacts]:
    defaults = family.sampling.defaults
    strength = {} if defaults is None else {"guidance_scale": defaults.cfg}
    if family.name in _GUIDERS:
        return {
            folder: SchedulerFacts(guider.name, {**strength, **guider.settings})
            for folder, guider in _GUIDERS[family.name].items()
        }
    if family.name == "hunyuan_image_21":
        return {
            folder: SchedulerFacts(
                "AdaptiveProjectedMixGuidance", {**strength, "adaptive_projected_guidance_start_step": steps}
            )
            for folder, steps in _CFG_STEPS.items()
        }
    return {}


def transformer_scheduler(family: Family) -> SchedulerFacts:
    """Return the scheduler of a family with a `transformer_pipeline`, with its shift, prediction and noise.

    Raises UnknownArchitecture for noise that none of these pipelines supports.
    """
    noise = family.sampling.noise
    match noise.kind:
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
