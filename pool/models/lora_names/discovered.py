"""Finds diffusers' names of a checkpoint's keys by tracing converters. Imports diffusers when called.

Helps converters where `LayoutNames` of a family says so, and with tensors that a variant of a family lacks. Does not
know the names in LoRA files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from modelpool.pool.families.definitions import defined_families
from modelpool.pool.families.parts.layout_names import FixedCuts, LayoutNames
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.diffusers_private import Converter, diffusion_converter
from modelpool.pool.values.core.errors import UnknownArchitecture, counted
from modelpool.pool.weights.keymaps.key_map import KeyMap, key_map_of
from modelpool.pool.weights.keymaps.provenance import Origin, Segment, UntraceableOperationError, rows_of, trace

Shapes = Mapping[str, Shape]

#: maximum number of tensors of a family's converter that a variant may lack
MAX_MISSING = 16
#: placeholder of a missing source tensor; it can be cut in two, three and six
PLACEHOLDER_SHAPE = (6, 1)


#: the layouts that families are published in, by name
_LAYOUTS: Mapping[str, LayoutNames] = {
    names.layout: names for family in defined_families() if (names := family.layout_names) is not None
}
#: converters of the project
_CONVERTERS: Mapping[str, Converter] = {
    **{name: names.converter for name, names in _LAYOUTS.items() if names.converter is not None},
    **{
        family.name: family.build.convert
        for family in defined_families()
        if not isinstance(family.build.convert, str | LayoutNames)
    },
}
#: families that are published under the names of a layout of another name
_LAYOUT_OF: Mapping[str, str] = {
    family.name: names.layout
    for family in defined_families()
    if (names := family.layout_names) is not None and names.layout != family.name
}


def layout_map(family: str, shapes: Shapes, prefix: str = "") -> KeyMap:
    """Return the key map from a diffusion model's keys, which begin with `prefix`, to diffusers' names for its weights.

    A family without a known layout gives a map without parameters. Unlike the map that a module is built with, this one
    omits parameters made of tensors that the file lacks, and the companions of quantized weights. Raises
    UnknownArchitecture if so much is missing that the converter of `family` cannot convert the file.
    """
    family = _LAYOUT_OF.get(family, family)
    names = _LAYOUTS.get(family, LayoutNames(family))
    if names.like:
        like = layout_map(names.like, shapes, prefix)
        return key_map_of(like.sources, {_renamed(key, names.prefixes): each for key, each in like.origins.items()})
    model_shapes = {
        k: tuple(shape) for k, shape in shapes.items() if k.startswith(prefix) and not _is_companion(k, shapes)
    }
    key_of = {names.older(key.removeprefix(prefix)): key for key in model_shapes}
    bare = {name: model_shapes[key] for name, key in key_of.items()}
    convert = _CONVERTERS.get(family) or diffusion_converter(family, bare)
    if convert is None:
        return key_map_of(model_shapes, {})
    fixed = names.cuts
    cuts = {name: fixed.actual(bare, name) for name in bare if fixed and fixed.keys.search(name)}
    traced_shapes = {
        name: (fixed.published[-1], *shape[1:]) if fixed and name in cuts else shape for name, shape in bare.items()
    }
    origins = {
        key: _moved(origin, key_of, fixed, cuts)
        for key, origin in _trace_leniently(family, traced_shapes, convert).items()
        if all(segment.source in key_of for segment in origin.segments)
    }
    return key_map_of(model_shapes, origins)


def _is_companion(key: str, shapes: Shapes) -> bool:
    """Whether `key` is a scale or a marker of a quantized weight: in the same module as a weight, and neither it nor
    its bias."""
    module, _, end = key.rpartition(".")
    return end not in ("weight", "bias") and f"{module}.weight" in shapes


def _renamed(key: str, renames: tuple[tuple[str, str], ...]) -> str:
    for old, new in renames:
        if key.startswith(old):
            return new + key.removeprefix(old)
    return key


def _trace_leniently(family: str, shapes: Shapes, convert: Converter) -> dict[str, Origin]:
    """Same as `trace`, with placeholders for tensors that `convert` lacks."""
    placeholders: dict[str, Shape] = {}
    while len(placeholders) <= MAX_MISSING:
        try:
            return trace({**shapes, **placeholders}, convert)
        except KeyError as missing:
            if str(missing.args[0]) in placeholders:  # not a missing tensor
                break
            placeholders[str(missing.args[0])] = PLACEHOLDER_SHAPE
        except UntraceableOperationError:
            raise
        except (IndexError, RuntimeError, ValueError) as found:
            raise UnknownArchitecture(
                f"{family}: found {counted(len(shapes), 'tensor')} that do not convert: {found}"
            ) from found
    raise UnknownArchitecture(
        f"{family}: found {counted(len(shapes), 'tensor')}, expected others, such as {next(iter(placeholders))}"
    )


def _moved(
    origin: Origin, key_of: Mapping[str, str], fixed: FixedCuts | None, cuts: Mapping[str, tuple[int, ...]]
) -> Origin:
    """Return `origin` with the keys and rows of the file."""
    segments = []
    for segment in origin.segments:
        start, end = segment.start, segment.start + segment.rows
        if fixed and segment.source in cuts:
            places = dict(zip((0, *fixed.published), (0, *cuts[segment.source]), strict=True))
            start, end = places[start], places[end]
        segments.append(Segment(key_of[segment.source], start, end - start))
    rows = sum(segment.rows for segment in segments)
    if origin.operations or rows == rows_of(origin.shape):
        return replace(origin, segments=tuple(segments))
    return replace(origin, segments=tuple(segments), shape=(rows, *origin.shape[1:]))
