"""Recognise a file of weights from its header: one pure function. Torch-free.

Combines the other modules of this package. Reads nothing (`pool.models.loading.recognition_input` does), and does not
know what this version runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from modelpool.pool.families.detection.detect_diffusion_model import recognise_diffusion
from modelpool.pool.families.detection.file_facts import ComponentFacts, Contents, FileFacts, Kind
from modelpool.pool.families.detection.file_kinds import FileKind
from modelpool.pool.families.detection.other_files import folder_part, other_file
from modelpool.pool.families.detection.parts import diffusion_component, other_components, second_model, split_second
from modelpool.pool.families.detection.prediction import prediction_hints
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.values.core.errors import UnknownArchitecture

#: beginnings of all names of a file, which trainers and compilers of models leave there
_WRAPPERS = (
    *("module.", "_orig_mod.", "state_dict.", "ema.", "ema_model.", "model_ema.", "shadow_params.", "controlnet."),
    *("transformer.", "model.", "unet.", "student.", "generator_ema.", "generator."),
)
#: a list of blocks with a number of at most three digits, at the beginning of a name
_NUMBERED = re.compile(r"((?:[a-zA-Z_]+\.){1,4})(\d{1,3})\.")


def recognise_contents(contents: Contents) -> FileFacts:
    """Return the facts of a file with `contents`: its components, or its other content.

    Raises UnknownArchitecture for a diffusion model with known keys and impossible shapes.
    """
    shapes = contents.shapes
    if (other := other_file(shapes)) is not None:
        kind = Kind.LORA if other.kind is FileKind.LORA else Kind.OTHER
        return _without_components(kind, other.title, contents, runs=other.runs)
    first, _ = split_second(shapes)
    found = recognise_diffusion(first)
    models = (diffusion_component(found, contents), *second_model(contents)) if found else ()
    components = (*models, *other_components(contents, found.prefix if found else None))
    if not components:
        if (part := folder_part(shapes) or _wrapped(contents) or _part_of_several(shapes)) is not None:
            return _without_components(Kind.OTHER, part, contents, runs=False)
        title = "the file holds no tensors" if not shapes else "unknown content"
        return _without_components(Kind.UNKNOWN, title, contents, runs=False)
    return FileFacts(
        kind=_kind(components),
        title=components[0].title,
        components=components,
        other_tensors=len(shapes) - sum(each.tensors for each in components),
        other_bytes=_bytes(contents) - sum(each.storage_bytes for each in components),
        prediction=prediction_hints(shapes, contents.metadata),
        metadata=contents.metadata,
    )


def what_is(shapes: Mapping[str, Shape]) -> str:
    """Return what a file with tensors of `shapes` is, with an article, for messages; empty if nothing is known."""
    try:
        facts = recognise_contents(Contents({key: tuple(shape) for key, shape in shapes.items()}))
    except UnknownArchitecture as error:
        return f"a damaged file: {error}"
    if facts.kind is Kind.UNKNOWN:
        return ""
    if not facts.components:
        return facts.title
    kind = facts.kind.value
    return f"{'parts' if facts.kind is Kind.PARTS else f'a {kind}'} of {facts.title}" if kind else facts.title


def mistaken(shapes: Mapping[str, Shape], expected: str, unknown: str) -> str:
    """Return the message that a file with tensors of `shapes` is not what was `expected`: what it is, or `unknown` if
    nothing is known of it."""
    found = what_is(shapes)
    return f"this is {found}, expected {expected}" if found else unknown


def _wrapped(contents: Contents) -> str | None:
    """Describe the content of a wrapper that trainers leave in the names; None without known content."""
    shared = (each for each in _WRAPPERS if all(key.startswith(each) for key in contents.shapes))
    prefix = next(shared, None) if contents.shapes else None
    if prefix is None:
        return None
    shapes = {key.removeprefix(prefix): shape for key, shape in contents.shapes.items()}
    inside = what_is(shapes)
    return f"{inside}, in a wrapper of a trainer: all names begin with {prefix!r}" if inside else None


def _part_of_several(shapes: Mapping[str, Shape]) -> str | None:
    """Return which blocks of a model a file has, if it has numbered blocks and lacks the first; None if it does not."""
    numbers: dict[str, set[int]] = {}
    for key in shapes:
        if (found := _NUMBERED.match(key)) is not None:
            numbers.setdefault(found[1], set()).add(int(found[2]))
    lists = [(len(each), name, each) for name, each in numbers.items()]
    if not lists:
        return None
    _, name, blocks = max(lists)
    if min(blocks) == 0 or max(blocks) - min(blocks) + 1 != len(blocks):
        return None
    first, last = min(blocks), max(blocks)
    what = f"{name}{first} to {last}" if last > first else f"{name}{first}"
    return f"a part of a model in several files ({what}), of which the index is the model"


def _kind(components: tuple[ComponentFacts, ...]) -> Kind:
    if len(components) == 1:
        return components[0].kind
    return Kind.CHECKPOINT if components[0].kind is Kind.DIFFUSION_MODEL else Kind.PARTS


def _without_components(kind: Kind, title: str, contents: Contents, *, runs: bool) -> FileFacts:
    return FileFacts(
        kind=kind,
        title=title,
        components=(),
        other_tensors=len(contents.shapes),
        other_bytes=_bytes(contents),
        prediction=(),
        metadata=contents.metadata,
        runs=runs,
    )


def _bytes(contents: Contents) -> int:
    return sum(stored.storage_bytes for stored in contents.stored.values())
