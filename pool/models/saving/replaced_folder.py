"""Finds the files that replacing a diffusers folder would lose.

A pipeline consists of its index and, in the folders named there, the files that saving a pipeline writes:
configurations, tokenizers, and plain safetensors weights of supported components. All other files are the user's:
notes, other models, weights in other dtypes, components that are never saved here (a safety checker). Checks names,
never weights. Torch-free.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from modelpool.pool.files.formats.folder_header import COMPONENT_FOLDERS
from modelpool.pool.files.formats.model_folder import INDEX_FILE
from modelpool.pool.files.formats.regular_file import read_text_file
from modelpool.pool.files.formats.strict_json import BadJson, read_object
from modelpool.pool.values.core.errors import CorruptFile, FilesWouldBeLost

#: file names without weights of `save_pretrained` of diffusers 0.42 and transformers 5.23
_SETTINGS = frozenset({
    "config.json", "scheduler_config.json", "preprocessor_config.json", "processor_config.json", "guider_config.json",
    "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt",
})  # fmt: skip
#: plain weights: one file, one shard, or the index of shards
_WEIGHTS = re.compile(r"(?P<stem>\w+?)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
#: stem of weight files by the library of the component's class; otherwise diffusers'
_STEMS: Mapping[str, str] = {"transformers": "model"}
_STEM = "diffusion_pytorch_model"
#: files that desktop programs create
_DESKTOP_FILES = frozenset({".DS_Store", "Thumbs.db", "desktop.ini"})


def expect_outside(path: Path, model: Path) -> None:
    """Raise FilesWouldBeLost if `path` is the folder of the `model` that is saved, or in it: the result may not contain
    all settings of its tokenizers, schedulers and processors."""
    place, model_folder = Path(os.path.realpath(path)), Path(os.path.realpath(model))
    if place == model_folder or model_folder in place.parents:
        where = "is" if place == model_folder else "is in"
        raise FilesWouldBeLost(f"{path}: {where} the folder of the saved model; expected another path")


def lost_files(folder: Path) -> Iterator[str]:
    """Yield the files in `folder` that do not belong to its pipeline, by their paths in it, in order; all of them if
    there is no readable index. Links count as the user's files. Raises OSError for a folder that cannot be read."""
    libraries = _libraries(folder)
    index = () if libraries is None else (INDEX_FILE,)
    for place, is_regular in _files(folder, ""):
        parent, _, name = place.rpartition("/")
        library = (libraries or {}).get(parent)
        is_kept = (
            place in index
            or (library is not None and _is_pipeline_file(parent, library, name))
            or name in _DESKTOP_FILES
        )
        if not (is_regular and is_kept):
            yield place


def _libraries(folder: Path) -> dict[str, str] | None:
    """Return the library of each component that the index of `folder` names; None without an index."""
    try:
        index = read_object(read_text_file(folder / INDEX_FILE, "the index of a model folder"))
    except (BadJson, CorruptFile):
        return None
    pairs = {name: value for name, value in index.items() if isinstance(value, list) and len(value) == 2}
    return {name: library for name, (library, kind) in pairs.items() if isinstance(library, str) and kind}


def _is_pipeline_file(component: str, library: str, name: str) -> bool:
    weights = _WEIGHTS.fullmatch(name)
    is_weights = weights is not None and weights["stem"] == _STEMS.get(library, _STEM)
    return name in _SETTINGS or (is_weights and component in COMPONENT_FOLDERS)


def _files(folder: Path, start: str) -> Iterator[tuple[str, bool]]:
    """Yield everything in `folder` except folders, by its path, and whether it is a regular file."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            if entry.is_dir(follow_symlinks=False):
                yield from _files(folder / entry.name, f"{start}{entry.name}/")
            else:
                yield f"{start}{entry.name}", entry.is_file(follow_symlinks=False)
