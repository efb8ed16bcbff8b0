"""Checks requests against the headers of their models, before a pool starts: fields that a model does not support,
and a memory limit in which not even one layer fits. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from modelpool.actors.request.image_fields import InputImage
from modelpool.pool.values.core.errors import UserError, format_bytes, unusable_field
from modelpool.pool.values.core.lru_cache import LruCache

if TYPE_CHECKING:
    from modelpool.actors.request.requests import GenerateRequest
    from modelpool.pool.catalog.registry.folder_scan import WeightsFile
    from modelpool.pool.values.core.assembly import Source
    from modelpool.pool.values.core.sampling_facts import ModelDefaults

#: models that are remembered
MODELS_REMEMBERED = 256
#: a tensor of a file is split among at most so many layers
_MOST_PARTS = 8
#: bytes of an element in the smallest type that unquantized weights are computed in
_COMPUTED_BYTES = 2
#: fields with images and videos: checks need their sizes, so that the pool makes them
_INPUTS = ("image", "mask", "last_image", "reference", "video", "video_mask", "face_video", "controls", "image_prompts")


@dataclass(frozen=True, slots=True)
class HeaderFacts:
    """Facts from the header of a model.

    defaults     as the catalog of a pool has them, except for models of one extent only
    least_bytes  device memory that any run exceeds: a part of its largest layer; 0 if that is not known
    largest_bytes  of its largest tensor, of any component
    """

    defaults: ModelDefaults
    least_bytes: int
    largest_bytes: int = 0


class ModelChecks:
    """Checks requests for the models that `find` finds by name."""

    def __init__(
        self, find: Callable[[str], WeightsFile], budget_bytes: int | None = None, *, allow_pickle: bool = False
    ) -> None:
        """`budget_bytes` is the configured memory limit of a worker."""
        self._find = find
        self._budget_bytes = budget_bytes
        self._allow_pickle = allow_pickle
        self._facts: LruCache[str, HeaderFacts | None] = LruCache(MODELS_REMEMBERED)

    def check(self, request: GenerateRequest) -> None:
        """Raise UserError naming the field that the model of `request` does not support, or a memory limit that is too
        small for it. Checks no request with images that are not read yet, nor one of a model that cannot be described.
        """
        from modelpool.actors.graph.all_features import check_all_fields
        from modelpool.actors.graph.common.output_shape import duration_of, size_of

        if request.workflow is not None or request.passes:  # each run has a model and fields of its own
            return
        facts = self._facts.get(request.model, lambda: self._read(request.model))
        if facts is None:
            return
        if self._budget_bytes is not None and self._budget_bytes < facts.least_bytes:
            raise unusable_field(
                "vram",
                format_bytes(self._budget_bytes),
                f"more: a part of one layer of model {request.model!r} takes {format_bytes(facts.least_bytes)}; "
                f"`modelpool plan {request.model}` shows how much is needed",
            )
        if not has_unread_inputs(request):
            check_all_fields(request, facts.defaults.sampling)
            size_of(request, request.model, facts.defaults)
            duration_of(request, request.model, facts.defaults.sampling)

    def is_doubtful(self, request: GenerateRequest) -> bool:
        """Whether a pool is likely to refuse `request` for facts that headers do not have. Its images are read."""
        from modelpool.actors.client.exact_checks import is_doubtful
        from modelpool.actors.graph.common.output_shape import size_of
        from modelpool.actors.graph.features.sampling_defaults import sampling_defaults

        facts = self._facts.get(request.model, lambda: self._read(request.model))
        if facts is None or request.workflow is not None or request.passes:
            return True
        size = size_of(request, request.model, facts.defaults)
        steps = sampling_defaults(request, facts.defaults.sampling.defaults).get("steps", request.steps)
        return is_doubtful(request, facts.largest_bytes, size, steps, self._budget_bytes)

    def _read(self, model: str) -> HeaderFacts | None:
        try:
            return header_facts(self._find(model).source, allow_pickle=self._allow_pickle)
        except UserError:  # the check of names reports it
            return None


def header_facts(source: Source, *, allow_pickle: bool = False) -> HeaderFacts:
    """Return the facts of the model at `source`. Raises UserError as `describe` does."""
    from modelpool.pool.models.components.common.infer_config import latent_facts
    from modelpool.pool.models.loading.describe import native_size
    from modelpool.pool.models.loading.detect_family import detect
    from modelpool.pool.models.loading.small_tensors import refine_family
    from modelpool.pool.models.loading.weights_header import read_weights_header
    from modelpool.pool.values.core.sampling_facts import ModelDefaults
    from modelpool.pool.values.specs.spec import Role
    from modelpool.pool.weights.quant.detect_layers import layers_in_file

    header = read_weights_header(source, allow_pickle=allow_pickle)
    family = refine_family(detect(header), header)
    layers = layers_in_file(header)
    sizes = (
        min(header.tensors[key].storage_bytes, math.prod(shape) * _COMPUTED_BYTES)
        for key, shape in family.shapes_of(Role.DIFFUSION_MODEL, header.shapes).items()
        # of an embedding, a few rows are loaded; a quantized layer may be computed as it is stored
        if len(shape) in (2, 4, 5) and "emb" not in key and key not in layers
    )
    defaults = ModelDefaults(
        *native_size(family, header), family.sampling, latent_facts(family, header.shapes).downscale
    )
    tensors = (
        min(tensor.storage_bytes, math.prod(header.shapes[key]) * _COMPUTED_BYTES)
        for key, tensor in header.tensors.items()
    )
    return HeaderFacts(defaults, max(sizes, default=0) // _MOST_PARTS, max(tensors, default=0))


def has_unread_inputs(request: GenerateRequest) -> bool:
    """Whether `request` has images or videos that are not read yet: files, URLs or arrays."""
    if any(region.mask is not None for region in request.regions):
        return True
    return any(_is_unread(getattr(request, name)) for name in _INPUTS)


def _is_unread(value: object) -> bool:
    if value is None or isinstance(value, InputImage):
        return False
    return any(map(_is_unread, value)) if isinstance(value, tuple) else True
