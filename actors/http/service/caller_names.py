"""Names in the requests of callers: names of the pool's models, never paths of files on the server's disks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set

from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.files.formats.weights_file import PICKLE_SUFFIXES, PLAIN_SUFFIXES
from modelpool.pool.values.core.errors import unusable_field

#: embeddings in a prompt
_EMBEDDING = re.compile(r"embedding:\s*([^\s,()]+)")


def check_names(request: GenerateRequest, listed: Set[str]) -> GenerateRequest:
    """Return a request without paths as names, except paths that the pool has `listed`. A driver script may name any
    file; a caller must not probe the disk. Raises UnusableField.
    """
    for field, name in _names(request):
        if name not in listed and is_path(name):
            raise unusable_field(field, name[:100], "a name of the pool's list, not a path")
    return request


def check_upscaler(name: str, listed: Set[str]) -> None:
    """Raise UnusableField for the name of an upscaler that is a path and not `listed`."""
    if name not in listed and is_path(name):
        raise unusable_field("upscaler", name[:100], "a name of the pool's list, not a path")


def may_name_paths(request: GenerateRequest) -> bool:
    """Whether a name of a request may be a path, unless the pool lists it."""
    return any(is_path(name) for _, name in _names(request))


def is_path(name: str) -> bool:
    """Whether the registry would look for a file or a folder of this name: also below its working directory."""
    is_file = name.lower().endswith((*PLAIN_SUFFIXES, *PICKLE_SUFFIXES, ".json", ".toml"))
    return "/" in name or "\\" in name or name.startswith("~") or name in (".", "..") or is_file


def _names(request: GenerateRequest) -> Iterator[tuple[str, str]]:
    yield "model", request.model
    if request.workflow is not None:
        yield from request.workflow.names()
        for node in request.workflow.samplings:
            yield from _names(node.request)
    for each in request.passes:
        yield from (("passes.model", name) for name in (each.model, each.upscaler) if name)
        yield from (("passes.loras", lora.name) for lora in each.loras or ())
    yield from (("loras", lora.name) for lora in request.loras)
    yield from (("controls", control.model) for control in request.controls)
    for prompt in request.image_prompts:
        yield "image_prompts", prompt.model
        yield from [("image_prompts", prompt.encoder)] if prompt.encoder else ()
    if request.upscale is not None:
        yield "upscale", request.upscale.model
    if request.hires is not None and request.hires.upscaler is not None:
        yield "hires.upscaler", request.hires.upscaler
    if request.decoder is not None:
        yield "decoder", request.decoder.model
    texts = (text for _, text in request.texts())
    for name in (name for text in texts for name in _EMBEDDING.findall(text)):
        yield "embedding", name
        yield "embedding", name.partition(":")[0]  # a weight may follow
