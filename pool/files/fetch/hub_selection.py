"""Which files of a repository on the hub a model needs: weights, configurations and tokenizers. Pure.

A repository is one of these:

1. a diffusers folder: its index, and the components that it names, each with one set of weights;
2. files of weights: one of them, with the shards of an index, and what belongs to it.

Pictures, other formats and other precisions of the same weights stay where they are. So do pickles: they can contain
code.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from modelpool.pool.files.fetch.fetch_errors import SourceFailed
from modelpool.pool.files.formats.model_folder import INDEX_FILE
from modelpool.pool.files.formats.shard_index import is_index
from modelpool.pool.files.formats.weights_file import PICKLE_SUFFIXES, PLAIN_SUFFIXES
from modelpool.pool.values.core.errors import AmbiguousName, UserError, counted, format_bytes, unknown_name

#: endings of the small files that a component needs: configurations, vocabularies, merges, SentencePiece models
SMALL_SUFFIXES = (".json", ".txt", ".model", ".jinja")
#: what belongs to a single file of weights: the scale of a LoRA by PEFT, and a tokenizer
_BESIDE = ("adapter_config.json",)
_TOKENIZER = ".tokenizer.json"
#: files that libraries write under fixed names; one of them is what the repository is for
_FIXED = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
#: a shard, and a part of a split GGUF file
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<variant>\.\w+)?\.(safetensors|gguf)")
#: weights of a component, as diffusers and transformers name them
_COMPONENT = re.compile(
    r"(?:diffusion_pytorch_model|model|pytorch_model)(?:\.(?P<variant>\w+))?(?:-\d{5}-of-\d{5}(?:\.(?P<late>\w+))?)?"
    r"\.safetensors(?:\.index(?:\.(?P<after>\w+))?\.json)?"
)
#: sizes and names of files in a message
_MOST_LISTED = 12


def is_model_index(names: Collection[str]) -> bool:
    """Whether the repository is a diffusers folder."""
    return INDEX_FILE in names


def chosen_weights(repository: str, sizes: Mapping[str, int], file: str = "") -> tuple[str, ...]:
    """Return the files to fetch for one file of weights of a repository that is no diffusers folder, or for `file`.

    sizes  bytes by path
    Raises UnknownName for a file that is not there, AmbiguousName for several, SourceFailed for none.
    """
    weights = [name for name in sizes if name.lower().endswith(PLAIN_SUFFIXES) or is_index(name)]
    if file:
        if file not in sizes:
            raise unknown_name("file", file, weights or sizes)
        if file.lower().endswith(PICKLE_SUFFIXES):
            raise SourceFailed(f"{repository}: {file} is a PyTorch pickle, which can contain code: it is not fetched")
        if file not in weights:
            raise UserError(f"{file}: no file of weights; expected one of {_listed(sizes, weights)}")
        return _with_parts(file, sizes)
    wholes = _wholes(name for name in weights if "/" not in name) or _wholes(weights)
    fixed = [name for name in wholes if name.rsplit("/", 1)[-1] in _FIXED]
    if not wholes:
        pickles = any(name.lower().endswith(PICKLE_SUFFIXES) for name in sizes)
        has = "only PyTorch pickles, which can contain code" if pickles else "no files of weights"
        raise SourceFailed(f"{repository}: has {has}; expected {', '.join(PLAIN_SUFFIXES)}")
    if len(wholes) > 1 and len(fixed) != 1:
        raise AmbiguousName(
            f"{repository}: has {counted(len(wholes), 'file')} of weights; "
            f"name one as {repository}:FILE: {_listed(sizes, wholes)}"
        )
    return _with_parts(fixed[0] if len(fixed) == 1 else wholes[0], sizes)


def folder_files(repository: str, index: Mapping[str, Any], names: Sequence[str], variant: str = "") -> tuple[str, ...]:
    """Return the files to fetch of a diffusers folder: with one set of weights for each component, the weights of
    `variant` ("fp16"), else the plain ones, else the only other ones.

    index  the content of its model_index.json
    Raises SourceFailed for a component without weights that are no pickles, UserError for a variant that none has.
    """
    chosen, has_variant = [INDEX_FILE], not variant
    for component, value in index.items():
        if not (isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)):
            continue
        inside = [name for name in names if name.startswith(f"{component}/") and name.count("/") == 1]
        if not inside:
            raise SourceFailed(f"{repository}: {INDEX_FILE} names {component!r}, but the repository has no such folder")
        by_variant: dict[str, list[str]] = {}
        for name in inside:
            match = _COMPONENT.fullmatch(name.rpartition("/")[2])
            if match is not None:
                by_variant.setdefault(match["variant"] or match["late"] or match["after"] or "", []).append(name)
        if not by_variant and any(name.endswith(PICKLE_SUFFIXES) for name in inside):
            raise SourceFailed(f"{repository}: {component} has only PyTorch pickles, which can contain code")
        has_variant |= variant in by_variant
        weights = next((by_variant[v] for v in (variant, "", *sorted(by_variant)) if v in by_variant), [])
        chosen += weights if not any(map(is_index, weights)) else [n for n in weights if is_index(n) or _is_shard(n)]
        others = {name for found in by_variant.values() for name in found}
        chosen += [n for n in inside if n not in others and n.endswith(SMALL_SUFFIXES) and not is_index(n)]
    if not has_variant:
        raise UserError(f"{repository}: no component has weights of the variant {variant!r}")
    return tuple(dict.fromkeys(chosen))


def _wholes(names: Iterable[str]) -> list[str]:
    """Return the groups of files that are one model each: indexes, first parts of split files, and the other files."""
    listed = list(names)
    indexed = {_INDEX_END.sub("", name) for name in listed if is_index(name)}
    found = []
    for name in listed:
        shard = _SHARD.fullmatch(name)
        if shard is None or (name.endswith(".gguf") and int(shard["number"]) == 1):
            found.append(name)
        elif shard["stem"] not in indexed and int(shard["number"]) == 1:
            found.append(name)  # shards without an index: the first one stands for them, and its reader says the rest
    return found


_INDEX_END = re.compile(r"\.safetensors(\.\w+)?\.index(\.\w+)?\.json$")


def _with_parts(name: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return `name`, the other parts of what it is part of, and what belongs to it."""
    folder = name.rpartition("/")[0]
    below = f"{folder}/" if folder else ""
    shard = _SHARD.fullmatch(name)
    stem = shard["stem"] if shard else _INDEX_END.sub("", name) if is_index(name) else None
    found = [name]
    if stem is not None:
        for other in sizes:
            part = _SHARD.fullmatch(other)
            if (part and part["stem"] == stem) or (is_index(other) and _INDEX_END.sub("", other) == stem):
                found.append(other)
    plain = next((name[: -len(suffix)] for suffix in PLAIN_SUFFIXES if name.endswith(suffix)), name)
    beside = [f"{below}{each}" for each in _BESIDE] + [plain + _TOKENIZER]
    return tuple(dict.fromkeys([*found, *(each for each in beside if each in sizes)]))


def _is_shard(name: str) -> bool:
    return _SHARD.fullmatch(name) is not None


def _listed(sizes: Mapping[str, int], names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(f"{name} ({format_bytes(sizes[name])})" for name in names[:_MOST_LISTED]) + more
