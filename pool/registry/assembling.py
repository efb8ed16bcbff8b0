"""Models out of separate files that the registry knows: writing their descriptions, and what would fit where something
is missing. Reads headers; writes one small file."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from modelpool.pool.core.assembly import Assembly
from modelpool.pool.core.errors import MissingParts, UserError
from modelpool.pool.detection.facts import ComponentFacts
from modelpool.pool.detection.facts import Kind as Part
from modelpool.pool.formats.atomic_write import expect_free, whole_file
from modelpool.pool.formats.containment import plain_name
from modelpool.pool.formats.model_description import ENDING, described
from modelpool.pool.formats.weights_file import read_part
from modelpool.pool.loading.assembled_checkpoint import Lack, shortcomings
from modelpool.pool.loading.describe import CheckpointInfo, describe
from modelpool.pool.loading.recognition_input import recognise_file
from modelpool.pool.registry.folders import Form
from modelpool.pool.registry.kinds import MODELS, Kind
from modelpool.pool.registry.names import folded
from modelpool.pool.registry.registry import Registry

#: files whose headers are read to find what would fit, and how many of those that do are told
_MOST_READ, _MOST_TOLD = 200, 5
#: what a file of the registry may be that a part is taken of: whole checkpoints have all of them
_KINDS: dict[str, tuple[frozenset[Kind], str]] = {
    "checkpoint": (frozenset({Kind.CHECKPOINT}), "checkpoint"),
    "diffusion_model": (MODELS, "diffusion model"),
    "low_noise": (MODELS, "diffusion model"),
    "vae": (frozenset({Kind.VAE, Kind.CHECKPOINT}), "VAE"),
    "text_encoders": (frozenset({Kind.TEXT_ENCODER, Kind.CHECKPOINT}), "text encoder"),
    "vision_encoder": (frozenset({Kind.CLIP_VISION, Kind.CHECKPOINT}), "vision encoder"),
}
_KIND_OF: dict[Part, Kind] = {
    Part.VAE: Kind.VAE,
    Part.TEXT_ENCODER: Kind.TEXT_ENCODER,
    Part.VISION_ENCODER: Kind.CLIP_VISION,
}


@dataclass(frozen=True, slots=True)
class Chosen:
    """Files as a person names them: by path, or as the registry does. "" is one that is not given."""

    checkpoint: str = ""
    diffusion_model: str = ""
    vae: str = ""
    text_encoders: tuple[str, ...] = ()
    vision_encoder: str = ""
    low_noise: str = ""


@dataclass(frozen=True, slots=True)
class Assembled:
    """A model that was put together.

    path      its description
    info      what it is
    is_known  whether it lies in a folder that the registry looks through
    """

    path: Path
    info: CheckpointInfo
    is_known: bool


def assemble(
    registry: Registry,
    name: str,
    chosen: Chosen,
    folder: Path | None = None,
    *,
    overwrite: bool = False,
    allow_pickle: bool = False,
) -> Assembled:
    """Write the description of the model `name` that the `chosen` files make into `folder`, which they lie in; without
    one into the folder of models that they all lie in.

    Raises MissingParts saying what is missing and which of the known files would fit, UnknownName for a file that is
    not known, UnsafeFile for one that does not lie there, OutputFailed for a place that is taken.
    """
    plain_name(name, "the name of a model")
    _expect_no_alias(registry, name)
    found = Assembly(
        name,
        _path(registry, "checkpoint", chosen.checkpoint),
        _path(registry, "diffusion_model", chosen.diffusion_model),
        _path(registry, "vae", chosen.vae),
        tuple(_path(registry, "text_encoders", encoder) for encoder in chosen.text_encoders),
        _path(registry, "vision_encoder", chosen.vision_encoder),
        _path(registry, "low_noise", chosen.low_noise),
    )
    expect_whole(registry, found, allow_pickle)
    place = Path(os.path.abspath(folder)) if folder is not None else _folder_around(registry, found.files)
    path = place / f"{name}{ENDING}"
    said = described(found, place)
    info = describe(found, allow_pickle=allow_pickle)
    expect_free(path, overwrite)
    with whole_file(path, overwrite=overwrite) as file:
        file.write(json.dumps(said, indent=2).encode() + b"\n")
    is_known = any(path.is_relative_to(known.path) for known in registry.places() if known.path.is_dir())
    return Assembled(path, info, is_known)


def _expect_no_alias(registry: Registry, name: str) -> None:
    """Raise UserError where `name` is an alias, which goes before the names of files: the model would not be found."""
    for alias in registry.aliases():
        if folded(alias.name) == folded(name):
            raise UserError(
                f"the name of a model: {alias.name!r} is an alias already, of {alias.target}; expected another name, "
                f"or `modelpool models remove {alias.name}` before"
            )


def expect_whole(registry: Registry, assembly: Assembly, allow_pickle: bool) -> None:
    """Raise MissingParts, with the known files that would fit, when `assembly` does not make a model."""
    short = shortcomings(assembly, lambda part: read_part(part, allow_pickle=allow_pickle))
    if not short.text:
        return
    hints = [_hint(lack, fitting(registry, lack, allow_pickle)) for lack in short.lacks]
    raise MissingParts("; ".join([f"{assembly.path}: {short.text}", *hints]))


def fitting(registry: Registry, lack: Lack, allow_pickle: bool) -> tuple[Path, ...]:
    """The known files that have what is missing, those that are nothing else first."""
    found = sorted(_with(registry, lack, allow_pickle))
    return tuple(path for _, path in found)


def _with(registry: Registry, lack: Lack, allow_pickle: bool) -> Iterator[tuple[bool, Path]]:
    wanted = {_KIND_OF[lack.kind], Kind.CHECKPOINT}
    files = [file for file in registry.look().files if file.form in (Form.FILE, Form.SHARDED)]
    likely = [file for file in files if file.folder_kind in {*wanted, None}][:_MOST_READ]
    for file in likely:
        kind = registry.kind(file)
        if kind not in wanted or registry.facts(file).problem:
            continue
        try:
            components = recognise_file(file.path, allow_pickle=allow_pickle).components
        except UserError:
            continue
        if any(part.kind is lack.kind and lack.fits(part.name, _latents(part)) for part in components):
            yield kind is Kind.CHECKPOINT, file.path


def _latents(part: ComponentFacts) -> Sequence[str]:
    formats = part.config.get("latent_formats")
    return [str(each) for each in formats] if isinstance(formats, tuple) else []


def _hint(lack: Lack, paths: Sequence[Path]) -> str:
    named = {Part.TEXT_ENCODER: "text encoder", Part.VISION_ENCODER: "vision encoder"}
    what = f"{named[lack.kind]} {' or '.join(lack.names)}" if lack.kind in named else "VAE"
    if not paths:
        return f"no known file has such a {what}"
    more = f" and {len(paths) - _MOST_TOLD} more" if len(paths) > _MOST_TOLD else ""
    return f"a {what} that would fit: {', '.join(map(str, paths[:_MOST_TOLD]))}{more}"


def _path(registry: Registry, key: str, name: str) -> str:
    """The file that a person calls `name`."""
    if not name:
        return ""
    kinds, what = _KINDS[key]
    return str(registry.find(os.path.expanduser(name), kinds, what).path)


def _folder_around(registry: Registry, files: Collection[str]) -> Path:
    """The innermost folder of models that all `files` lie in. Raises UserError where there is none."""
    places = [place.path for place in registry.places() if place.kind is not Kind.LORA and place.path.is_dir()]
    around = [place for place in places if all(Path(file).is_relative_to(place) for file in files)]
    if not around:
        common = os.path.commonpath([os.path.dirname(file) for file in files])
        raise UserError(
            f"the files lie in no one folder of models; expected a folder that all of them lie in (--folder {common}), "
            f"or a table [models.NAME] in the configuration, which may name any files"
        )
    return max(around, key=lambda place: len(place.parts))
