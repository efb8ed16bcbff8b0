"""Recognise a file of weights from its header: one pure function. Torch-free.

Combines the other modules of this package. Reads nothing (`pool.loading.recognition_input` does), and does not know
what this version runs.
"""

from __future__ import annotations

from modelpool.pool.detection.diffusion import recognise_diffusion
from modelpool.pool.detection.facts import ComponentFacts, Contents, FileFacts, Kind
from modelpool.pool.detection.other_files import folder_part, is_lora, other_file
from modelpool.pool.detection.parts import diffusion_component, other_components, second_model, split_second
from modelpool.pool.detection.prediction import prediction_hints


def recognise_contents(contents: Contents) -> FileFacts:
    """Return the facts of a file with `contents`: its components, or its other content.

    Raises UnknownArchitecture for a diffusion model with known keys and impossible shapes.
    """
    shapes = contents.shapes
    if is_lora(shapes):
        return _without_components(Kind.LORA, "a LoRA", contents)
    first, _ = split_second(shapes)
    found = recognise_diffusion(first)
    other = None if found else other_file(shapes)
    if other:
        return _without_components(Kind.OTHER, other, contents)
    models = (diffusion_component(found, contents), *second_model(contents)) if found else ()
    components = (*models, *other_components(contents, found.prefix if found else None))
    if not components:
        part = folder_part(shapes)
        title = part or ("the file holds no tensors" if not shapes else "unknown content")
        return _without_components(Kind.OTHER if part else Kind.UNKNOWN, title, contents)
    return FileFacts(
        kind=_kind(components),
        title=components[0].title,
        components=components,
        other_tensors=len(shapes) - sum(each.tensors for each in components),
        other_bytes=_bytes(contents) - sum(each.storage_bytes for each in components),
        prediction=prediction_hints(shapes, contents.metadata),
        metadata=contents.metadata,
    )


def _kind(components: tuple[ComponentFacts, ...]) -> Kind:
    if len(components) == 1:
        return components[0].kind
    return Kind.CHECKPOINT if components[0].kind is Kind.DIFFUSION_MODEL else Kind.PARTS


def _without_components(kind: Kind, title: str, contents: Contents) -> FileFacts:
    return FileFacts(
        kind=kind,
        title=title,
        components=(),
        other_tensors=len(contents.shapes),
        other_bytes=_bytes(contents),
        prediction=(),
        metadata=contents.metadata,
    )


def _bytes(contents: Contents) -> int:
    return sum(stored.storage_bytes for stored in contents.stored.values())
