"""Names in the requests of callers: those of the pool's models, never paths of files on the server's disks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.formats.weights_file import PICKLE_SUFFIXES, PLAIN_SUFFIXES

#: embeddings in a prompt
_EMBEDDING = re.compile(r"embedding:\s*([^\s,()]+)")


def check_names(request: GenerateRequest) -> GenerateRequest:
    """Return a request whose names are no paths. A driver script may name any file; a caller must not probe the disk.
    Raises UnusableField.
    """
    for field, name in _names(request):
        if is_path(name):
            raise unusable_field(field, name[:100], "a name of the pool's list, not a path")
    return request


def is_path(name: str) -> bool:
    """Whether a name can only be meant as a path: "sd15/shapes" is a name, "sd15/shapes.safetensors" a path."""
    parts = name.split("/")
    is_file = len(parts) > 1 and name.lower().endswith((*PLAIN_SUFFIXES, *PICKLE_SUFFIXES, ".json", ".toml"))
    return name.startswith(("/", "~")) or "\\" in name or bool({".", ".."} & set(parts)) or is_file


def _names(request: GenerateRequest) -> Iterator[tuple[str, str]]:
    yield "model", request.model
    yield from (("loras", lora.name) for lora in request.loras)
    yield from (("controls", control.model) for control in request.controls)
    if request.decoder is not None:
        yield "decoder", request.decoder.model
    texts = (request.prompt, request.negative, *(region.prompt for region in request.regions))
    yield from (("embedding", name) for text in texts for name in _EMBEDDING.findall(text))
