"""Reads model folders written by diffusers and transformers: components, their configurations and files.

Torch-free; reads the small JSON files and lists names, opens no weights. Does not interpret configurations.
Source: `save_pretrained` of diffusers 0.42 and transformers 5.23.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelpool.pool.files.formats.containment import contained, plain_name
from modelpool.pool.files.formats.regular_file import read_text_file
from modelpool.pool.files.formats.strict_json import BadJson, brief, read_object
from modelpool.pool.values.core.errors import CorruptFile

INDEX_FILE = "model_index.json"
#: configuration file names of components of any kind; models first
_SCHEDULER_FILE = "scheduler_config.json"
CONFIG_FILES = ("config.json", _SCHEDULER_FILE, "preprocessor_config.json", "tokenizer_config.json")

#: class name endings of components without weights
_WEIGHTLESS = ("Scheduler", "Tokenizer", "TokenizerFast", "Processor", "FeatureExtractor", "ImageProcessorFast")

#: name of a weights file, or of the index of several; a variant is "fp16" or "non_ema"
_WEIGHTS = re.compile(
    r"(?P<stem>diffusion_pytorch_model|model|pytorch_model)(\.(?P<before>\w+))?\.(?P<format>safetensors|bin)"
    r"(?P<index>(\.(?P<inside>\w+))?\.index(\.(?P<after>\w+))?\.json)?"
)


@dataclass(frozen=True, slots=True)
class FolderComponent:
    """One component of a model folder.

    name        name of its folder: "unet", "text_encoder_2"
    library     library of its class, "diffusers"; "" if unknown
    class_name  "UNet2DConditionModel"; "" if unknown
    config      contents of its configuration file; empty when it has none, as slow tokenizers
    weights     its weights file, or the index of several; "" when it has none, as schedulers
    variant     variant of `weights`, "fp16"; "" is the plain one
    variants    all variants that exist
    """

    name: str
    library: str
    class_name: str
    path: str
    config: Mapping[str, Any]
    weights: str
    variant: str
    variants: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder of components that make a model.

    pipeline    the pipeline class of the folder, "StableDiffusionXLPipeline"
    components  by name, in the order of the index, without those that the index lists as absent
    settings    the other entries of the index, such as `force_zeros_for_empty_prompt`
    """

    path: str
    pipeline: str
    components: Mapping[str, FolderComponent]
    settings: Mapping[str, Any]


def is_model_folder(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a folder with the index of a model; False for a path that cannot be read."""
    try:
        return (Path(path) / INDEX_FILE).is_file()
    except (OSError, ValueError):
        return False


def read_model_folder(path: str | os.PathLike[str], *, variant: str = "") -> ModelFolder:
    """Read the model folder at `path`; `variant` is used for each component that has it, else the plain weights.

    Raises CorruptFile, naming the file, when the index is damaged or a component is missing; UnsafeFile when a
    component is outside the folder.
    """
    folder = Path(path)
    index = _read_json(contained(folder / INDEX_FILE, folder), "the index of a model folder")
    components: dict[str, FolderComponent] = {}
    settings: dict[str, Any] = {}
    for name, value in index.items():
        if not isinstance(value, list) or _are_numbers(value):
            settings[name] = value
            continue
        library, class_name = _class_of(folder / INDEX_FILE, name, value)
        if library is None or class_name is None:
            continue
        place = contained(folder / plain_name(name, folder / INDEX_FILE), folder)
        if not place.is_dir():
            raise CorruptFile(f"{folder / INDEX_FILE}: names a component {brief(name)}, but there is no folder {place}")
        components[name] = _component(place, folder, library, class_name, variant)
    pipeline = settings.pop("_class_name", "")
    if not isinstance(pipeline, str) or not components:
        raise CorruptFile(f"{folder / INDEX_FILE}: names no pipeline or no components, expected both")
    return ModelFolder(str(folder), pipeline, components, settings)


def read_component(path: str | os.PathLike[str], *, variant: str = "") -> FolderComponent:
    """Read the folder at `path` as a single component: a configuration and its weights.

    Raises CorruptFile and UnsafeFile as `read_model_folder` does.
    """
    folder = Path(path)
    if not any((folder / name).is_file() for name in CONFIG_FILES):
        raise CorruptFile(f"{folder}: holds none of {', '.join(CONFIG_FILES)}, expected the folder of a component")
    return _component(folder, folder, "", "", variant)


def _component(place: Path, root: Path, library: str, class_name: str, variant: str) -> FolderComponent:
    file = next((place / name for name in CONFIG_FILES if (place / name).is_file()), None)
    config = {} if file is None else _read_json(contained(file, root), "a configuration")
    declared = config.get("_class_name") or next(iter(_texts(config.get("architectures"))), "")
    class_name = class_name or (declared if isinstance(declared, str) else "")
    found = _weights(place, root)
    if not found and file is not None and file.name == CONFIG_FILES[0] and not class_name.endswith(_WEIGHTLESS):
        raise CorruptFile(
            f"{place}: a component ({class_name or 'of no class'}) without weights, expected model.safetensors, "
            f"diffusion_pytorch_model.safetensors or an index of shards"
        )
    variants = tuple(sorted(found))
    chosen = next((v for v in (variant, "", *variants) if v in found), "")
    weights = found.get(chosen, "")
    return FolderComponent(place.name, library, class_name, str(place), config, weights, chosen, variants)


def _weights(place: Path, root: Path) -> dict[str, str]:
    """Return the best weights file for each variant: safetensors before pickles, an index before a single file."""
    ranked: dict[str, tuple[int, str]] = {}
    try:
        names = sorted(os.listdir(place))
    except OSError as error:
        raise CorruptFile(f"{place}: cannot be read: {error.strerror or error}") from None
    for name in names:
        match = _WEIGHTS.fullmatch(name)
        if match is None:
            continue
        variant = match["before"] or match["inside"] or match["after"] or ""
        rank = 2 * (match["format"] == "bin") + (match["index"] is None)
        if variant not in ranked or rank < ranked[variant][0]:
            ranked[variant] = (rank, name)
    best = {v: r for v, r in ranked.items() if r[0] < 2 or not any(other < 2 for other, _ in ranked.values())}
    return {variant: str(contained(place / name, root)) for variant, (_, name) in best.items()}


def _are_numbers(value: list[Any]) -> bool:
    """Return whether a list of an index is a setting, such as noise levels or layers, and no component."""
    return bool(value) and all(isinstance(part, int | float) and not isinstance(part, bool) for part in value)


def _class_of(index: Path, name: str, value: list[Any]) -> tuple[str | None, str | None]:
    if len(value) != 2 or not all(part is None or isinstance(part, str) for part in value):
        raise CorruptFile(f"{index}: {name} is {brief(value)}, expected a library and a class")
    return value[0], value[1]


def _texts(value: Any) -> list[str]:
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []


def _read_json(path: Path, expected: str) -> dict[str, Any]:
    try:
        # configurations of diffusers' multistep schedulers contain the end of an open range
        return read_object(read_text_file(path, expected), with_infinities=path.name == _SCHEDULER_FILE)
    except BadJson as error:
        raise CorruptFile(f"{path}: the file {error}, expected {expected}") from None
