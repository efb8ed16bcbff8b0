"""Which pipeline of diffusers a family that runs on a transformer is, and what its folder says of its parts.

Torch-free. Facts that no tensor tells, as the published folders have them. Does not write anything.
Source: model_index.json and scheduler_config.json of the published folders of each family, and diffusers' own
`convert_*_to_diffusers.py`. Published folders of Wan, HiDream and HunyuanVideo 1.5 have multistep schedulers, which are
no part of what a model was trained with: here they have Euler's with the same shift.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.core.sampling_facts import NoiseFacts, NoiseKind, ShiftBySize, TextSight
from modelpool.pool.families.family import Family
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.formats.folder_header import PROJECTION
from modelpool.pool.loading.transformer_folder import BOUNDARY, SECOND, TRANSFORMER, VAE, VISION, text_folders
from modelpool.pool.saving.pipeline_form import NOTHING, PipelineFacts, SchedulerFacts
from modelpool.pool.specs.spec import Role

#: what fits an image into the form that the vision encoder of Wan is shown
_WAN_PROCESSOR = "image_processor"
#: the part of diffusers that has the model beside Stable Audio's, which embeds seconds
PROJECTION_LIBRARY = "stable_audio"
_NO_IMAGES = {"image_encoder": NOTHING, "feature_extractor": NOTHING}
_NO_CHECKER = {"safety_checker": NOTHING}
_ONE_WAN = {SECOND: NOTHING, BOUNDARY: None, "expand_timesteps": False}
_WAN_IMAGE = {**_ONE_WAN, VISION: NOTHING, _WAN_PROCESSOR: NOTHING}
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
        "wan_t2v": ("WanPipeline", _ONE_WAN),
        "wan_vace": ("WanVACEPipeline", {SECOND: NOTHING, BOUNDARY: None}),
        "wan22_ti2v": ("WanPipeline", {**_ONE_WAN, "expand_timesteps": True}),
        **dict.fromkeys(("wan21_i2v", "wan21_flf2v", "wan22_i2v"), ("WanImageToVideoPipeline", _WAN_IMAGE)),
        "hunyuan_video": ("HunyuanVideoPipeline", {}),
        "hunyuan_video_i2v": ("HunyuanVideoImageToVideoPipeline", {}),
        "hunyuan_video_15": ("HunyuanVideo15Pipeline", {}),
        "ltxv": ("LTXPipeline", {}),
        "mochi": ("MochiPipeline", {"force_zeros_for_empty_prompt": False}),
        "cosmos_t2v": ("CosmosTextToWorldPipeline", _NO_CHECKER),
        "cosmos_i2v": ("CosmosVideoToWorldPipeline", _NO_CHECKER),
        "cosmos2_t2i": ("Cosmos2TextToImagePipeline", _NO_CHECKER),
        "cosmos2_i2v": ("Cosmos2VideoToWorldPipeline", _NO_CHECKER),
        "stable_audio_1": ("StableAudioPipeline", {}),
    }
)
#: pipelines whose text encoder is shown the images that a model works from, by how
_SEEING = {TextSight.WHOLE: "QwenImageEditPipeline", TextSight.NUMBERED: "QwenImageEditPlusPipeline"}
#: what those show images with, which is no model
_PROCESSOR = {"processor": "a checkpoint has none, expected the processor of Qwen/Qwen-Image-Edit"}
#: models that diffusers' class is told apart by its pipeline alone: what their configuration says, and that pipeline
_BY_CONFIG = {"causal_temporal_positioning": "LTXConditionPipeline"}
#: of the flows whose pipelines have levels of their own, which a shift would change
_OWN_LEVELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "mochi": {"shift": 1.0, "invert_sigmas": True},
        "cosmos2_t2i": {"use_karras_sigmas": True},
        "cosmos2_i2v": {"use_karras_sigmas": True},
    }
)
#: steps of a schedule that HunyuanImage is guided plainly, less one: of an image, and of one with words in it.
#: Source: hunyuanvideo-community/HunyuanImage-2.1-Diffusers
_PLAIN_STEPS = {"guider": 5, "ocr_guider": 38}


def transformer_pipeline(family: Family) -> PipelineFacts | None:
    """The pipeline of `family`; None where it is no family of transformers, or has no pipeline."""
    found = _PIPELINES.get(family.name)
    whole = TRANSFORMERS.get(family.name)
    if found is None or whole is None:
        return None
    name, entries = found
    if family.sampling.text_sight in _SEEING:
        name = _SEEING[family.sampling.text_sight]
    if family.sampling.low_noise is not None:
        kept = {key: value for key, value in entries.items() if key != SECOND}
        entries = {**kept, BOUNDARY: family.sampling.low_noise.boundary}
    sees = Role.VISION_ENCODER in whole.prefixes
    folders = {**text_folders(whole), Role.DIFFUSION_MODEL: TRANSFORMER, Role.VAE: VAE}
    folders |= {Role.DIFFUSION_MODEL_2: SECOND} if family.sampling.low_noise is not None else {}
    sight = whole.sampling.sight
    folders |= {Role.VISION_ENCODER: VISION} if sees and sight is not None and sight.is_told else {}
    return PipelineFacts(
        name,
        folders,
        entries,
        processor=_WAN_PROCESSOR if sees else "",
        libraries={PROJECTION: PROJECTION_LIBRARY},
        guiders=_guiders(family),
        missing=_PROCESSOR if family.sampling.text_sight in _SEEING else {},
    )


def pipeline_name(facts: PipelineFacts, config: Mapping[str, Any]) -> str:
    """The class of the pipeline for a diffusion model whose configuration says `config`."""
    return next((name for key, name in _BY_CONFIG.items() if config.get(key)), facts.name)


def _guiders(family: Family) -> dict[str, SchedulerFacts]:
    usual = family.sampling.usual
    strength = {} if usual is None else {"guidance_scale": usual.cfg}
    if family.name == "hunyuan_video_15":
        return {"guider": SchedulerFacts("ClassifierFreeGuidance", strength)}
    if family.name == "hunyuan_image_21":
        return {
            folder: SchedulerFacts(
                "AdaptiveProjectedMixGuidance", {**strength, "adaptive_projected_guidance_start_step": steps}
            )
            for folder, steps in _PLAIN_STEPS.items()
        }
    return {}


def transformer_scheduler(family: Family) -> SchedulerFacts:
    """The scheduler of a family that has a `transformer_pipeline`, with its shift, prediction and noise.

    Raises UnknownArchitecture for noise that none of these pipelines knows.
    """
    noise = family.sampling.noise
    match noise.kind:
        case NoiseKind.FLOW:
            return SchedulerFacts("FlowMatchEulerDiscreteScheduler", _OWN_LEVELS.get(family.name) or _flow(noise))
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
            said = {"sigma_schedule": "exponential", "prediction_type": "v_prediction", "solver_order": 2}
            return SchedulerFacts("CosineDPMSolverMultistepScheduler", {**ends, **said})
        case kind:
            raise UnknownArchitecture(
                f"{family.title} cannot be saved as a folder of diffusers: it has {kind.value} noise"
            )


def _flow(noise: NoiseFacts) -> dict[str, Any]:
    last = {"shift_terminal": noise.last_share} if noise.last_share else {}
    by_size = noise.shift_by_size
    if by_size is None:
        return {"shift": noise.shift, **last}
    if not isinstance(by_size, ShiftBySize):  # the pipeline reckons it
        return {"use_dynamic_shifting": True, **last}
    return {
        "use_dynamic_shifting": True,
        "base_image_seq_len": by_size.tokens[0],
        "max_image_seq_len": by_size.tokens[1],
        "base_shift": by_size.exponents[0],
        "max_shift": by_size.exponents[1],
        **last,
    }
