"""The transformer families, as values: text encoders and latents of each. Torch-free.

The components in a file are found by their own keys, so one row covers every way in which files combine them.
`pool.models.components.diffusion` builds and calls the diffusion models, `pool.models.text` assembles the text
conditioning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from modelpool.pool.families.definitions import defined_families
from modelpool.pool.families.detection.detect_diffusion_model import DiffusionFacts
from modelpool.pool.families.detection.file_facts import Kind
from modelpool.pool.families.detection.glm_layout import CODES, VISION, glm_vision_config
from modelpool.pool.families.detection.layouts.signature import Naming
from modelpool.pool.families.detection.parts import split
from modelpool.pool.families.detection.qwen_layout import qwen3_vision_config, qwen_vision_config
from modelpool.pool.families.detection.text_encoders import recognise_text_encoder, stands_for
from modelpool.pool.families.parts.family import (
    Family,
    TextVision,
    VisionPart,
)
from modelpool.pool.families.parts.latent_formats import LATENT_FORMATS
from modelpool.pool.families.parts.located_family import SEEING_PARTS, Architecture, LocatedFamily, is_weight
from modelpool.pool.families.text_readings import OPTIONAL_ENCODERS, ROW_OF
from modelpool.pool.families.unet_families import CASCADES
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.family_facts import TextFacts
from modelpool.pool.values.core.sampling_facts import ReferenceMode, SamplingFacts
from modelpool.pool.values.specs.spec import Role

#: roles of a model's text encoders, in the order of the members of its set
TEXT_ROLES = (Role.TEXT_ENCODER, Role.TEXT_ENCODER_2, Role.TEXT_ENCODER_3, Role.TEXT_ENCODER_4)
#: key prefixes of diffusion model, VAE and vision encoder in single files
_MODEL_PREFIX, _VAE_PREFIX, _VISION_PREFIX = "model.diffusion_model.", "vae.", "vision_encoder."
#: required inputs that requests cannot provide, except for families with an input image
_NOT_SAID = frozenset({"image"})
#: families with a text encoder that must see the input image: they accept one if the vision part is present
TEXT_VISION: Mapping[str, TextVision] = {
    family.name: family.text.vision for family in defined_families() if family.text.vision is not None
}
#: families with a part of the model's file that connects the text encoder to the model
_CONNECTED: Mapping[str, Family] = {
    family.name: family for family in defined_families() if family.text.connector is not None
}
#: tables of words in diffusion models that are their text encoders
_TABLES = {family.name: family.text.words for family in defined_families() if family.text.words}
#: name in its diffusion model of the second model of a family, which predicts without a text
UNCONDITIONAL: Mapping[str, str] = {
    family.name: family.build.unconditional for family in defined_families() if family.build.unconditional
}
#: readers of the metadata of files, by family
_METADATA_CONFIGS = {
    family.name: family.build.metadata_config
    for family in defined_families()
    if family.build.metadata_config is not None
}
#: end of the key of the text encoder's token embedding
_WORDS = "embed_tokens.weight"
#: projects the text states of Cosmos Predict 2.5, which has a different text encoder than 2
_PROJECTION = "crossattn_proj.0.weight"


def text_prefix(member: str) -> str:
    """Return the key prefix of the text encoder `member` in single files."""
    return f"text_encoders.{member}.transformer."


def usual_location(family: Family) -> LocatedFamily:
    """Return `family` with the key prefixes that single files usually have, and all of its text encoders."""
    sampling = _completed(family)
    members = dict(zip(TEXT_ROLES, (reading.encoder for reading in family.text.readings), strict=False))
    connectors = [role for role, reading in zip(TEXT_ROLES, family.text.readings, strict=False) if reading.connects]
    connector = family.text.connector
    latent = LATENT_FORMATS[family.latent]
    words = family.text.words.get(Naming.PUBLISHED)
    detect = family.detect
    return LocatedFamily(
        name=family.name,
        title=family.title,
        prefixes={
            **{role: text_prefix(member) for role, member in members.items()},
            **({} if connector is None else dict.fromkeys(connectors, connector.prefix)),
            **({} if words is None else {Role.TEXT_ENCODER: _MODEL_PREFIX + words}),
            **({} if sampling.vision_use is None else {Role.VISION_ENCODER: _VISION_PREFIX}),
            Role.DIFFUSION_MODEL: _MODEL_PREFIX,
            Role.VAE: _VAE_PREFIX,
        },
        architectures={
            **dict.fromkeys(members, Architecture.TEXT_MODEL),
            **dict.fromkeys(connectors, Architecture.TEXT_CONNECTOR),
            **({} if sampling.vision_use is None else {Role.VISION_ENCODER: Architecture.VISION_MODEL}),
            Role.DIFFUSION_MODEL: Architecture.AUDIO_TRANSFORMER
            if family.build.seconds_model
            else Architecture.DIFFUSION_TRANSFORMER,
            Role.VAE: Architecture.VAE,
        },
        texts={role: TextFacts(encoder=member) for role, member in members.items()},
        native_pixels=family.size[0],
        native_sides=family.size,
        scaling_factor=latent.scale,
        latent_shift=latent.mean[0] if len(latent.mean) == 1 and family.shifts_latent else 0.0,
        shifts_latent=family.shifts_latent,
        latent_means=latent.mean if len(latent.mean) > 1 else (),
        latent_deviations=latent.std if len(latent.mean) > 1 else (),
        sampling=sampling,
        text_set=family.name,
        extra_prefixes={
            **({Role.DIFFUSION_MODEL: detect.extra_prefixes} if detect.extra_prefixes else {}),
            **({Role.VAE: detect.sound_prefixes} if detect.sound_prefixes else {}),
            **dict.fromkeys(connectors, _inside(family, _MODEL_PREFIX)),
        },
        latent_format=family.latent,
        dtypes=family.build.dtypes,
        relative=family.name,
        inside=frozenset() if words is None else frozenset({Role.TEXT_ENCODER}),
        companion=family.build.companion,
    )


def _completed(family: Family) -> SamplingFacts:
    """Return the sampling facts with what the name and the texts of `family` imply."""
    return replace(
        family.sampling,
        model=family.name,
        writes_tokens=any(reading.writes_tokens for reading in family.text.readings),
        words_negative=any(reading.negative_template for reading in family.text.readings),
    )


def _inside(family: Family, prefix: str) -> tuple[str, ...]:
    """Return the key prefixes of the connector in a file with `prefix` for the diffusion model."""
    return () if family.text.connector is None else tuple(prefix + part for part in family.text.connector.inside)


def _is_said(family: Family) -> bool:
    """Return whether requests can provide all required inputs."""
    sampling = family.sampling
    reads_image = sampling.image_concat is not None or (
        sampling.video is not None and sampling.video.begins is not None
    )
    not_said = _NOT_SAID - {"image"} if reads_image else _NOT_SAID
    return not not_said & family.required_inputs


#: by the name that recognition returns
TRANSFORMERS: Mapping[str, LocatedFamily] = MappingProxyType(
    {family.name: usual_location(family) for family in defined_families() if _is_said(family)} | dict(CASCADES)
)


#: distilled models that only the index of a folder identifies, by family
DISTILLED: Mapping[str, LocatedFamily] = MappingProxyType(
    {
        family.name: usual_location(replace(family, sampling=family.distilled))
        for family in defined_families()
        if family.distilled is not None
    }
)


def located(family: LocatedFamily, found: DiffusionFacts, shapes: Mapping[str, Shape]) -> LocatedFamily:
    """Return `family` with the prefixes of its components among `shapes`; its diffusion model was `found`.

    Missing components keep their default prefix, except optional text encoders, which are removed.
    """
    others = {key: shape for key, shape in shapes.items() if not found.prefix or not key.startswith(found.prefix)}
    prefixes = {**family.prefixes, Role.DIFFUSION_MODEL: found.prefix}
    parts = split(others)
    for kind, prefix in parts:
        if kind is Kind.VAE and Role.VAE in prefixes and prefix not in family.extra_prefixes.get(Role.VAE, ()):
            prefixes[Role.VAE] = prefix
        if kind is Kind.VISION_ENCODER and Role.VISION_ENCODER in prefixes:
            prefixes[Role.VISION_ENCODER] = prefix
    encoders = dict(_encoders(parts, shapes, tuple(facts.encoder for facts in family.texts.values())))
    optional = OPTIONAL_ENCODERS.get(ROW_OF.get(family.text_set, ""), frozenset())
    for role, facts in family.texts.items():
        if facts.encoder in encoders:
            prefixes[role] = encoders[facts.encoder]
        elif facts.encoder in optional and encoders:
            del prefixes[role]
    if family.name in _TABLES:
        prefixes[Role.TEXT_ENCODER] = found.prefix + _TABLES[family.name][found.naming]
    texts = {role: facts for role, facts in family.texts.items() if role in prefixes}
    extra = dict(family.extra_prefixes)
    if family.name in _CONNECTED:
        inside = _inside(_CONNECTED[family.name], found.prefix)
        extra |= {role: inside for role, kind in family.architectures.items() if kind is Architecture.TEXT_CONNECTOR}
    placed = replace(family, prefixes=prefixes, texts=texts, extra_prefixes=extra)
    return with_unconditional(with_text_vision(placed, shapes), shapes)


def metadata_config(family: LocatedFamily, metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the arguments of the class of the diffusion model that the `metadata` of a file states and no shape tells;
    empty for none."""
    read = _METADATA_CONFIGS.get(family.name)
    return {} if read is None else read(metadata)


def with_unconditional(family: LocatedFamily, shapes: Mapping[str, Shape]) -> LocatedFamily:
    """Return `family`, guided by the second model of its diffusion model if `shapes` has it."""
    if family.name not in UNCONDITIONAL:
        return family
    start = f"{family.prefixes[Role.DIFFUSION_MODEL]}{UNCONDITIONAL[family.name]}."
    if not any(key.startswith(start) for key in shapes):
        return family
    return replace(family, sampling=replace(family.sampling, reads=family.sampling.reads | {"unconditional"}))


def other_texts(prefix: str, shapes: Mapping[str, Shape]) -> str:
    """Return a note if the diffusion model among `shapes` under `prefix` needs a different text encoder; empty
    otherwise."""
    has_projection = f"{prefix}{_PROJECTION}" in shapes
    return " with a projection of another text encoder's states (Cosmos Predict 2.5)" if has_projection else ""


def with_text_vision(
    family: LocatedFamily, shapes: Mapping[str, Shape], vision_use: ReferenceMode = ReferenceMode.BY_NAME
) -> LocatedFamily:
    """Return `family` with the vision part of its text encoder as a component, if the family uses one and `shapes` has
    it.

    `vision_use` is how reference images are presented if neither the user nor a tensor decides, unless the family has
    one way. A part other than Qwen 2.5 VL's or 3 VL's, which the models were trained with, is left out;
    `why_no_vision` states why.
    """
    vision = TEXT_VISION.get(family.name)
    if vision is None or vision.role not in family.prefixes:
        return family
    start = family.prefixes[vision.role]
    found = next((p for p in (start + part for part in SEEING_PARTS) if any(key.startswith(p) for key in shapes)), None)
    if found is None:
        return family
    text = {key: shape for key, shape in shapes.items() if key.startswith(start)}
    if why := _why_unseeing(text, found, vision.part):
        return replace(family, sampling=replace(family.sampling, why_no_vision=why))
    if len(vision.pipelines) == 1:
        (vision_use,) = vision.pipelines
    if vision.numbered_key and family.prefixes[Role.DIFFUSION_MODEL] + vision.numbered_key in shapes:
        vision_use = ReferenceMode.NUMBERED
    codes = tuple(found.removesuffix(VISION) + CODES for _ in range(vision.part is VisionPart.GLM_IMAGE))
    return replace(
        family,
        prefixes={**family.prefixes, Role.VISION_ENCODER: found},
        extra_prefixes={**family.extra_prefixes, **({Role.VISION_ENCODER: codes} if codes else {})},
        architectures={**family.architectures, Role.VISION_ENCODER: Architecture.TEXT_VISION},
        sampling=replace(family.sampling, reads=family.sampling.reads | {"reference"}, reference_mode=vision_use),
    )


def _why_unseeing(text: Mapping[str, Shape], prefix: str, part: VisionPart) -> str:
    """Return why the vision part under `prefix` of a `text` encoder cannot be used; empty if it can."""
    if part is VisionPart.GLM_IMAGE:
        return _why_without_tokens(text, prefix.removesuffix(VISION))
    own = {
        key.removeprefix(prefix): tuple(shape)
        for key, shape in text.items()
        if key.startswith(prefix) and is_weight(Role.VISION_ENCODER, key, prefix)
    }
    try:
        width = (qwen3_vision_config if part is VisionPart.QWEN_3 else qwen_vision_config)(own)["out_hidden_size"]
    except UnknownArchitecture as error:
        return str(error)
    table = next((shape for key, shape in text.items() if key.endswith(_WORDS)), None)
    if table is not None and table[1:] != (width,):
        return f"found states of width {width}, expected {' x '.join(map(str, table[1:]))} like its token embedding"
    return ""


def _why_without_tokens(text: Mapping[str, Shape], level: str) -> str:
    """Return why the part of GLM-Image under `level` that turns images into tokens cannot be used; empty if it can."""
    parts = (level + VISION, level + CODES)
    try:
        glm_vision_config(
            {key.removeprefix(level): tuple(shape) for key, shape in text.items() if key.startswith(parts)}
        )
    except UnknownArchitecture as error:
        return str(error)
    return ""


def _encoders(
    parts: Mapping[tuple[Kind, str], list[str]], shapes: Mapping[str, Shape], members: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """Yield each of `members` among the parts of a file, with its key prefix.

    Files name encoders in the prefix; otherwise the tensors tell, at the published sizes only.
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
