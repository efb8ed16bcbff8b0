"""Folders of diffusers whose diffusion model is a transformer, as families. Torch-free and pure.

Which family it is, the tensors tell; what no shape tells is taken from the configurations: arguments of the classes,
the scale of latents, the shift of the scheduler. Configurations come from outside and have to fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.core.sampling_facts import NoiseFacts, NoiseKind, ShiftBySize, TextSight
from modelpool.pool.detection.diffusion import DiffusionFacts, recognise_diffusion
from modelpool.pool.families.expert_pairs import pair_of
from modelpool.pool.families.family import Family
from modelpool.pool.families.supported import running_families, why_not
from modelpool.pool.families.text_readings import ROW_OF, RUN_WITHOUT
from modelpool.pool.families.transformer_families import TRANSFORMERS, other_texts, with_text_sight
from modelpool.pool.formats.folder_header import CLASS, PROJECTION
from modelpool.pool.formats.model_folder import INDEX_FILE
from modelpool.pool.formats.safetensors_file import Header, Shape
from modelpool.pool.formats.strict_json import brief, finite_number
from modelpool.pool.loading.incomplete_checkpoint import without_parts
from modelpool.pool.specs.spec import Role

Said: TypeAlias = Mapping[str, Any]

TRANSFORMER, VAE, SCHEDULER, VISION = "transformer", "vae", "scheduler", "image_encoder"
#: the folder of the diffusion model for low noise of a pair, and what the index calls the share of noise below which it
#: takes over
SECOND, BOUNDARY = "transformer_2", "boundary_ratio"
#: the parts of a text encoder that sees images, a LLaVA
SEEING_TOWER, SEEING_PROJECTOR = "text_encoder.vision_tower", "text_encoder.multi_modal_projector."
_VISION_CLASSES = ("CLIPVisionModel", "CLIPVisionModelWithProjection")
#: pipelines that show their text encoder images, and how
_SIGHTS = {"QwenImageEditPipeline": TextSight.WHOLE, "QwenImageEditPlusPipeline": TextSight.NUMBERED}
#: families that nothing but the pipeline tells from another whose tensors they have
_BY_PIPELINE = {("pixart_sigma", "PixArtAlphaPipeline"): "pixart_alpha_512"}
#: pipelines that have their text encoders in another order than the readings of their family
_TEXT_FOLDERS: Mapping[str, Mapping[Role, str]] = {
    name: {Role.TEXT_ENCODER: "text_encoder_2", Role.TEXT_ENCODER_2: "text_encoder"}
    for name in ("hunyuan_video", "hunyuan_video_i2v")
}
#: how a transformer is told of an image, as its configuration says it, and the way that this version has not: such a
#: model has the tensors of one for texts. Source: diffusers' HunyuanVideoTransformer3DModel
_TOLD_BY, _REPLACED = "image_condition_type", "token_replace"
#: what the shift of a scheduler may be; those of published models are between 1 and 12
_SHIFTS = (0.001, 1000.0)
#: the same for its logarithm at the two sizes that a scheduler names, up or down; published ones are below 3
_MOST_EXPONENT = 20.0
#: patches of a latent that a scheduler may name
_MOST_PATCHES = 1 << 32
#: `__init__` of FlowMatchEulerDiscreteScheduler in diffusers 0.42
_FLOW_DEFAULTS: Said = {
    "shift": 1.0,
    "use_dynamic_shifting": False,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "shift_terminal": None,
}


def transformer_folder_family(header: Header, shapes: Mapping[str, Shape], whole: bool = True) -> Family:
    """The family of the folder that `header` is of, with tensors of `shapes`; where it need not be `whole`, with the
    components alone that are there.

    Raises UnknownArchitecture naming the component and the key, for a model that this version does not run and for
    configurations that cannot be.
    """
    own = {key: shape for key, shape in shapes.items() if key.startswith(f"{TRANSFORMER}.")}
    found = recognise_diffusion(own)
    pipeline = str(header.configs.get(INDEX_FILE, {}).get(CLASS))
    base = None if found is None else TRANSFORMERS.get(_BY_PIPELINE.get((found.name, pipeline), found.name))
    if found is None or base is None:
        raise _cannot_run(found)
    if variant := other_texts(f"{TRANSFORMER}.", shapes):
        raise UnknownArchitecture(f"recognised as {base.title}{variant}, which this version cannot run yet")
    _check_told(base, header.configs.get(TRANSFORMER, {}))
    base = _paired(base, found, header, shapes)
    folders = _folders(base, shapes)
    needed = [*folders.values(), *(PROJECTION for _ in base.besides)]
    missing = [name for name in needed if not any(key.startswith(f"{name}.") for key in shapes)]
    if missing and (whole or PROJECTION in missing):
        raise UnknownArchitecture(f"recognised as {base.title}, but its folder has no {' and no '.join(missing)}")
    gone = [role for role, name in folders.items() if name in missing]
    noise = _noise(base.sampling.noise, header.configs.get(SCHEDULER, {}))
    there = {role: name for role, name in folders.items() if role not in gone}
    said, seeing = header.configs.get(VAE, {}), _seeing(there, header.configs)
    scale = _number(VAE, said, "scaling_factor", base.scaling_factor)
    if not scale > 0.0:
        raise _wrong(VAE, "scaling_factor", scale, "a number above 0")
    family = replace(
        base,
        prefixes={role: f"{name}." for role, name in folders.items()},
        besides=dict.fromkeys(base.besides, (f"{PROJECTION}.",)) | _beside_tower(base),
        texts={role: facts for role, facts in base.texts.items() if role in folders},
        configs={**_models(folders, header.configs), Role.VAE: said, **seeing},
        sampling=replace(base.sampling, noise=noise),
        scaling_factor=scale,
        latent_shift=_number(VAE, said, "shift_factor", base.latent_shift),
    )
    return with_text_sight(without_parts(family, gone), shapes, _SIGHTS.get(pipeline, TextSight.BY_NAME))


def _paired(base: Family, found: DiffusionFacts, header: Header, shapes: Mapping[str, Shape]) -> Family:
    """`base`, whose diffusion model was `found`, or the pair that it is one of where there is a second model."""
    start = f"{SECOND}."
    second = {key.removeprefix(start): shape for key, shape in shapes.items() if key.startswith(start)}
    if not second:
        return base
    pair = pair_of(found, second, SECOND)
    usual = pair.sampling.low_noise
    assert usual is not None, f"{pair.name} is a pair"
    boundary = finite_number(header.configs.get(INDEX_FILE, {}).get(BOUNDARY))
    if boundary is None or not 0.0 < boundary < 1.0:
        expected = f"the share of noise below which {SECOND} takes over, such as {usual.boundary}"
        raise _wrong(INDEX_FILE, BOUNDARY, boundary, expected)
    return replace(pair, sampling=replace(pair.sampling, low_noise=replace(usual, boundary=boundary)))


def _check_told(base: Family, said: Said) -> None:
    """Raise UnknownArchitecture for a model of the tensors of `base` that has an image in place of its first frame."""
    if said.get(_TOLD_BY) == _REPLACED:
        missing = "an image in place of the first cell of time, which is told another level of noise than the others"
        raise UnknownArchitecture(
            f"recognised as {base.title} in a form that this version cannot run yet: configuration of {TRANSFORMER}: "
            f"{_TOLD_BY}: found {_REPLACED!r}, expected none or 'latent_concat'; what is missing is {missing}"
        )


def _models(folders: Mapping[Role, str], configs: Mapping[str, Said]) -> dict[Role, Said]:
    """What the folders of the diffusion models say."""
    return {role: configs.get(folder, {}) for role, folder in folders.items() if role.is_diffusion_model}


def _cannot_run(found: DiffusionFacts | None) -> UnknownArchitecture:
    if found is None:
        return UnknownArchitecture(f"found no model that is known in the folder {TRANSFORMER!r}")
    if found.name in running_families():
        return UnknownArchitecture(f"found {found.title} in the folder {TRANSFORMER!r}, expected it in 'unet'")
    reason = why_not(found.runs)
    said = f"a folder of diffusers, recognised as {found.title}, which this version cannot run yet: {reason}"
    return UnknownArchitecture(said)


def text_folders(family: Family) -> dict[Role, str]:
    """The folder of each text encoder of `family`, in the order of its readings."""
    return dict(_TEXT_FOLDERS.get(family.name, {role: role.value for role in family.text_encoders}))


def _folders(family: Family, shapes: Mapping[str, Shape]) -> dict[Role, str]:
    """The folder of each component; text encoders that the model runs without are left out where they are not there."""
    named = text_folders(family)
    optional = RUN_WITHOUT.get(ROW_OF[family.text_set], frozenset())
    texts = {
        role: folder
        for role, folder in named.items()
        if family.texts[role].encoder not in optional or any(key.startswith(f"{folder}.") for key in shapes)
    }
    sight = family.sampling.sight
    seeing = {} if sight is None else {Role.VISION_ENCODER: VISION if sight.is_told else SEEING_TOWER}
    second = {Role.DIFFUSION_MODEL_2: SECOND} if Role.DIFFUSION_MODEL_2 in family.prefixes else {}
    return {**texts, **seeing, Role.DIFFUSION_MODEL: TRANSFORMER, **second, Role.VAE: VAE}


def _beside_tower(family: Family) -> dict[Role, tuple[str, ...]]:
    """What belongs to a vision encoder that is part of a text encoder, and stands beside it."""
    sight = family.sampling.sight
    return {} if sight is None or sight.is_told else {Role.VISION_ENCODER: (SEEING_PROJECTOR,)}


def _seeing(folders: Mapping[Role, str], configs: Mapping[str, Said]) -> dict[Role, Said]:
    """What the folder of the vision encoder says, where there is one."""
    if folders.get(Role.VISION_ENCODER) != VISION:
        return {}
    said = configs.get(VISION, {})
    if said.get(CLASS) not in _VISION_CLASSES:
        raise _wrong(VISION, "class_name", said.get(CLASS), " or ".join(_VISION_CLASSES))
    return {Role.VISION_ENCODER: said}


def _noise(noise: NoiseFacts, said: Said) -> NoiseFacts:
    """`noise` with the shift that the scheduler was configured for; as it is where that says nothing of a flow."""
    if noise.kind is NoiseKind.FLOW and said.get("use_flow_sigmas") is True and said.get("flow_shift") is not None:
        return replace(noise, shift=_shift({"shift": said["flow_shift"]}), shift_by_size=None)
    if noise.kind is not NoiseKind.FLOW or not str(said.get("_class_name", "")).startswith("FlowMatch"):
        return noise
    if said.get("invert_sigmas") is True:  # Mochi's, whose pipeline has levels of its own
        return noise
    told = {**_FLOW_DEFAULTS, **{key: value for key, value in said.items() if value is not None}}
    last = _number(SCHEDULER, told, "shift_terminal", 0.0)
    if not 0.0 <= last < 1.0:
        raise _wrong(SCHEDULER, "shift_terminal", last, "a share of noise below 1")
    if told["use_dynamic_shifting"] is not True:
        return replace(noise, shift=_shift(told), shift_by_size=None, last_share=last)
    if noise.shift_by_size is not None and not isinstance(noise.shift_by_size, ShiftBySize):
        return noise  # the pipeline has a rule of its own
    low, high = (_patches(told, key) for key in ("base_image_seq_len", "max_image_seq_len"))
    if not low < high:
        raise _wrong(SCHEDULER, "base_image_seq_len and max_image_seq_len", (low, high), "rising numbers")
    by_size = ShiftBySize((low, high), (_exponent(told, "base_shift"), _exponent(told, "max_shift")))
    return replace(noise, shift_by_size=by_size, last_share=last)


def _patches(told: Said, key: str) -> int:
    found = _number(SCHEDULER, told, key, 0.0)
    if not found.is_integer() or not 0 < found <= _MOST_PATCHES:
        raise _wrong(SCHEDULER, key, found, f"a whole number from 1 to {_MOST_PATCHES}")
    return int(found)


def _exponent(told: Said, key: str) -> float:
    found = _number(SCHEDULER, told, key, 0.0)
    if not abs(found) <= _MOST_EXPONENT:
        raise _wrong(SCHEDULER, key, found, f"a number from {-_MOST_EXPONENT} to {_MOST_EXPONENT}")
    return found


def _shift(told: Said) -> float:
    shift = _number(SCHEDULER, told, "shift", 1.0)
    least, most = _SHIFTS
    if not least <= shift <= most:
        raise _wrong(SCHEDULER, "shift", shift, f"a number from {least} to {most}")
    return shift


def _number(name: str, said: Said, key: str, otherwise: float) -> float:
    value = said.get(key)
    if value is None:
        return otherwise
    number = finite_number(value)
    if number is None:
        raise _wrong(name, key, value, "a number")
    return number


def _wrong(name: str, key: str, found: object, expected: str) -> UnknownArchitecture:
    return UnknownArchitecture(f"configuration of {name}: {key}: found {brief(found)}, expected {expected}")
