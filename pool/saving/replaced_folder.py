"""What a folder of diffusers holds that would be lost if another took its place.

A pipeline's own are its index and, in the folders that this names, what saving a pipeline writes: configurations,
tokenizers, and plain safetensors weights of components that are read here. All else is somebody's: notes, other models,
weights in other types, components that no folder saved here has (a safety checker). Looks at names, never at weights.
Torch-free.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from modelpool.pool.core.errors import CorruptFile, FilesWouldBeLost
from modelpool.pool.formats.folder_header import READ
from modelpool.pool.formats.model_folder import INDEX_FILE
from modelpool.pool.formats.regular_file import read_text_file
from modelpool.pool.formats.strict_json import BadJson, read_object

#: what `save_pretrained` of diffusers 0.42 and transformers 5.23 calls what is no weights
_SETTINGS = frozenset({
    "config.json", "scheduler_config.json", "preprocessor_config.json", "processor_config.json", "guider_config.json",
    "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt",
})  # fmt: skip
#: plain weights: whole, one shard, or the index of shards
_WEIGHTS = re.compile(r"(?P<stem>\w+?)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
#: what weights are called by the library that a component's class is of; diffusers' and its parts' otherwise
_STEMS: Mapping[str, str] = {"transformers": "model"}
_STEM = "diffusion_pytorch_model"
#: what programs that show folders leave in them unasked
_OF_DESKTOPS = frozenset({".DS_Store", "Thumbs.db", "desktop.ini"})


def expect_outside(path: Path, model: Path) -> None:
    """Raise FilesWouldBeLost where `path` is the folder of the `model` that is saved, or in it: what a folder says in
    tokenizers, schedulers and processors is not all in what is made of it."""
    place, own = Path(os.path.realpath(path)), Path(os.path.realpath(model))
    if place == own or own in place.parents:
        where = "is" if place == own else "is in"
        raise FilesWouldBeLost(f"{path}: {where} the folder of the model that is saved; expected another place")


def lost_files(folder: Path) -> Iterator[str]:
    """The files in `folder` that are no pipeline's own, by their paths in it, in order; all of them where there is no
    index that can be read. Links count as files that are somebody's. Raises OSError for a folder that cannot be read.
    """
    libraries = _libraries(folder)
    index = () if libraries is None else (INDEX_FILE,)
    for place, own in _files(folder, ""):
        parent, _, name = place.rpartition("/")
        library = (libraries or {}).get(parent)
        is_kept = place in index or (library is not None and _is_own(parent, library, name)) or name in _OF_DESKTOPS
        if not (own and is_kept):
            yield place


def _libraries(folder: Path) -> dict[str, str] | None:
    """The library of each component that the index of `folder` names; None without an index."""
    try:
        index = read_object(read_text_file(folder / INDEX_FILE, "the index of a model folder"))
    except (BadJson, CorruptFile):
        return None
    pairs = {name: value for name, value in index.items() if isinstance(value, list) and len(value) == 2}
    return {name: library for name, (library, kind) in pairs.items() if isinstance(library, str) and kind}


def _is_own(component: str, library: str, name: str) -> bool:
    weights = _WEIGHTS.fullmatch(name)
    is_weights = weights is not None and weights["stem"] == _STEMS.get(library, _STEM)
    return name in _SETTINGS or (is_weights and component in READ)


def _files(folder: Path, start: str) -> Iterator[tuple[str, bool]]:
    """Everything in `folder` but folders, by its path, and whether it is a regular file."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            if entry.is_dir(follow_symlinks=False):
                yield from _files(folder / entry.name, f"{start}{entry.name}/")
            else:
                yield f"{start}{entry.name}", entry.is_file(follow_symlinks=False)
