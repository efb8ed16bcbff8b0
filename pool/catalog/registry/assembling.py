"""Assembles models from separate registry files: writes their descriptions, and suggests files for missing components.
Reads headers; writes one small file."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from modelpool.pool.catalog.registry.file_purpose import MODELS, FileKind
from modelpool.pool.catalog.registry.folder_scan import FileForm
from modelpool.pool.catalog.registry.registry import Registry
from modelpool.pool.catalog.registry.weight_file_names import folded
from modelpool.pool.families.detection.file_facts import ComponentFacts
from modelpool.pool.families.detection.file_facts import Kind as ComponentKind
from modelpool.pool.files.formats.atomic_write import atomic_file, expect_free
from modelpool.pool.files.formats.containment import plain_name
from modelpool.pool.files.formats.model_description import ENDING, description_of
from modelpool.pool.files.formats.weights_file import read_part
from modelpool.pool.models.loading.assembled_checkpoint import MissingComponent, assembly_problems
from modelpool.pool.models.loading.describe import CheckpointInfo, describe
from modelpool.pool.models.loading.recognition_input import recognise_file
from modelpool.pool.values.core.assembly import Assembly
from modelpool.pool.values.core.errors import MissingParts, UserError

#: maximum number of headers read to find matching files, and of matching files listed
_MAX_READ, _MAX_HINTS = 200, 5
#: kinds of files that can provide each part, and its title: complete checkpoints can provide all of them
_KINDS: dict[str, tuple[frozenset[FileKind], str]] = {
    "checkpoint": (frozenset({FileKind.CHECKPOINT}), "checkpoint"),
    "diffusion_model": (MODELS, "diffusion model"),
    "low_noise": (MODELS, "diffusion model"),
    "unconditional": (MODELS, "diffusion model"),
    "vae": (frozenset({FileKind.VAE, FileKind.CHECKPOINT}), "VAE"),
    "text_encoders": (frozenset({FileKind.TEXT_ENCODER, FileKind.CHECKPOINT}), "text encoder"),
    "vision_encoder": (frozenset({FileKind.CLIP_VISION, FileKind.CHECKPOINT}), "vision encoder"),
}
_KIND_OF: dict[ComponentKind, FileKind] = {
    ComponentKind.VAE: FileKind.VAE,
    ComponentKind.TEXT_ENCODER: FileKind.TEXT_ENCODER,
    ComponentKind.VISION_ENCODER: FileKind.CLIP_VISION,
}


@dataclass(frozen=True, slots=True)
class SelectedFiles:
    """Files as a user names them: by path, or by registry name. "" if not specified."""

    checkpoint: str = ""
    diffusion_model: str = ""
    vae: str = ""
    text_encoders: tuple[str, ...] = ()
    vision_encoder: str = ""
    low_noise: str = ""
    unconditional: str = ""


@dataclass(frozen=True, slots=True)
class AssembledModel:
    """An assembled model.

    path      its description
    info      the facts of the model
    is_known  whether it is in a folder that the registry scans
    """

    path: Path
    info: CheckpointInfo
    is_known: bool


def assemble(
    registry: Registry,
    name: str,
    chosen: SelectedFiles,
    folder: Path | None = None,
    *,
    overwrite: bool = False,
    allow_pickle: bool = False,
) -> AssembledModel:
    """Write the description of the model `name`, made of the `chosen` files, to `folder`, which must contain them; by
    default to the model folder that contains them all.

    Raises MissingParts naming the missing parts and the known files that would fit, UnknownName for an unknown file,
    UnsafeFile for a file outside the folder, OutputFailed if the path exists.
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
        _path(registry, "unconditional", chosen.unconditional),
    )
    expect_complete(registry, found, allow_pickle)
    place = Path(os.path.abspath(folder)) if folder is not None else _folder_containing(registry, found.files)
    path = place / f"{name}{ENDING}"
    description = description_of(found, place)
    info = describe(found, allow_pickle=allow_pickle)
    expect_free(path, overwrite)
    with atomic_file(path, overwrite=overwrite) as file:
        file.write(json.dumps(description, indent=2).encode() + b"\n")
    is_known = any(path.is_relative_to(known.path) for known in registry.locations() if known.path.is_dir())
    return AssembledModel(path, info, is_known)


def _expect_no_alias(registry: Registry, name: str) -> None:
    """Raise UserError if `name` is an alias: aliases precede names of files, so the model would not be found."""
    for alias in registry.aliases():
        if folded(alias.name) == folded(name):
            raise UserError(
                f"the name of a model: {alias.name!r} is already an alias of {alias.target}; expected another name, "
                f"or run `modelpool models remove {alias.name}` first"
            )


def expect_complete(registry: Registry, assembly: Assembly, allow_pickle: bool) -> None:
    """Raise MissingParts, listing the known files that would fit, if `assembly` does not make a model."""
    short = assembly_problems(assembly, lambda part: read_part(part, allow_pickle=allow_pickle))
    if not short.text:
        return
    hints = [_hint(component, matching_files(registry, component, allow_pickle)) for component in short.missing]
    raise MissingParts("; ".join([f"{assembly.path}: {short.text}", *hints]))


def matching_files(registry: Registry, component: MissingComponent, allow_pickle: bool) -> tuple[Path, ...]:
    """Return the known files that contain the missing component, those that contain nothing else first."""
    found = sorted(_with(registry, component, allow_pickle))
    return tuple(path for _, path in found)


def _with(registry: Registry, component: MissingComponent, allow_pickle: bool) -> Iterator[tuple[bool, Path]]:
    wanted = {_KIND_OF[component.kind], FileKind.CHECKPOINT}
    files = [file for file in registry.scan().files if file.form in (FileForm.FILE, FileForm.SHARDED)]
    likely = [file for file in files if file.folder_kind in {*wanted, None}][:_MAX_READ]
    for file in likely:
        kind = registry.kind(file)
        if kind not in wanted or registry.facts(file).problem:
            continue
        try:
            components = recognise_file(file.path, allow_pickle=allow_pickle).components
        except UserError:
            continue
        if any(part.kind is component.kind and component.fits(part.name, _latents(part)) for part in components):
            yield kind is FileKind.CHECKPOINT, file.path


def _latents(part: ComponentFacts) -> Sequence[str]:
    formats = part.config.get("latent_formats")
    return [str(each) for each in formats] if isinstance(formats, tuple) else []


def _hint(component: MissingComponent, paths: Sequence[Path]) -> str:
    named = {ComponentKind.TEXT_ENCODER: "text encoder", ComponentKind.VISION_ENCODER: "vision encoder"}
    what = f"{named[component.kind]} {' or '.join(component.names)}" if component.kind in named else "VAE"
    if not paths:
        return f"no known file has such a {what}"
    more = f" and {len(paths) - _MAX_HINTS} more" if len(paths) > _MAX_HINTS else ""
    return f"a {what} that would fit: {', '.join(map(str, paths[:_MAX_HINTS]))}{more}"


def _path(registry: Registry, key: str, name: str) -> str:
    """Return the path of the file that a user calls `name`."""
    if not name:
        return ""
    kinds, what = _KINDS[key]
    return str(registry.find(os.path.expanduser(name), kinds, what).path)


def _folder_containing(registry: Registry, files: Collection[str]) -> Path:
    """Return the innermost model folder that contains all `files`. Raises UserError if there is none."""
    locations = [
        place.path for place in registry.locations() if place.kind is not FileKind.LORA and place.path.is_dir()
    ]
    around = [place for place in locations if all(Path(file).is_relative_to(place) for file in files)]
    if not around:
        common = os.path.commonpath([os.path.dirname(file) for file in files])
        raise UserError(
            f"no model folder contains all files; expected a folder that does (--folder {common}), or a table "
            f"[models.NAME] in the configuration, which may name any files"
        )
    return max(around, key=lambda place: len(place.parts))
