"""transformers' tokenizers of CLIP in folders of diffusers: equal ones are built once, which takes half a second."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

from transformers import CLIPTokenizer


def tokenizers_of(folder: Path) -> dict[str, CLIPTokenizer]:
    """The tokenizers of `folder` by their names in pipelines, as arguments of `from_pretrained`. Tests share them."""
    return {part.name: _tokenizer_of(part) for part in sorted(folder.glob("tokenizer*"))}


def _tokenizer_of(part: Path) -> CLIPTokenizer:
    return _built(_Folder(part, tuple((file.name, file.read_bytes()) for file in sorted(part.iterdir()))))


@dataclass(frozen=True)
class _Folder:
    """Equal to every other with the same files."""

    path: Path = field(compare=False)
    files: tuple[tuple[str, bytes], ...]


@functools.lru_cache(maxsize=8)
def _built(folder: _Folder) -> CLIPTokenizer:
    return CLIPTokenizer.from_pretrained(folder.path, local_files_only=True)
