"""Reads what is needed to recognise weights: headers of files, folders of diffusers, lists of keys. No weights.

The only module of this package that touches files. Whatever is wrong with a file is a typed error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelpool.pool.core.errors import CorruptFile, UnknownArchitecture, UserError
from modelpool.pool.detection.diffusion import recognise_diffusion
from modelpool.pool.detection.facts import (
    ComponentFacts,
    Contents,
    FileFacts,
    FolderFacts,
    Kind,
    PredictionHint,
    Stored,
)
from modelpool.pool.detection.parts import component, diffusion_component, recognised
from modelpool.pool.detection.prediction import prediction_word
from modelpool.pool.detection.recognize import recognise_contents
from modelpool.pool.formats.containment import contained
from modelpool.pool.formats.model_folder import (
    CONFIG_FILES,
    INDEX_FILE,
    FolderComponent,
    is_model_folder,
    read_component,
    read_model_folder,
)
from modelpool.pool.formats.regular_file import read_text_file
from modelpool.pool.formats.safetensors_file import DTYPE_BITS, Header
from modelpool.pool.formats.strict_json import BadJson, brief, read_object
from modelpool.pool.formats.weights_file import loose_weights
from modelpool.pool.loading.weights_header import read_weights_header
from modelpool.pool.quant.detect_layers import layers_in_file, logical_shapes

#: a tensor of more dimensions than this is no weight
_MOST_DIMENSIONS = 8
#: more than any dimension of a tensor has
_MOST_SIZE = 1 << 48

#: kinds of component by the beginning of their names, as pipelines of diffusers call them
_KINDS: tuple[tuple[str, Kind], ...] = (
    ("transformer", Kind.DIFFUSION_MODEL),
    ("unet", Kind.DIFFUSION_MODEL),
    ("prior", Kind.DIFFUSION_MODEL),
    ("decoder", Kind.DIFFUSION_MODEL),
    ("vae", Kind.VAE),
    ("vqgan", Kind.VAE),
    ("text_encoder", Kind.TEXT_ENCODER),
    ("image_encoder", Kind.VISION_ENCODER),
    ("vocoder", Kind.VOCODER),
)
#: what a component may be whose name says nothing
_ANY_KIND = (Kind.VAE, Kind.TEXT_ENCODER, Kind.VISION_ENCODER)

#: torch's names of types, which lists of keys have as often as those of safetensors
_TYPES: Mapping[str, str] = {
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint8": "U8",
    "int8": "I8",
    "int64": "I64",
}


def recognise_file(path: Path, *, allow_pickle: bool = False) -> FileFacts:
    """What the file of weights, or the index of several, at `path` is.

    Raises CorruptFile and UnsafeFile as `read_weights_header` does, BadQuantization when quantized layers are not
    stored as they say, UnknownArchitecture when its keys are a known model's and its shapes cannot be.
    """
    return _recognised(contents_of(read_weights_header(path, allow_pickle=allow_pickle)), path)


def recognise_key_list(path: Path) -> FileFacts:
    """What a file is whose keys are listed as JSON at `path`: key -> shape, or key -> [shape, type].

    Raises CorruptFile naming the file and the key for anything else.
    """
    try:
        listed = read_object(read_text_file(path, "a list of keys"))
    except BadJson as error:
        raise CorruptFile(f"{path}: {error}, expected keys and their shapes") from None
    return _recognised(contents_of_key_list(listed, str(path)), path)


def recognise_folder(path: Path) -> FolderFacts:
    """What the folder at `path` is: a model of diffusers, one component of it, or loose files.

    A loose file that cannot be read is told with what is wrong with it. Raises UserError for a folder without any of
    these, CorruptFile, UnsafeFile and UnknownArchitecture for a model or component that is damaged.
    """
    if is_model_folder(path):
        return _model(path)
    weights = loose_weights(path)
    if any((path / name).is_file() for name in CONFIG_FILES) and weights:
        part = read_component(path)
        if part.weights:
            found = _component(part)
            return FolderFacts("", found.title, {part.name: found}, {}, {}, ())
    if not weights:
        raise UserError(f"{path}: is a folder without {INDEX_FILE} or .safetensors or .gguf files, expected either")
    files = {file.name: _file_or_problem(file, path) for file in weights}
    return FolderFacts("", "loose files", {}, {}, files, ())


def contents_of(header: Header) -> Contents:
    """What a header says of a file's tensors, quantization undone; reads its markers of quantized layers.

    Raises BadQuantization when quantized layers are not stored as they say.
    """
    layers = layers_in_file(header)
    shapes = logical_shapes(header.shapes, layers)
    stored = {}
    for key in shapes:
        if key in layers:
            parts = (*layers[key].parts.values(), *layers[key].other)
            stored[key] = Stored(layers[key].format.name, sum(header.tensors[part].storage_bytes for part in parts))
        else:
            stored[key] = Stored(header.tensors[key].dtype, header.tensors[key].storage_bytes)
    return Contents(shapes, stored, header.metadata)


def contents_of_key_list(listed: Mapping[str, Any], where: str) -> Contents:
    """What a list of keys says: `{key: shape}`, `{key: [shape, type]}`, or a header of safetensors as JSON.

    Raises CorruptFile naming `where` and the key that has no shape.
    """
    shapes, stored = {}, {}
    metadata = listed.get("__metadata__", {})
    for key, said in listed.items():
        if key == "__metadata__":
            continue
        shape, dtype = _shape_and_type(said)
        if shape is None:
            raise CorruptFile(f"{where}: {brief(key)}: found {brief(said)}, expected a list of sizes")
        shapes[key] = shape
        if dtype in DTYPE_BITS:
            stored[key] = Stored(dtype, (math.prod(shape) * DTYPE_BITS[dtype] + 7) // 8)
    texts = {str(k): str(v) for k, v in metadata.items()} if isinstance(metadata, dict) else {}
    return Contents(shapes, stored, texts)


def _recognised(contents: Contents, path: Path) -> FileFacts:
    try:
        return recognise_contents(contents)
    except UnknownArchitecture as error:
        raise UnknownArchitecture(f"{path}: {error}") from error


def _shape_and_type(said: Any) -> tuple[tuple[int, ...] | None, str]:
    """The shape and the type that one entry of a list of keys gives; None for no shape."""
    dtype: Any = ""
    if isinstance(said, dict):
        said, dtype = said.get("shape"), said.get("dtype", "")
    elif isinstance(said, list) and len(said) == 2 and isinstance(said[0], list):
        said, dtype = said
    if not isinstance(said, list) or len(said) > _MOST_DIMENSIONS:
        return None, ""
    if not all(type(size) is int and 0 <= size < _MOST_SIZE for size in said):
        return None, ""
    return tuple(said), _TYPES.get(str(dtype).removeprefix("torch."), str(dtype))


def _model(path: Path) -> FolderFacts:
    """A folder with the index of a model: what each of its components is."""
    folder = read_model_folder(path)
    found = {name: _component(part) for name, part in folder.components.items() if part.weights}
    other = {name: part.class_name for name, part in folder.components.items() if not part.weights}
    ordered = dict(sorted(found.items(), key=lambda item: item[1].kind is not Kind.DIFFUSION_MODEL))
    first = next(iter(ordered.values()), None)
    is_model = first is not None and first.kind is Kind.DIFFUSION_MODEL
    scheduler = folder.components.get("scheduler")
    return FolderFacts(
        pipeline=folder.pipeline,
        title=first.title if first is not None and is_model else "no diffusion model",
        components=ordered,
        other=other,
        files={},
        prediction=_scheduler_hint(scheduler) if scheduler is not None else (),
    )


def _component(part: FolderComponent) -> ComponentFacts:
    """One component of a model folder, recognised from its keys; where they are not known, by its class."""
    contents = contents_of(read_weights_header(part.weights))
    keys = list(contents.shapes)
    kind = next((kind for beginning, kind in _KINDS if part.name.startswith(beginning)), Kind.OTHER)
    measured = component(kind, "", keys, contents)
    if kind in (Kind.DIFFUSION_MODEL, Kind.OTHER):
        try:
            found = recognise_diffusion(contents.shapes)
        except UnknownArchitecture as error:
            raise UnknownArchitecture(f"{part.path}: {error}") from error
        if found is not None:
            measured = diffusion_component(found, contents)
    for tried in _ANY_KIND if kind is Kind.OTHER else (kind,):
        if not measured.name and tried in _ANY_KIND:
            measured = recognised(tried, "", keys, contents)
    named = part.class_name or str(part.config.get("_class_name", ""))
    if not measured.name:
        measured = replace(measured, kind=kind, title=named or measured.title)
    return replace(measured, prefix=part.name, config={**measured.config, **({"class_name": named} if named else {})})


def _scheduler_hint(part: FolderComponent) -> tuple[PredictionHint, ...]:
    said, source = part.config.get("prediction_type"), f"configuration of {part.name}"
    if isinstance(said, str):
        return (PredictionHint(prediction_word(said), source),)
    return (PredictionHint("flow", source),) if part.class_name.startswith("Flow") else ()


def _file_or_problem(file: Path, folder: Path) -> FileFacts | str:
    try:
        return recognise_file(contained(file, folder))
    except UserError as problem:
        return str(problem)
