"""The diffusers spelling of a checkpoint's keys, found by watching converters. Imports diffusers when it is asked.

Knows where converters need help: the published sizes that some have built in, keys that some call by an older name, and
tensors that a variant of a family does not have. Layouts without a converter in diffusers are in
`pool.lora_names.converters`. Does not know how LoRA files spell anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.formats.safetensors_file import Shape
from modelpool.pool.keymaps.key_map import KeyMap, key_map_of
from modelpool.pool.keymaps.provenance import Origin, Segment, UntraceableOperationError, rows_of, trace
from modelpool.pool.lora_names.converters import WRITTEN_CONVERTERS
from modelpool.pool.lora_names.hunyuan import original_key
from modelpool.pool.models.common.diffusers_private import Converter, diffusion_converter

Shapes = Mapping[str, Shape]

#: how many tensors a variant may miss of what its family's converter reads
MOST_MISSING = 16
#: a source that stands in for a tensor that is missing; it can be cut in two, three and six
STAND_IN_SHAPE = (6, 1)


@dataclass(frozen=True, slots=True)
class FixedCuts:
    """A converter that cuts tensors at the rows of the published model, whatever their size.

    keys       which tensors, as a pattern that is searched in the key
    published  the last row of each piece, plus one, as the converter cuts
    actual     the same for a tensor of a given key in a model of given shapes
    """

    keys: re.Pattern[str]
    published: tuple[int, ...]
    actual: Callable[[Shapes, str], tuple[int, ...]]


def _flux_cuts(shapes: Shapes, key: str) -> tuple[int, ...]:
    """Queries, keys and values are as wide as the model; the rest of the rows are the hidden layer."""
    hidden = _width(shapes, "txt_in.weight")
    return hidden, 2 * hidden, 3 * hidden, shapes[key][0]


def _hunyuan_cuts(shapes: Shapes, key: str) -> tuple[int, ...]:
    """As Flux."""
    hidden = _width(shapes, "img_in.proj.weight")
    return hidden, 2 * hidden, 3 * hidden, shapes[key][0]


def _width(shapes: Shapes, key: str) -> int:
    if key not in shapes:
        raise UnknownArchitecture(f"found no {key}, expected it to tell how wide the model is")
    return shapes[key][0]


def _lumina_cuts(shapes: Shapes, key: str) -> tuple[int, ...]:
    """Queries are as wide as the model; keys and values share the rest of the rows."""
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
#: families with the layout of another and no converter, and what diffusers calls otherwise in them
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

#: families whose query and key norms newer files call weight, and the converters scale
SCALES_NAMED_WEIGHT = frozenset({"flux", "chroma", "flux2"})


def layout_map(family: str, shapes: Shapes, prefix: str = "") -> KeyMap:
    """The key map from a diffusion model's keys, which begin with `prefix`, to diffusers' names for its weights.

    A family without a known layout gives a map without parameters. Unlike the map that a module is built by, this one
    leaves out parameters that are made of tensors which the file does not have, and what lies beside quantized weights.
    Raises UnknownArchitecture when so much is missing that the converter of `family` cannot make anything of the file.
    """
    if family in CONVERTED_LIKE:
        relative, renames = CONVERTED_LIKE[family]
        like = layout_map(relative, shapes, prefix)
        return key_map_of(like.sources, {_renamed(key, renames): origin for key, origin in like.origins.items()})
    own = {k: tuple(shape) for k, shape in shapes.items() if k.startswith(prefix) and not _is_companion(k, shapes)}
    called = {_older_name(family, key.removeprefix(prefix)): key for key in own}
    bare = {name: own[key] for name, key in called.items()}
    convert = WRITTEN_CONVERTERS.get(family) or diffusion_converter(family, bare)
    if convert is None:
        return key_map_of(own, {})
    fixed = FIXED_CUTS.get(family)
    cuts = {name: fixed.actual(bare, name) for name in bare if fixed and fixed.keys.search(name)}
    fed = {name: (fixed.published[-1], *shape[1:]) if fixed and name in cuts else shape for name, shape in bare.items()}
    origins = {
        key: _moved(origin, called, fixed, cuts)
        for key, origin in _trace_leniently(family, fed, convert).items()
        if all(segment.source in called for segment in origin.segments)
    }
    return key_map_of(own, origins)


def _is_companion(key: str, shapes: Shapes) -> bool:
    """Whether `key` is a scale or a marker of a quantized weight: beside a weight, and neither it nor its bias."""
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
    """As `trace`, with stand-ins for tensors that `convert` misses."""
    stand_ins: dict[str, Shape] = {}
    while len(stand_ins) <= MOST_MISSING:
        try:
            return trace({**shapes, **stand_ins}, convert)
        except KeyError as missing:
            if str(missing.args[0]) in stand_ins:  # it is no tensor that the converter misses
                break
            stand_ins[str(missing.args[0])] = STAND_IN_SHAPE
        except UntraceableOperationError:
            raise
        except (IndexError, RuntimeError, ValueError) as found:
            raise UnknownArchitecture(f"{family}: found {len(shapes)} tensors that do not convert: {found}") from found
    raise UnknownArchitecture(
        f"{family}: found {len(shapes)} tensors, expected others, such as {next(iter(stand_ins))}"
    )


def _moved(
    origin: Origin, called: Mapping[str, str], fixed: FixedCuts | None, cuts: Mapping[str, tuple[int, ...]]
) -> Origin:
    """`origin` with the file's own keys and rows."""
    segments = []
    for segment in origin.segments:
        start, end = segment.start, segment.start + segment.rows
        if fixed and segment.source in cuts:
            places = dict(zip((0, *fixed.published), (0, *cuts[segment.source]), strict=True))
            start, end = places[start], places[end]
        segments.append(Segment(called[segment.source], start, end - start))
    rows = sum(segment.rows for segment in segments)
    if origin.operations or rows == rows_of(origin.shape):
        return replace(origin, segments=tuple(segments))
    return replace(origin, segments=tuple(segments), shape=(rows, *origin.shape[1:]))
