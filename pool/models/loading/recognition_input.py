"""Reads the facts that identify weights: headers of files, diffusers folders, key lists. No weights.

The only module of this package that opens files for recognition. Any fault of a file is a typed error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelpool.pool.families.detection.detect_diffusion_model import recognise_diffusion
from modelpool.pool.families.detection.file_facts import (
    ComponentFacts,
    Contents,
    FileFacts,
    FolderFacts,
    Kind,
    PredictionHint,
    Stored,
)
from modelpool.pool.families.detection.parts import component, diffusion_component, recognised
from modelpool.pool.families.detection.prediction import normalised_prediction
from modelpool.pool.families.detection.recognize import recognise_contents
from modelpool.pool.files.formats.containment import contained
from modelpool.pool.files.formats.folder_header import WRITER_FOLDER
from modelpool.pool.files.formats.model_folder import (
    CONFIG_FILES,
    INDEX_FILE,
    FolderComponent,
    is_model_folder,
    read_component,
    read_model_folder,
)
from modelpool.pool.files.formats.regular_file import read_text_file
from modelpool.pool.files.formats.safetensors_file import DTYPE_BITS, Header
from modelpool.pool.files.formats.strict_json import BadJson, brief, read_object
from modelpool.pool.files.formats.weights_file import loose_weights
from modelpool.pool.models.loading.weights_header import read_weights_header
from modelpool.pool.values.core.errors import CorruptFile, UnknownArchitecture, UserError
from modelpool.pool.weights.quant.detect_layers import layers_in_file, logical_shapes

#: maximum number of dimensions of a weight
_MAX_DIMENSIONS = 8
#: larger than any dimension of a tensor
_MAX_SIZE = 1 << 48

#: prefixes of component names in diffusers pipelines -> kind
_KINDS: tuple[tuple[str, Kind], ...] = (
    ("transformer", Kind.DIFFUSION_MODEL),
    ("unet", Kind.DIFFUSION_MODEL),
    ("prior", Kind.DIFFUSION_MODEL),
    ("decoder", Kind.DIFFUSION_MODEL),
    ("vae", Kind.VAE),
    ("vqgan", Kind.VAE),
    ("text_encoder", Kind.TEXT_ENCODER),
    (WRITER_FOLDER, Kind.TEXT_ENCODER),
    ("image_encoder", Kind.VISION_ENCODER),
    ("vocoder", Kind.VOCODER),
)
#: possible kinds of a component that its name does not identify
_ANY_KIND = (Kind.VAE, Kind.TEXT_ENCODER, Kind.VISION_ENCODER)

#: torch's dtype names, which key lists use as often as safetensors' names
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
    """Recognise the file of weights, or the index of several, at `path`.

    Raises CorruptFile and UnsafeFile as `read_weights_header` does, BadQuantization if quantized layers are not stored
    as declared, UnknownArchitecture if its keys are a known model's with impossible shapes.
    """
    return _recognised(contents_of(read_weights_header(path, allow_pickle=allow_pickle)), path)


def recognise_key_list(path: Path) -> FileFacts:
    """Recognise a file with keys listed as JSON at `path`: key -> shape, or key -> [shape, dtype].

    Raises CorruptFile naming the file and the key for anything else.
    """
    try:
        listed = read_object(read_text_file(path, "a list of keys"))
    except BadJson as error:
        raise CorruptFile(f"{path}: {error}, expected keys and their shapes") from None
    return _recognised(contents_of_key_list(listed, str(path)), path)


def recognise_folder(path: Path) -> FolderFacts:
    """Recognise the folder at `path`: a diffusers model, one component of it, or loose files.

    A loose file that cannot be read is listed with its problem. Raises UserError for a folder without any of these,
    CorruptFile, UnsafeFile and UnknownArchitecture for a model or component that is damaged.
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
        raise UserError(
            f"{path}: is a folder without {INDEX_FILE} or .safetensors or .gguf files, expected one of them"
        )
    files = {file.name: _file_or_problem(file, path) for file in weights}
    return FolderFacts("", "loose files", {}, {}, files, ())


def contents_of(header: Header) -> Contents:
    """Return the tensors that a header declares, quantization undone; reads its markers of quantized layers.

    Raises BadQuantization if quantized layers are not stored as declared.
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
    """Return the contents of a key list: `{key: shape}`, `{key: [shape, dtype]}`, or a safetensors header as JSON.

    Raises CorruptFile naming `where` and the key that has no shape.
    """
    shapes, stored = {}, {}
    metadata = listed.get("__metadata__", {})
    for key, entry in listed.items():
        if key == "__metadata__":
            continue
        shape, dtype = _shape_and_type(entry)
        if shape is None:
            raise CorruptFile(f"{where}: {brief(key)}: found {brief(entry)}, expected a list of sizes")
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


def _shape_and_type(entry: Any) -> tuple[tuple[int, ...] | None, str]:
    """Return the shape and the dtype of one entry of a key list; None for no shape."""
    dtype: Any = ""
    if isinstance(entry, dict):
        entry, dtype = entry.get("shape"), entry.get("dtype", "")
    elif isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list):
        entry, dtype = entry
    if not isinstance(entry, list) or len(entry) > _MAX_DIMENSIONS:
        return None, ""
    if not all(type(size) is int and 0 <= size < _MAX_SIZE for size in entry):
        return None, ""
    return tuple(entry), _TYPES.get(str(dtype).removeprefix("torch."), str(dtype))


def _model(path: Path) -> FolderFacts:
    """Recognise the components of a folder with the index of a model."""
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
    """Recognise one component of a model folder from its keys; if they are unknown, from its class."""
    contents = contents_of(read_weights_header(part.weights))
    keys = list(contents.shapes)
    kind = next((kind for prefix, kind in _KINDS if part.name.startswith(prefix)), Kind.OTHER)
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
    prediction, source = part.config.get("prediction_type"), f"configuration of {part.name}"
    if isinstance(prediction, str):
        return (PredictionHint(normalised_prediction(prediction), source),)
    return (PredictionHint("flow", source),) if part.class_name.startswith("Flow") else ()


def _file_or_problem(file: Path, folder: Path) -> FileFacts | str:
    try:
        return recognise_file(contained(file, folder))
    except UserError as problem:
        return str(problem)
