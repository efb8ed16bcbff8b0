"""What a file has that a model is put together of: its diffusion model, as tensors without a prefix. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from modelpool.pool.core.errors import MissingParts, UnknownArchitecture
from modelpool.pool.detection.diffusion import DiffusionFacts, recognise_diffusion
from modelpool.pool.detection.layouts.signature import Naming
from modelpool.pool.detection.parts import LOW_NOISE_PREFIX, split, split_second
from modelpool.pool.families.expert_pairs import pair_of
from modelpool.pool.families.family import Family
from modelpool.pool.formats.safetensors_file import Header, Shape
from modelpool.pool.quant.detect_layers import layers_in_file, logical_shapes

#: copies of the weights from before the end of training
_EMA_PREFIX = "model_ema."


@dataclass(frozen=True, slots=True)
class Part:
    """One component's tensors in one file.

    keys    of its tensors in the file, by the key that each has without prefix
    shapes  of its weights, by the same, quantization undone
    """

    header: Header
    keys: Mapping[str, str]
    shapes: Mapping[str, Shape]


def diffusion_model_of(header: Header) -> DiffusionFacts:
    """The diffusion model in a file; of a pair the one for high noise. Raises MissingParts for a file without one, or
    with one in other names than whole checkpoints have, and UnknownArchitecture."""
    shapes, _ = split_second(logical_shapes(header.shapes, layers_in_file(header)))
    try:
        found = recognise_diffusion(shapes)
    except UnknownArchitecture as error:
        raise UnknownArchitecture(f"{header.path}: {error}") from error
    if found is None:
        raise MissingParts(f"{header.path}: found no diffusion model in it, expected one that is known")
    if found.naming is not Naming.PUBLISHED:
        raise MissingParts(
            f"{header.path}: {found.title} in the naming of diffusers, expected it in the naming of whole checkpoints, "
            f"or the folder of diffusers that it is a part of"
        )
    return found


def part_of(header: Header, keys: Iterable[str]) -> Part:
    """Those `keys` of a file as one component."""
    own = set(keys)
    shapes = logical_shapes(header.shapes, layers_in_file(header))
    return Part(header, {key: key for key in own}, {key: shape for key, shape in shapes.items() if key in own})


def without_prefix(keys: Mapping[str, str], prefix: str) -> dict[str, str]:
    """`keys` of a `Part`, by what they are without `prefix`."""
    return {bare.removeprefix(prefix): key for bare, key in keys.items()}


def keys_of_model(header: Header, model: DiffusionFacts) -> list[str]:
    """The keys of the diffusion model; of a file without prefix all that is no other component's."""
    own = [key for key in header.tensors if key.startswith(model.prefix)]
    if model.prefix:
        return own
    others = {key for keys in split(header.tensors).values() for key in keys}
    beside = (_EMA_PREFIX, LOW_NOISE_PREFIX)
    return [key for key in own if key not in others and not key.startswith(beside) and not _is_marker(key)]


def markers_of(header: Header, model: DiffusionFacts) -> list[str]:
    """Tensors that belong to no component: what trainers say of the prediction, and the like."""
    own = set(keys_of_model(header, model))
    others = {key for keys in split(header.tensors).values() for key in keys}
    beside = (_EMA_PREFIX, LOW_NOISE_PREFIX)
    return [key for key in header.tensors if key not in own | others and not key.startswith(beside)]


def _is_marker(key: str) -> bool:
    return key in ("v_pred", "ztsnr", "edm_mean", "edm_std") or key.startswith("edm_vpred.")


def second_model(header: Header, model: DiffusionFacts) -> tuple[Family, Part]:
    """The diffusion model in a file, of a pair its second one, as the one for low noise of a pair, whose other one is
    `model`; and the family of both. Raises UnknownArchitecture where they make none, and as `diffusion_model_of`."""
    beside = second_beside(header, model)
    if beside is not None:
        return beside
    found = diffusion_model_of(header)
    part = part_of(header, keys_of_model(header, found))
    start = len(found.prefix)
    family = pair_of(model, {key[start:]: shape for key, shape in part.shapes.items()}, header.path)
    return family, replace(part, keys=without_prefix(part.keys, found.prefix))


def second_beside(header: Header, model: DiffusionFacts) -> tuple[Family, Part] | None:
    """The second diffusion model that a file has beside another, with `model` as its first one; and the family of both.
    None for a file without one. Raises UnknownArchitecture where they make no pair."""
    part = part_of(header, (key for key in header.tensors if key.startswith(LOW_NOISE_PREFIX)))
    if not part.keys:
        return None
    family = pair_of(model, split_second(part.shapes)[1], header.path)
    return family, replace(part, keys=without_prefix(part.keys, LOW_NOISE_PREFIX))
