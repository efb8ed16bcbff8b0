"""Recognises diffusers folders with a transformer as diffusion model as families. Torch-free and pure.

The tensors determine the family; what no shape determines comes from the configurations: arguments of the classes, the
latent scale, the shift of the scheduler. Configurations are untrusted and must be consistent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from modelpool.pool.families.definitions import defined_families
from modelpool.pool.families.detection.detect_diffusion_model import DiffusionFacts, recognise_diffusion
from modelpool.pool.families.parts.inner_models import INNER_FOLDERS
from modelpool.pool.families.parts.located_family import Architecture, LocatedFamily
from modelpool.pool.families.supported import running_families, why_not
from modelpool.pool.families.text_readings import OPTIONAL_ENCODERS, ROW_OF
from modelpool.pool.families.transformer_families import (
    DISTILLED,
    TRANSFORMERS,
    other_texts,
    with_text_vision,
    with_unconditional,
)
from modelpool.pool.families.two_experts import two_expert_family
from modelpool.pool.files.formats.folder_header import CLASS_KEY, PROJECTION
from modelpool.pool.files.formats.model_folder import INDEX_FILE
from modelpool.pool.files.formats.safetensors_file import Header, Shape
from modelpool.pool.files.formats.strict_json import finite_number
from modelpool.pool.models.loading.folder_values import FolderConfig, latent_statistics, number_in, wrong_value
from modelpool.pool.models.loading.incomplete_checkpoint import without_parts
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.sampling_facts import NoiseFacts, NoiseKind, ReferenceMode, ShiftBySize
from modelpool.pool.values.specs.spec import Role

TRANSFORMER, VAE, SCHEDULER, VISION = "transformer", "vae", "scheduler", "image_encoder"
#: the folder of the low-noise expert, and the index entry of the noise fraction below which it takes over
SECOND, BOUNDARY = "transformer_2", "boundary_ratio"
#: the index entry of distilled models
DISTILLED_KEY = "is_distilled"
#: the index entry of the noise levels of distilled models. Source: diffusers' QwenImage21Pipeline
LEVELS_KEY = "sample_sigmas"
#: the vision parts of a text encoder with image input (LLaVA)
LLAVA_TOWER, LLAVA_PROJECTOR = "text_encoder.vision_tower", "text_encoder.multi_modal_projector."
_VISION_CLASSES = ("CLIPVisionModel", "CLIPVisionModelWithProjection")
#: pipelines that read images by the text encoder, and how
_SIGHTS: Mapping[str, ReferenceMode] = {
    pipeline: mode
    for family in defined_families()
    if family.text.vision is not None
    for mode, pipeline in family.text.vision.pipelines.items()
}
#: families with equal tensors that only the pipeline distinguishes
_BY_PIPELINE = {
    (family.folder.same_as, family.folder.pipeline): family.name
    for family in defined_families()
    if family.folder.same_as
}
#: pipelines with another order of text encoders than the readings of their family
_TEXT_FOLDERS: Mapping[str, Mapping[Role, str]] = {
    family.name: family.folder.text_folders for family in defined_families() if family.folder.text_folders
}
#: families that pipelines run without a decoder of audio
_SILENT = frozenset(family.name for family in defined_families() if "vocoder" in family.folder.entries)
#: families with a pipeline that does not read the scale of latents in the configuration of the VAE
_UNSCALED = frozenset(family.name for family in defined_families() if not family.folder.scales_latent)
#: families with a pipeline that does not pass the size of an image to the scheduler
_FIXED_SHIFTS = frozenset(family.name for family in defined_families() if not family.folder.shifts_by_size)
#: entries of the configuration of a model that tell its distilled form; other families have one in the index
_DISTILLED_ENTRIES = {
    family.name: family.folder.distilled_entries for family in defined_families() if family.folder.distilled_entries
}
#: families with a shift of their own in their pipelines
_OWN_LEVELS = frozenset(family.name for family in defined_families() if family.folder.own_levels)
#: schedulers of families that none of the usual ones suits
_OWN_SCHEDULERS = {
    family.name: family.folder.scheduler for family in defined_families() if family.folder.scheduler is not None
}
#: a scheduler of flows that steps in another way than Euler's, with settings that this version has fixed
_PIFLOW, _FIXED_SETTINGS = "PiflowScheduler", ("eps", "final_step_size_scale", "num_policy_substeps")
#: the prediction of a flow in schedulers for several kinds of models
_FLOW_PREDICTION = "flow_prediction"
#: the configuration entry for a transformer's image conditioning, and the mode that this version lacks: such a model
#: has the tensors of a text-only one. Source: diffusers' HunyuanVideoTransformer3DModel
_IMAGE_CONDITION_KEY, _REPLACED = "image_condition_type", "token_replace"
#: most noise levels of a distilled model
_MOST_LEVELS = 1000
#: allowed range of a scheduler's shift; published models have 1 to 12
_SHIFTS = (0.001, 1000.0)
#: maximum absolute value of its logarithm at the two sizes that a scheduler specifies; published ones are below 3
_MAX_EXPONENT = 20.0
#: maximum number of latent patches that a scheduler may specify
_MAX_PATCHES = 1 << 32
#: `__init__` of FlowMatchEulerDiscreteScheduler in diffusers 0.42
_FLOW_DEFAULTS: FolderConfig = {
    "shift": 1.0,
    "use_dynamic_shifting": False,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "shift_terminal": None,
}
#: folder of the model that embeds seconds, by family
_SECONDS_FOLDERS = {
    family.name: INNER_FOLDERS[family.build.seconds_model]
    for family in defined_families()
    if family.build.seconds_model
}


def transformer_folder_family(header: Header, shapes: Mapping[str, Shape], whole: bool = True) -> LocatedFamily:
    """Return the family of the folder of `header`, with tensors of `shapes`; unless `whole`, with only the components
    that exist.

    Raises UnknownArchitecture naming the component and the key, for a model that this version does not run and for
    invalid configurations.
    """
    model_shapes = {key: shape for key, shape in shapes.items() if key.startswith(f"{TRANSFORMER}.")}
    found = recognise_diffusion(model_shapes)
    pipeline = str(header.configs.get(INDEX_FILE, {}).get(CLASS_KEY))
    base = None if found is None else TRANSFORMERS.get(_BY_PIPELINE.get((found.name, pipeline), found.name))
    if found is None or base is None:
        raise _cannot_run(found)
    if variant := other_texts(f"{TRANSFORMER}.", shapes):
        raise UnknownArchitecture(f"recognised as {base.title}{variant}, which this version cannot run yet")
    is_distilled = base.name in DISTILLED and _says_distilled(base, header.configs)
    base = DISTILLED[base.name] if is_distilled else base
    _check_image_condition(base, header.configs.get(TRANSFORMER, {}))
    scheduler = header.configs.get(SCHEDULER, {})
    _check_scheduler(base, scheduler)
    base = _paired(base, found, header, shapes)
    folders = _folders(base, shapes)
    sound = tuple(prefix.removesuffix(".") for prefix in base.extra_prefixes.get(Role.VAE, ()))
    # if the pipeline does without, both or neither
    if not any(key.startswith(base.extra_prefixes.get(Role.VAE, ())) for key in shapes) and base.name in _SILENT:
        sound = ()
    has_projection = any(role.is_diffusion_model for role in base.extra_prefixes)
    extra = base.companion or (_SECONDS_FOLDERS.get(base.name, PROJECTION) if has_projection else "")
    needed = [*folders.values(), *([extra] if extra else ()), *sound]
    missing = [name for name in needed if not any(key.startswith(f"{name}.") for key in shapes)]
    if missing and (whole or extra in missing):
        raise UnknownArchitecture(f"recognised as {base.title}, but its folder has no {' and no '.join(missing)}")
    absent = [role for role, name in folders.items() if name in missing]
    # the pipeline has a shift of its own for distilled models
    has_own = is_distilled or base.name in _OWN_LEVELS
    noise = base.sampling.noise if has_own else _noise(base.sampling.noise, scheduler)
    base = _with_levels(base, header.configs)
    present = {role: name for role, name in folders.items() if role not in absent}
    config, vision = header.configs.get(VAE, {}), _vision_config(present, header.configs)
    base, scale = _with_latents(base, config), base.scaling_factor
    if base.name not in _UNSCALED:
        scale = number_in(VAE, config, "scaling_factor", scale)
    if not scale > 0.0:
        raise wrong_value(VAE, "scaling_factor", scale, "a number above 0")
    family = replace(
        base,
        prefixes={role: f"{name}." for role, name in folders.items()},
        extra_prefixes=_extra_prefixes(base, extra),
        sound_configs={folder: header.configs[folder] for folder in sound if folder in header.configs},
        texts={role: facts for role, facts in base.texts.items() if role in folders},
        configs={**_models(base, folders, header.configs), Role.VAE: config, **vision},
        sampling=replace(base.sampling, noise=noise),
        scaling_factor=scale,
        latent_shift=number_in(VAE, config, "shift_factor", base.latent_shift) if base.shifts_latent else 0.0,
    )
    family = with_text_vision(without_parts(family, absent), shapes, _SIGHTS.get(pipeline, ReferenceMode.BY_NAME))
    return with_unconditional(family, shapes)


def _with_latents(base: LocatedFamily, config: FolderConfig) -> LocatedFamily:
    """Return `base` with the mean and the deviation of each channel of its latents in the configuration of the VAE,
    if its latents have these and no scale."""
    if base.name not in _UNSCALED:
        return base
    means, deviations = latent_statistics(VAE, config, len(base.latent_means))
    return replace(base, latent_means=means, latent_deviations=deviations) if means else base


def _paired(base: LocatedFamily, found: DiffusionFacts, header: Header, shapes: Mapping[str, Shape]) -> LocatedFamily:
    """Return `base`, with the diffusion model `found`, or the family with two experts if there is a second model."""
    start = f"{SECOND}."
    second = {key.removeprefix(start): shape for key, shape in shapes.items() if key.startswith(start)}
    if not second:
        return base
    pair = two_expert_family(found, second, SECOND)
    defaults = pair.sampling.low_noise
    assert defaults is not None, f"{pair.name} is a pair"
    boundary = finite_number(header.configs.get(INDEX_FILE, {}).get(BOUNDARY))
    if boundary is None or not 0.0 < boundary < 1.0:
        expected = f"the noise fraction below which {SECOND} takes over, such as {defaults.boundary}"
        raise wrong_value(INDEX_FILE, BOUNDARY, boundary, expected)
    return replace(pair, sampling=replace(pair.sampling, low_noise=replace(defaults, boundary=boundary)))


def _with_levels(base: LocatedFamily, configs: Mapping[str, FolderConfig]) -> LocatedFamily:
    """Return `base` with the noise levels in the index as defaults, if there are any."""
    index, defaults = configs.get(INDEX_FILE, {}), base.sampling.defaults
    if index.get(LEVELS_KEY) is None or defaults is None or base.sampling.noise.kind is not NoiseKind.FLOW:
        return base
    given = index[LEVELS_KEY]
    levels = [finite_number(each) for each in given] if isinstance(given, list) else []
    found = [level for level in levels if level is not None and 0.0 < level <= 1.0]
    is_falling = all(after < before for before, after in pairwise(found))
    if not 0 < len(found) == len(levels) <= _MOST_LEVELS or not is_falling:
        raise wrong_value(INDEX_FILE, LEVELS_KEY, given, f"up to {_MOST_LEVELS} falling noise fractions above 0")
    if configs.get(SCHEDULER, {}).get("use_dynamic_shifting") is True:
        expected = f"false: the levels in {LEVELS_KEY} are those of the model"
        raise wrong_value(SCHEDULER, "use_dynamic_shifting", True, expected)
    defaults = replace(defaults, steps=len(found), sigmas=tuple(found))
    return replace(base, sampling=replace(base.sampling, defaults=defaults))


def _check_image_condition(base: LocatedFamily, config: FolderConfig) -> None:
    """Raise UnknownArchitecture for a model with the tensors of `base` that replaces its first latent frame by an
    image."""
    if config.get(_IMAGE_CONDITION_KEY) == _REPLACED:
        missing = "an image as the first latent frame, with another noise level than the other frames"
        raise UnknownArchitecture(
            f"recognised as {base.title} in a form that this version cannot run yet: configuration of {TRANSFORMER}: "
            f"{_IMAGE_CONDITION_KEY}: found {_REPLACED!r}, expected no value or 'latent_concat'; "
            f"not supported: {missing}"
        )


def _check_scheduler(base: LocatedFamily, config: FolderConfig) -> None:
    """Raise UnknownArchitecture for the scheduler of a flow with levels that this version would not reproduce."""
    name, own = str(config.get(CLASS_KEY, "")), _OWN_SCHEDULERS.get(base.name)
    if own is not None and name == own.name == _PIFLOW:
        for key in _FIXED_SETTINGS:
            if config.get(key, own.settings[key]) != own.settings[key]:
                raise wrong_value(SCHEDULER, key, config[key], f"{own.settings[key]}, as in the published models")
    if base.sampling.noise.kind is not NoiseKind.FLOW or (own is not None and name == own.name):
        return
    is_flow = config.get("use_flow_sigmas") is True or config.get("prediction_type") == _FLOW_PREDICTION
    if name and not name.startswith("Flow") and not is_flow:
        expected = f"a scheduler of flows, as {base.title} was trained with, such as FlowMatchEulerDiscreteScheduler"
        raise wrong_value(SCHEDULER, CLASS_KEY, name, expected)
    if base.name in _FIXED_SHIFTS and config.get("use_dynamic_shifting") is True:
        expected = f"false: the pipeline of {base.title} does not pass the size of an image to the scheduler"
        raise wrong_value(SCHEDULER, "use_dynamic_shifting", True, expected)
    by_size = base.name in _OWN_LEVELS and base.sampling.noise.shift_by_size is not None
    if by_size and (shift := number_in(SCHEDULER, config, "shift", 1.0)) != 1.0:
        raise wrong_value(SCHEDULER, "shift", shift, f"1: the pipeline of {base.title} computes the noise levels")


def _models(
    family: LocatedFamily, folders: Mapping[Role, str], configs: Mapping[str, FolderConfig]
) -> dict[Role, FolderConfig]:
    """Return the configurations of the diffusion models, including a part with a folder of its own, and of the part
    that joins the states of a text encoder."""
    part = configs.get(family.companion, {}) if family.companion else {}
    named = {f"{family.companion}_{key}": value for key, value in part.items()}
    return {
        role: {**configs.get(folder, {}), **(named if role.is_diffusion_model else {})}
        for role, folder in folders.items()
        if role.is_diffusion_model or family.architectures[role] is Architecture.TEXT_CONNECTOR
    }


def _says_distilled(family: LocatedFamily, configs: Mapping[str, FolderConfig]) -> bool:
    """Return whether the folder has the distilled model of `family`, by its index or its configuration."""
    entries, config = _DISTILLED_ENTRIES.get(family.name), configs.get(TRANSFORMER, {})
    if entries is None:
        return configs.get(INDEX_FILE, {}).get(DISTILLED_KEY) is True
    return any(config.get(key) == value for key, value in entries.items())


def _cannot_run(found: DiffusionFacts | None) -> UnknownArchitecture:
    if found is None:
        return UnknownArchitecture(f"found no known model in the folder {TRANSFORMER!r}")
    if found.name in running_families():
        return UnknownArchitecture(f"found {found.title} in the folder {TRANSFORMER!r}, expected it in 'unet'")
    reason = why_not(found.runs)
    message = f"a folder of diffusers, recognised as {found.title}, which this version cannot run yet: {reason}"
    return UnknownArchitecture(message)


def text_folders(family: LocatedFamily) -> dict[Role, str]:
    """Return the folder of each text encoder of `family`, in the order of its readings."""
    return dict(_TEXT_FOLDERS.get(family.name, {role: role.value for role in family.text_encoders}))


def _folders(family: LocatedFamily, shapes: Mapping[str, Shape]) -> dict[Role, str]:
    """Return the folder of each component; text encoders that the model runs without are omitted if they are
    missing."""
    named = text_folders(family)
    optional = OPTIONAL_ENCODERS.get(ROW_OF[family.text_set], frozenset())
    texts = {
        role: folder
        for role, folder in named.items()
        if family.texts[role].encoder not in optional or any(key.startswith(f"{folder}.") for key in shapes)
    }
    vision_use = family.sampling.vision_use
    vision = {} if vision_use is None else {Role.VISION_ENCODER: VISION if vision_use.is_model_input else LLAVA_TOWER}
    second = {Role.DIFFUSION_MODEL_2: SECOND} if Role.DIFFUSION_MODEL_2 in family.prefixes else {}
    return {**texts, **vision, Role.DIFFUSION_MODEL: TRANSFORMER, **second, Role.VAE: VAE}


def _extra_prefixes(family: LocatedFamily, extra: str) -> dict[Role, tuple[str, ...]]:
    """Return the key prefixes of further tensors of components, in folders; `extra` is the folder of further tensors of
    the diffusion model."""
    found = {Role.DIFFUSION_MODEL: (f"{extra}.",)} if extra else {}
    sound = family.extra_prefixes.get(Role.VAE)
    return found | ({} if sound is None else {Role.VAE: sound}) | _projector_prefixes(family)


def _projector_prefixes(family: LocatedFamily) -> dict[Role, tuple[str, ...]]:
    """Return the extra key prefixes of a vision encoder that is part of a text encoder."""
    vision_use = family.sampling.vision_use
    return {} if vision_use is None or vision_use.is_model_input else {Role.VISION_ENCODER: (LLAVA_PROJECTOR,)}


def _vision_config(folders: Mapping[Role, str], configs: Mapping[str, FolderConfig]) -> dict[Role, FolderConfig]:
    """Return the configuration of the vision encoder, if it has a folder."""
    if folders.get(Role.VISION_ENCODER) != VISION:
        return {}
    config = configs.get(VISION, {})
    if config.get(CLASS_KEY) not in _VISION_CLASSES:
        raise wrong_value(VISION, "class_name", config.get(CLASS_KEY), " or ".join(_VISION_CLASSES))
    return {Role.VISION_ENCODER: config}


def _noise(noise: NoiseFacts, config: FolderConfig) -> NoiseFacts:
    """Return `noise` with the shift of the scheduler's configuration; unchanged if that specifies no flow."""
    if noise.kind is NoiseKind.FLOW and config.get("use_flow_sigmas") is True and config.get("flow_shift") is not None:
        return replace(noise, shift=_shift({"shift": config["flow_shift"]}), shift_by_size=None)
    if noise.kind is NoiseKind.ZERO_TERMINAL and config.get("snr_shift_scale") is not None:  # CogVideoX
        return replace(noise, shift=_shift({"shift": config["snr_shift_scale"]}))
    if noise.kind is not NoiseKind.FLOW or not str(config.get("_class_name", "")).startswith(("FlowMatch", _PIFLOW)):
        return noise
    if config.get("invert_sigmas") is True:  # Mochi's: its pipeline defines the levels itself
        return noise
    settings = {**_FLOW_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    last = number_in(SCHEDULER, settings, "shift_terminal", 0.0)
    if not 0.0 <= last < 1.0:
        raise wrong_value(SCHEDULER, "shift_terminal", last, "a noise fraction below 1")
    if settings["use_dynamic_shifting"] is not True:
        return replace(noise, shift=_shift(settings), shift_by_size=None, last_share=last)
    if noise.shift_by_size is not None and not isinstance(noise.shift_by_size, ShiftBySize):
        return replace(noise, last_share=last)  # the pipeline defines the shift itself
    low, high = (_patches(settings, key) for key in ("base_image_seq_len", "max_image_seq_len"))
    if not low < high:
        raise wrong_value(SCHEDULER, "base_image_seq_len and max_image_seq_len", (low, high), "rising numbers")
    by_size = ShiftBySize((low, high), (_exponent(settings, "base_shift"), _exponent(settings, "max_shift")))
    return replace(noise, shift_by_size=by_size, last_share=last)


def _patches(settings: FolderConfig, key: str) -> int:
    found = number_in(SCHEDULER, settings, key, 0.0)
    if not found.is_integer() or not 0 < found <= _MAX_PATCHES:
        raise wrong_value(SCHEDULER, key, found, f"a whole number from 1 to {_MAX_PATCHES}")
    return int(found)


def _exponent(settings: FolderConfig, key: str) -> float:
    found = number_in(SCHEDULER, settings, key, 0.0)
    if not abs(found) <= _MAX_EXPONENT:
        raise wrong_value(SCHEDULER, key, found, f"a number from {-_MAX_EXPONENT} to {_MAX_EXPONENT}")
    return found


def _shift(settings: FolderConfig) -> float:
    shift = number_in(SCHEDULER, settings, "shift", 1.0)
    least, most = _SHIFTS
    if not least <= shift <= most:
        raise wrong_value(SCHEDULER, "shift", shift, f"a number from {least} to {most}")
    return shift
