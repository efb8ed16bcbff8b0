"""Finds the diffusion model in a file that is part of an assembly, as tensors without a prefix. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from modelpool.pool.families.detection.detect_diffusion_model import DiffusionFacts, recognise_diffusion
from modelpool.pool.families.detection.layouts.signature import Naming
from modelpool.pool.families.detection.parts import LOW_NOISE_PREFIX, split, split_second
from modelpool.pool.families.parts.located_family import LocatedFamily
from modelpool.pool.families.two_experts import differing, two_expert_family
from modelpool.pool.files.formats.safetensors_file import Header, Shape
from modelpool.pool.values.core.errors import MissingParts, UnknownArchitecture
from modelpool.pool.weights.quant.detect_layers import layers_in_file, logical_shapes

#: sizes of a model that tell whether a second one is part of it
_TELL_OF_SECOND = ("has_unconditional",)
#: copies of the weights from before the end of training
_EMA_PREFIX = "model_ema."


@dataclass(frozen=True, slots=True)
class AssemblyPart:
    """One component's tensors in one file.

    keys    key without prefix -> key in the file
    shapes  key without prefix -> shape of the weight, quantization undone
    """

    header: Header
    keys: Mapping[str, str]
    shapes: Mapping[str, Shape]


def diffusion_model_of(header: Header) -> DiffusionFacts:
    """Return the diffusion model in a file; of two experts the high-noise one. Raises MissingParts for a file without
    one, or with one in another key naming than complete checkpoints have, and UnknownArchitecture."""
    shapes, _ = split_second(logical_shapes(header.shapes, layers_in_file(header)))
    try:
        found = recognise_diffusion(shapes)
    except UnknownArchitecture as error:
        raise UnknownArchitecture(f"{header.path}: {error}") from error
    if found is None:
        raise MissingParts(f"{header.path}: found no known diffusion model in it, expected one")
    if found.naming is not Naming.PUBLISHED:
        raise MissingParts(
            f"{header.path}: {found.title} in the naming of diffusers, expected the naming of complete checkpoints, "
            f"or its complete diffusers folder"
        )
    return found


def part_of(header: Header, keys: Iterable[str]) -> AssemblyPart:
    """Return those `keys` of a file as one component."""
    selected = set(keys)
    shapes = logical_shapes(header.shapes, layers_in_file(header))
    return AssemblyPart(
        header, {key: key for key in selected}, {key: shape for key, shape in shapes.items() if key in selected}
    )


def without_prefix(keys: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Return the `keys` of an `AssemblyPart`, indexed without `prefix`."""
    return {bare.removeprefix(prefix): key for bare, key in keys.items()}


def keys_of_model(header: Header, model: DiffusionFacts) -> list[str]:
    """Return the keys of the diffusion model; in a file without prefix all that belong to no other component."""
    model_keys = [key for key in header.tensors if key.startswith(model.prefix)]
    if model.prefix:
        return model_keys
    others = {key for keys in split(header.tensors).values() for key in keys}
    left_out_prefixes = (_EMA_PREFIX, LOW_NOISE_PREFIX)
    return [
        key for key in model_keys if key not in others and not key.startswith(left_out_prefixes) and not _is_marker(key)
    ]


def markers_of(header: Header, model: DiffusionFacts) -> list[str]:
    """Return the tensors that belong to no component, such as trainers' markers of the prediction type."""
    model_keys = set(keys_of_model(header, model))
    others = {key for keys in split(header.tensors).values() for key in keys}
    left_out_prefixes = (_EMA_PREFIX, LOW_NOISE_PREFIX)
    return [key for key in header.tensors if key not in model_keys | others and not key.startswith(left_out_prefixes)]


def _is_marker(key: str) -> bool:
    return key in ("v_pred", "ztsnr", "edm_mean", "edm_std") or key.startswith("edm_vpred.")


def second_model(header: Header, model: DiffusionFacts) -> tuple[LocatedFamily, AssemblyPart]:
    """Return the diffusion model in a file (of two experts the second) as the low-noise expert of `model`, and the
    family of both. Raises UnknownArchitecture if they make no pair, and as `diffusion_model_of`."""
    bundled = bundled_second_model(header, model)
    if bundled is not None:
        return bundled
    found = diffusion_model_of(header)
    part = part_of(header, keys_of_model(header, found))
    start = len(found.prefix)
    family = two_expert_family(model, {key[start:]: shape for key, shape in part.shapes.items()}, header.path)
    return family, replace(part, keys=without_prefix(part.keys, found.prefix))


def unconditional_model(header: Header, model: DiffusionFacts, name: str) -> AssemblyPart:
    """Return the diffusion model in a file as the one that predicts without a text next to `model`, where it is `name`.
    Raises UnknownArchitecture if it has not the sizes of `model`, and as `diffusion_model_of`."""
    found = diffusion_model_of(header)
    alone = replace(found, config={**found.config, **{key: model.config[key] for key in _TELL_OF_SECOND}})
    if difference := differing(model, alone, "the model that reads the text"):
        raise UnknownArchitecture(f"its model without text in {header.path} is {difference}")
    inner = f"{found.prefix}{name}."
    part = part_of(header, (key for key in keys_of_model(header, found) if not key.startswith(inner)))
    return replace(part, keys=without_prefix(part.keys, found.prefix))


def swapped_unconditional(main: str, other: str) -> str:
    """Return an error message if both files are the same, or if a name indicates that they are swapped; empty if
    neither. `main` reads the text, `other` does not."""
    if os.path.realpath(main) == os.path.realpath(other):
        return f"{main} is used for predictions with a text and without, expected two files"
    is_without, is_other = ("uncond" in os.path.basename(file).lower() for file in (main, other))
    if is_without and not is_other:
        return f"{main} is used as the model that reads the text, but its name says that it reads none"
    return ""


def bundled_second_model(header: Header, model: DiffusionFacts) -> tuple[LocatedFamily, AssemblyPart] | None:
    """Return the low-noise expert that a file contains in addition to `model`, and the family of both. None for a file
    without one. Raises UnknownArchitecture if they make no pair."""
    part = part_of(header, (key for key in header.tensors if key.startswith(LOW_NOISE_PREFIX)))
    if not part.keys:
        return None
    family = two_expert_family(model, split_second(part.shapes)[1], header.path)
    return family, replace(part, keys=without_prefix(part.keys, LOW_NOISE_PREFIX))
