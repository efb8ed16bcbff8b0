"""The families of models that run on transformers, as values: which text encoders and latents each has. Torch-free.

A family's components are found in a file by what their own keys say, so that one row serves every way in which files
put them together. `pool.models.diffusion` knows how the diffusion models are built and called, `pool.models.text` how
a prompt is put to the text encoders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.core.family_facts import TextFacts
from modelpool.pool.core.sampling_facts import (
    AudioFacts,
    Guidance,
    KeptLength,
    Prediction,
    SamplingFacts,
    Shown,
    TextSight,
    UsualRun,
    VideoFacts,
)
from modelpool.pool.detection.diffusion import DiffusionFacts
from modelpool.pool.detection.facts import Kind
from modelpool.pool.detection.latent_formats import LATENT_FORMATS
from modelpool.pool.detection.parts import split
from modelpool.pool.detection.qwen_layout import qwen_vision_config
from modelpool.pool.detection.signatures import SIGNATURES
from modelpool.pool.detection.text_encoders import recognise_text_encoder, stands_for
from modelpool.pool.families.audio_facts import AUDIO_FACTS
from modelpool.pool.families.cascade_families import CASCADES
from modelpool.pool.families.facts import ModelFacts
from modelpool.pool.families.family import SEEING_PARTS, Architecture, Family, is_weight
from modelpool.pool.families.image_facts import IMAGE_FACTS
from modelpool.pool.families.text_readings import ROW_OF, RUN_WITHOUT, readings_of
from modelpool.pool.families.video_facts import VIDEO_FACTS
from modelpool.pool.formats.safetensors_file import Shape
from modelpool.pool.specs.spec import Role

#: the places of a model's text encoders, in the order of the members of its set
TEXT_ROLES = (Role.TEXT_ENCODER, Role.TEXT_ENCODER_2, Role.TEXT_ENCODER_3, Role.TEXT_ENCODER_4)
#: what the keys of a diffusion model, of a VAE and of a vision encoder begin with in whole files
_MODEL_PREFIX, _VAE_PREFIX, _VISION_PREFIX = "model.diffusion_model.", "vae.", "vision_encoder."
#: what diffusers' flow schedulers do where nothing else is said
_FLOW_SCHEDULE = "simple"
#: those whose pipelines leave the levels to the scheduler, which ends a little above the last step
_ENDING_ABOVE = frozenset(
    {
        *("wan_t2v", "wan21_i2v", "wan21_flf2v", "wan22_i2v", "wan22_ti2v", "wan_vace"),
        *("sd3", "sd35_medium", "sd35_large", "auraflow", "hidream_i1"),
    }
)


#: those that were published with levels of their own kind
_OWN_SCHEDULES: Mapping[str, str] = {
    "mochi": "linear_quadratic",
    "cosmos_t2v": "karras",
    "cosmos_i2v": "karras",
    "cosmos2_t2i": "karras",
    "cosmos2_i2v": "karras",
    "stable_audio_1": "exponential",
}
#: of noise that ends far above none: the authors' own draws new noise in each step, this is its like without
_OWN_SAMPLERS: Mapping[str, str] = {"stable_audio_1": "dpmpp_2m"}
#: what of a file belongs to the diffusion model beside its own part
_BESIDES: Mapping[str, tuple[str, ...]] = {
    "stable_audio_1": ("conditioner.conditioners.seconds_start.", "conditioner.conditioners.seconds_total.")
}
#: what a model must be told that no request says yet, but for those that are shown an image
_NOT_SAID = frozenset({"image", "reference"})
#: those that are shown an image of a person's own
_SHOWN: Mapping[str, Shown] = {"flux_fill": Shown.HOLE_BY_PIXEL, "flux_control": Shown.LATENT}
#: those whose text encoder has to see the image that they work from: they take one where that part of it is there
_TEXT_SEES = frozenset({"qwen_image"})
#: the end of the key of the table of words of their text encoders
_WORDS = "embed_tokens.weight"
#: a tensor that some files of Qwen-Image-Edit 2511 have, which was trained with numbers
_NUMBERED_KEY = "__index_timestep_zero__"
#: what takes in the texts of Cosmos Predict 2.5, which has another text encoder than 2
_PROJECTION = "crossattn_proj.0.weight"
#: Source: the pipelines of diffusers. ComfyUI does so for none
_KEPT_LENGTHS: Mapping[str, KeptLength] = {"qwen_image": KeptLength.PATCHES, "lumina2": KeptLength.ROWS}


#: beginnings of the names of families whose weights LoRAs call alike (`pool.lora_names.naming`)
_NAMINGS = (
    "sd3",
    "flux2",
    "flux",
    "pixart",
    "hunyuan_dit",
    "hidream",
    "wan",
    "cosmos",
    "hunyuan_video_15",
    "hunyuan_video",
)


_HALF_FIRST = ("float16", "bfloat16", "float32")
_BFLOAT16_FIRST, _NO_FLOAT16 = ("bfloat16", "float16", "float32"), ("bfloat16", "float32")
#: by the beginning of a family's name. Source: the supported dtypes of ComfyUI's classes, section 9 of its behaviour
_DTYPES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("flux", "chroma", "z_image", "hunyuan_video", "cosmos_"), _BFLOAT16_FIRST),
    **dict.fromkeys(("mochi", "ltxv", "cosmos2", "lumina2", "hidream", "qwen_image"), _NO_FLOAT16),
}


def text_prefix(member: str) -> str:
    """What the keys of the text encoder `member` begin with in whole files."""
    return f"text_encoders.{member}.transformer."


def family_of(name: str, facts: ModelFacts) -> Family:
    """The family that recognition calls `name`, sampled as `facts` say."""
    row = next(row for row in SIGNATURES if row.name == name)
    latent, readings = LATENT_FORMATS[row.latent], readings_of(name)
    assert readings is not None, f"{name}: nothing says how its texts are read"
    members = dict(zip(TEXT_ROLES, (reading.encoder for reading in readings), strict=False))
    is_even = facts.prediction is Prediction.FLOW and name not in _ENDING_ABOVE
    schedule = _OWN_SCHEDULES.get(name) or (_FLOW_SCHEDULE if is_even else "normal")
    return Family(
        name=name,
        title=row.title,
        prefixes={
            **{role: text_prefix(member) for role, member in members.items()},
            **({} if facts.sight is None else {Role.VISION_ENCODER: _VISION_PREFIX}),
            Role.DIFFUSION_MODEL: _MODEL_PREFIX,
            Role.VAE: _VAE_PREFIX,
        },
        architectures={
            **dict.fromkeys(members, Architecture.TEXT_MODEL),
            **({} if facts.sight is None else {Role.VISION_ENCODER: Architecture.VISION_MODEL}),
            Role.DIFFUSION_MODEL: Architecture.AUDIO_TRANSFORMER
            if facts.seconds
            else Architecture.DIFFUSION_TRANSFORMER,
            Role.VAE: Architecture.VAE,
        },
        texts={role: TextFacts(encoder=member) for role, member in members.items()},
        native_pixels=facts.width,
        native_sides=(facts.width, facts.height),
        scaling_factor=latent.scale,
        latent_shift=latent.mean[0] if len(latent.mean) == 1 else 0.0,
        latent_means=latent.mean if len(latent.mean) > 1 else (),
        latent_deviations=latent.std if len(latent.mean) > 1 else (),
        sampling=SamplingFacts(
            prediction=facts.prediction,
            noise=facts.noise,
            model=name,
            words_negative=any(reading.negative_template for reading in readings),
            reads=_reads(name, facts),
            shown=_SHOWN.get(name),
            sight=facts.sight,
            side_multiple=facts.side_multiple,
            video=_video(facts),
            audio=AudioFacts(facts.seconds, facts.samples_per_second, facts.cells) if facts.seconds else None,
            kept_length=_KEPT_LENGTHS.get(name, KeptLength.NOTHING),
            usual=UsualRun(facts.steps, facts.cfg, _OWN_SAMPLERS.get(name, "euler"), schedule, facts.guidance),
        ),
        text_set=name,
        besides={Role.DIFFUSION_MODEL: _BESIDES[name]} if name in _BESIDES else {},
        latent_format=row.latent,
        dtypes=next((dtypes for start, dtypes in _DTYPES.items() if name.startswith(start)), _HALF_FIRST),
        relative=next((naming for naming in _NAMINGS if name.startswith(naming)), ""),
    )


def _reads(name: str, facts: ModelFacts) -> frozenset[str]:
    return frozenset((*facts.reads, *facts.may_read)) - ({"reference"} if name in _TEXT_SEES else set())


def _video(facts: ModelFacts) -> VideoFacts | None:
    if not facts.frame_multiple:
        return None
    return VideoFacts(facts.frames, facts.frame_multiple, facts.frame_rate, facts.begins, ends=facts.ends)


def _is_said(name: str, facts: ModelFacts) -> bool:
    """Whether requests say all that such a model must be told."""
    has_image = facts.begins is not None or name in _SHOWN
    not_said = _NOT_SAID - {"image"} if has_image else _NOT_SAID
    return not not_said & set(facts.reads)


#: by the name that recognition gives
TRANSFORMERS: Mapping[str, Family] = MappingProxyType(
    {
        name: family_of(name, facts)
        for name, facts in {**IMAGE_FACTS, **VIDEO_FACTS, **AUDIO_FACTS}.items()
        if name in ROW_OF and _is_said(name, facts)
    }
    | dict(CASCADES)
)


def located(family: Family, found: DiffusionFacts, shapes: Mapping[str, Shape]) -> Family:
    """`family` with the prefixes that its components have among `shapes`, where its diffusion model was `found`.

    Components that are not there keep the prefixes that they usually have, but for text encoders that the model runs
    without: those are left out.
    """
    others = {key: shape for key, shape in shapes.items() if not found.prefix or not key.startswith(found.prefix)}
    prefixes = {**family.prefixes, Role.DIFFUSION_MODEL: found.prefix}
    parts = split(others)
    for kind, prefix in parts:
        if kind is Kind.VAE and Role.VAE in prefixes:
            prefixes[Role.VAE] = prefix
        if kind is Kind.VISION_ENCODER and Role.VISION_ENCODER in prefixes:
            prefixes[Role.VISION_ENCODER] = prefix
    encoders = dict(_encoders(parts, shapes, tuple(facts.encoder for facts in family.texts.values())))
    optional = RUN_WITHOUT.get(ROW_OF.get(family.text_set, ""), frozenset())
    for role, facts in family.texts.items():
        if facts.encoder in encoders:
            prefixes[role] = encoders[facts.encoder]
        elif facts.encoder in optional and encoders:
            del prefixes[role]
    texts = {role: facts for role, facts in family.texts.items() if role in prefixes}
    return with_text_sight(replace(family, prefixes=prefixes, texts=texts), shapes)


def other_texts(prefix: str, shapes: Mapping[str, Shape]) -> str:
    """What sets a diffusion model among `shapes`, whose keys begin with `prefix`, apart by the texts that it reads;
    empty for nothing."""
    has_projection = f"{prefix}{_PROJECTION}" in shapes
    return " with a projection of another text encoder's states (Cosmos Predict 2.5)" if has_projection else ""


def with_text_sight(family: Family, shapes: Mapping[str, Shape], sight: TextSight = TextSight.BY_NAME) -> Family:
    """`family` with the part of its text encoder that sees images as a component of its own, where its models are
    shown images so and that part is among `shapes`: `sight` is how, where nobody says it and no tensor tells. A part
    that is not exactly one of Qwen 2.5 VL's, which they were trained with, is left out, and `unseeing` says why."""
    if family.name not in _TEXT_SEES or Role.TEXT_ENCODER not in family.prefixes:
        return family
    start = family.prefixes[Role.TEXT_ENCODER]
    found = next((p for p in (start + part for part in SEEING_PARTS) if any(key.startswith(p) for key in shapes)), None)
    if found is None:
        return family
    if why := _why_unseeing({key: shape for key, shape in shapes.items() if key.startswith(start)}, start, found):
        return replace(family, sampling=replace(family.sampling, unseeing=why))
    if family.prefixes[Role.DIFFUSION_MODEL] + _NUMBERED_KEY in shapes:
        sight = TextSight.NUMBERED
    return replace(
        family,
        prefixes={**family.prefixes, Role.VISION_ENCODER: found},
        architectures={**family.architectures, Role.VISION_ENCODER: Architecture.TEXT_VISION},
        sampling=replace(family.sampling, reads=family.sampling.reads | {"reference"}, text_sight=sight),
    )


def _why_unseeing(text: Mapping[str, Shape], start: str, prefix: str) -> str:
    """Why the part of a `text` encoder whose keys begin with `prefix`, as those of the whole do with `start`, shows it
    no images; empty where it does."""
    own = {
        key.removeprefix(prefix): tuple(shape)
        for key, shape in text.items()
        if key.startswith(prefix) and is_weight(Role.VISION_ENCODER, key, prefix)
    }
    try:
        width = qwen_vision_config(own)["out_hidden_size"]
    except UnknownArchitecture as error:
        return str(error)
    table = next((shape for key, shape in text.items() if key.endswith(_WORDS)), None)
    if table is not None and table[1:] != (width,):
        return f"found states of width {width}, expected {' x '.join(map(str, table[1:]))}, which its words have"
    return ""


def _encoders(
    parts: Mapping[tuple[Kind, str], list[str]], shapes: Mapping[str, Shape], members: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """Which of `members` are among the parts of a file, and what the keys of each begin with.

    Files name them before their keys; where not, the tensors tell, which they do at the published sizes only.
    """
    for (kind, prefix), keys in parts.items():
        if kind is not Kind.TEXT_ENCODER:
            continue
        named = prefix.split(".")[1] if prefix.startswith(("text_encoders.", "text_encoder.")) else ""
        found = recognise_text_encoder({key.removeprefix(prefix): shapes[key] for key in keys})
        for name in (named, *stands_for(named), *(() if found is None else (found.name, *stands_for(found.name)))):
            if name in members:
                yield name, prefix
                break


def needs_negative(guidance: Guidance) -> bool:
    """Whether a model with this kind of guidance reads a negative prompt."""
    return guidance not in (Guidance.DISTILLED, Guidance.NONE)
