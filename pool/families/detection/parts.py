"""Find the components inside one file, and their sizes. Torch-free and pure.

Knows the prefixes of VAEs, text encoders and vision encoders in single files; each component's own recogniser
identifies it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from modelpool.pool.families.detection.detect_diffusion_model import DiffusionFacts, recognise_diffusion
from modelpool.pool.families.detection.file_facts import ComponentFacts, Contents, Kind
from modelpool.pool.families.detection.layouts.shape_sizes import Config
from modelpool.pool.families.detection.text_encoders import TextEncoderFacts, recognise_text_encoder
from modelpool.pool.families.detection.vaes import VaeFacts, recognise_vae
from modelpool.pool.families.detection.vision import recognise_vision
from modelpool.pool.files.formats.safetensors_file import Shape

#: key prefix of a low-noise expert. No published file has both experts
LOW_NOISE_PREFIX = "low_noise_model."
#: key prefixes of components other than the diffusion model; the first match wins
_BEGINNINGS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    (
        Kind.VISION_ENCODER,
        re.compile(
            r"cond_stage_model\.model\.visual\.|embedder\.model\.visual\.|clip_l_vision\.|vision_encoder\.|"
            r"conditioner\.embedders\.\d+\.open_clip\.model\.visual\.|conditioner\.main_image_encoder\.model\."
        ),
    ),
    (
        Kind.VAE,
        re.compile(r"first_stage_model\.|vae\.|audio_vae\.|pretransform\.model\.|conditioner\.embedders\.1\.encoder\."),
    ),
    (Kind.VOCODER, re.compile(r"vocoder\.")),
    (
        Kind.TEXT_ENCODER,
        re.compile(
            r"cond_stage_model\.(?:transformer|model)\.|conditioner\.embedders\.\d+\.(?:transformer|model)\.|"
            r"text_encoders\.[^.]+\.(?:transformer\.)?|text_encoder\.(?:clip_[a-z]\.)?|"
            r"conditioner\.conditioners\.prompt\.model\."
        ),
    ),
)

#: the order in which components are listed
_ORDER = (Kind.TEXT_ENCODER, Kind.VISION_ENCODER, Kind.VAE, Kind.VOCODER)

_NOT_KNOWN: Mapping[Kind, str] = {
    Kind.VAE: "an unknown VAE",
    Kind.TEXT_ENCODER: "an unknown text encoder",
    Kind.VISION_ENCODER: "an unknown vision encoder",
    Kind.VOCODER: "a vocoder",
}


def diffusion_component(facts: DiffusionFacts, contents: Contents) -> ComponentFacts:
    """Return the diffusion model of a file, with its sizes."""
    own = [key for key in contents.shapes if key.startswith(facts.prefix)]
    if not facts.prefix:
        # all keys that no other component has
        others = {key for found in split(contents.shapes).values() for key in found}
        own = [key for key in own if key not in others and not key.startswith(LOW_NOISE_PREFIX)]
    measured = component(Kind.DIFFUSION_MODEL, facts.prefix, own, contents)
    return dataclasses.replace(
        measured,
        name=facts.name,
        title=facts.title,
        naming=facts.naming.value,
        config=facts.config,
        latent=facts.latent,
        comfyui=facts.comfyui,
        runs=facts.runs,
    )


def split_second(shapes: Mapping[str, Shape]) -> tuple[Mapping[str, Shape], Mapping[str, Shape]]:
    """Split `shapes` of a file into all but a low-noise expert, and that expert without prefix."""
    start = LOW_NOISE_PREFIX
    second = {key.removeprefix(start): shape for key, shape in shapes.items() if key.startswith(start)}
    return {key: shape for key, shape in shapes.items() if not key.startswith(start)} if second else shapes, second


def second_model(contents: Contents) -> Iterator[ComponentFacts]:
    """Yield the low-noise expert of a file with two experts."""
    _, bare = split_second(contents.shapes)
    found = recognise_diffusion(bare) if bare else None
    if found is not None:
        yield diffusion_component(dataclasses.replace(found, prefix=LOW_NOISE_PREFIX), contents)


def other_components(contents: Contents, taken: str | None) -> Iterator[ComponentFacts]:
    """Yield every component except the diffusion model, which has prefix `taken`; None if there is none.

    A file with a single component may have no prefix.
    """
    shapes = {key: shape for key, shape in contents.shapes.items() if not (taken and key.startswith(taken))}
    found = split(shapes)
    for (kind, prefix), keys in sorted(found.items(), key=lambda item: _ORDER.index(item[0][0])):
        yield recognised(kind, prefix, keys, contents)
    if not found and taken is None:
        for kind in (Kind.VAE, Kind.TEXT_ENCODER, Kind.VISION_ENCODER):
            alone = recognised(kind, "", list(shapes), contents)
            if alone.name:
                yield alone
                return


def split(keys: Iterable[str]) -> dict[tuple[Kind, str], list[str]]:
    """Return the keys of components with prefixes, by kind and prefix."""
    found: dict[tuple[Kind, str], list[str]] = {}
    for key in keys:
        for kind, beginning in _BEGINNINGS:
            match = beginning.match(key)
            if match:
                found.setdefault((kind, match[0]), []).append(key)
                break
    return found


def recognised(kind: Kind, prefix: str, keys: list[str], contents: Contents) -> ComponentFacts:
    """Return the component of `kind` with `keys`; without a name if its recogniser does not know it."""
    bare = {key.removeprefix(prefix): contents.shapes[key] for key in keys}
    measured = component(kind, prefix, keys, contents)
    if kind is Kind.VAE:
        dtypes = {key.removeprefix(prefix): contents.stored[key].kind for key in keys if key in contents.stored}
        vae = recognise_vae(bare, dtypes)
        return _with_vae(measured, vae) if vae else measured
    if kind is Kind.TEXT_ENCODER:
        text = recognise_text_encoder(bare)
        return _with_text_encoder(measured, text) if text else measured
    if kind is Kind.VISION_ENCODER:
        named = recognise_vision(bare)
        return dataclasses.replace(measured, name=named[0], title=named[1]) if named else measured
    return measured


def component(kind: Kind, prefix: str, keys: list[str], contents: Contents) -> ComponentFacts:
    """Return the sizes of the component with `keys`, without identifying it."""
    by_kind: Counter[str] = Counter()
    for key in keys:
        if key in contents.stored:
            by_kind[contents.stored[key].kind] += contents.stored[key].storage_bytes
    return ComponentFacts(
        kind=kind,
        name="",
        title=_NOT_KNOWN.get(kind, ""),
        prefix=prefix,
        naming="",
        tensors=len(keys),
        parameters=parameters(contents.shapes, keys),
        storage_bytes=by_kind.total(),
        dtypes=dict(by_kind.most_common()),
        config={},
    )


def parameters(shapes: Mapping[str, Shape], keys: Iterable[str]) -> int:
    """Return the number of values in the tensors `keys`."""
    return sum(math.prod(shapes[key]) for key in keys)


def _with_vae(measured: ComponentFacts, facts: VaeFacts) -> ComponentFacts:
    config: Config = {
        "latent_channels": facts.latent_channels,
        "dimensions": facts.dimensions,
        "pixel_channels": facts.pixel_channels,
        "encode_ratio": facts.encode_ratio,
        "decode_ratio": facts.decode_ratio,
        "temporal_ratio": facts.temporal_ratio,
        "has_encoder": facts.has_encoder,
        "has_decoder": facts.has_decoder,
        "latent_formats": facts.latent_formats,
    }
    return dataclasses.replace(measured, name=facts.name, title=facts.title, naming=facts.layout, config=config)


def _with_text_encoder(measured: ComponentFacts, facts: TextEncoderFacts) -> ComponentFacts:
    config: Config = {
        "architecture": facts.architecture,
        "width": facts.width,
        "layers": facts.layers,
        "vocabulary": facts.vocabulary,
    }
    return dataclasses.replace(measured, name=facts.name, title=facts.title, naming=facts.layout, config=config)
