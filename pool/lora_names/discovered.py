"""Finds diffusers' names of a checkpoint's keys by tracing converters. Imports diffusers when called.

Knows where converters need help: hard-coded published sizes, keys that some know by an older name, and tensors that a
variant of a family lacks. Layouts without a converter in diffusers are in `pool.lora_names.converters`. Does not know
the names in LoRA files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.families.modules import defined_families
from modelpool.pool.families.parts.forward import LayoutNames
from modelpool.pool.families.parts.hunyuan import original_key
from modelpool.pool.formats.safetensors_file import Shape
from modelpool.pool.keymaps.key_map import KeyMap, key_map_of
from modelpool.pool.keymaps.provenance import Origin, Segment, UntraceableOperationError, rows_of, trace
from modelpool.pool.lora_names.converters import EXTRA_CONVERTERS
from modelpool.pool.models.common.diffusers_private import Converter, diffusion_converter

Shapes = Mapping[str, Shape]

#: maximum number of tensors of a family's converter that a variant may lack
MAX_MISSING = 16
#: placeholder of a missing source tensor; it can be cut in two, three and six
PLACEHOLDER_SHAPE = (6, 1)


@dataclass(frozen=True, slots=True)
class FixedCuts:
    """A converter that cuts tensors at the rows of the published model, whatever their size.

    keys       the tensors, as a pattern that is searched in the key
    published  end row of each piece, as the converter cuts
    actual     the same for a tensor of a given key in a model of given shapes
    """

    keys: re.Pattern[str]
    published: tuple[int, ...]
    actual: Callable[[Shapes, str], tuple[int, ...]]


def _flux_cuts(shapes: Shapes, key: str) -> tuple[int, ...]:
    """Queries, keys and values have the width of the model; the other rows are the hidden layer."""
    hidden = _width(shapes, "txt_in.weight")
    return hidden, 2 * hidden, 3 * hidden, shapes[key][0]


def _hunyuan_cuts(shapes: Shapes, key: str) -> tuple[int, ...]:
    """Same as Flux."""
    hidden = _width(shapes, "img_in.proj.weight")
    return hidden, 2 * hidden, 3 * hidden, shapes[key][0]


def _width(shapes: Shapes, key: str) -> int:
    if key not in shapes:
        raise UnknownArchitecture(f"found no {key}, expected it, as it determines the width of the model")
    return shapes[key][0]


def _lumina_cuts(shapes: Shapes, key: str) -> tuple[int, ...]:
    """Queries have the width of the model; keys and values share the other rows."""
    rows, hidden = shapes[key][0], _width(shapes, "x_embedder.weight")
    return hidden, (hidden + rows) // 2, rows


_SINGLE_BLOCKS = re.compile(r"^single_blocks\.\d+\.linear1\.(weight|bias)$")
_FLUX_CUTS = FixedCuts(_SINGLE_BLOCKS, (3072, 6144, 9216, 21504), _flux_cuts)
FIXED_CUTS: Mapping[str, FixedCuts] = {
    "flux": _FLUX_CUTS,
    "chroma": _FLUX_CUTS,
    "hunyuan_video": replace(_FLUX_CUTS, actual=_hunyuan_cuts),
    "lumina2": FixedCuts(re.compile(r"\.attention\.qkv\.weight$"), (2304, 3072, 3840), _lumina_cuts),
}

_SECOND_TEXT = (
    ("byt5_in.layernorm.", "context_embedder_2.norm."),
    ("byt5_in.net.0.proj.", "context_embedder_2.linear_1."),
    ("byt5_in.net.2.", "context_embedder_2.linear_2."),
    ("byt5_in.fc3.", "context_embedder_2.linear_3."),
)
#: families with the layout of another and no converter, and the prefixes that differ in diffusers
CONVERTED_LIKE: Mapping[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "hunyuan_image": (
        "hunyuan_video",
        (
            *_SECOND_TEXT,
            ("time_text_embed.", "time_guidance_embed."),
            ("time_r_in.in_layer.", "time_guidance_embed.timestep_embedder_r.linear_1."),
            ("time_r_in.out_layer.", "time_guidance_embed.timestep_embedder_r.linear_2."),
        ),
    ),
    "hunyuan_video_15": (
        "hunyuan_video",
        (
            *_SECOND_TEXT,
            ("time_text_embed.", "time_embed."),
            ("vision_in.proj.0.", "image_embedder.norm_in."),
            ("vision_in.proj.1.", "image_embedder.linear_1."),
            ("vision_in.proj.3.", "image_embedder.linear_2."),
            ("vision_in.proj.4.", "image_embedder.norm_out."),
            ("cond_type_embedding.", "cond_type_embed."),
        ),
    ),
}

#: converters of the project: of layouts that diffusers builds but does not convert
_CONVERTERS: Mapping[str, Converter] = {
    **EXTRA_CONVERTERS,
    **{
        family.name: family.convert
        for family in defined_families()
        if not isinstance(family.convert, str | LayoutNames)
    },
}
#: families that are published under the names of a layout with a converter
_LAYOUT_OF: Mapping[str, str] = {
    family.name: names.layout
    for family in defined_families()
    if (names := family.layout_names) is not None and names.layout != family.name
}
#: families whose query and key norms are named weight in newer files, and scale in the converters
SCALES_NAMED_WEIGHT = frozenset({"flux", "chroma", "flux2"})


def layout_map(family: str, shapes: Shapes, prefix: str = "") -> KeyMap:
    """Return the key map from a diffusion model's keys, which begin with `prefix`, to diffusers' names for its weights.

    A family without a known layout gives a map without parameters. Unlike the map that a module is built with, this one
    omits parameters made of tensors that the file lacks, and the companions of quantized weights. Raises
    UnknownArchitecture if so much is missing that the converter of `family` cannot convert the file.
    """
    family = _LAYOUT_OF.get(family, family)
    if family in CONVERTED_LIKE:
        relative, renames = CONVERTED_LIKE[family]
        like = layout_map(relative, shapes, prefix)
        return key_map_of(like.sources, {_renamed(key, renames): origin for key, origin in like.origins.items()})
    model_shapes = {
        k: tuple(shape) for k, shape in shapes.items() if k.startswith(prefix) and not _is_companion(k, shapes)
    }
    key_of = {_older_name(family, key.removeprefix(prefix)): key for key in model_shapes}
    bare = {name: model_shapes[key] for name, key in key_of.items()}
    convert = _CONVERTERS.get(family) or diffusion_converter(family, bare)
    if convert is None:
        return key_map_of(model_shapes, {})
    fixed = FIXED_CUTS.get(family)
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


def _older_name(family: str, name: str) -> str:
    if family == "hunyuan_video":
        return original_key(name)
    if family in SCALES_NAMED_WEIGHT and name.endswith((".query_norm.weight", ".key_norm.weight")):
        return name.removesuffix("weight") + "scale"
    return name


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
            raise UnknownArchitecture(f"{family}: found {len(shapes)} tensors that do not convert: {found}") from found
    raise UnknownArchitecture(
        f"{family}: found {len(shapes)} tensors, expected others, such as {next(iter(placeholders))}"
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
