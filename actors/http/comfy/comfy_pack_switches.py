"""Custom nodes that pass on their links: switches, reroutes, pipes of several links. Pure.

They are here under their own names, with what their public descriptions say. `comfy_evaluation` follows them before a
workflow is compiled, so that the branch that is not chosen is not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

from modelpool.actors.http.comfy.comfy_node_types import (
    ANY,
    NodeInput,
    NodeType,
    NodeUnsupported,
    any_of,
    combo,
    flag,
    link,
    text,
    whole,
)

#: the outputs of a node, from its settings and from what is written or linked to its other inputs
Route: TypeAlias = "Callable[[Mapping[str, Any]], tuple[Any, ...] | None]"
_SWITCHED = 10


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """What a pipe carries: links and values, by name, and no other pipe. It is written and compared in no time."""

    values: Mapping[str, Any] = field(repr=False)


def unknown_route(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A node that is still there when the workflow is compiled: its choice failed."""
    raise NodeUnsupported(
        "its choice is not known: expected settings that are written, or computed from written values, and a link "
        "to what they choose"
    )


def _row(name: str, inputs: tuple[NodeInput, ...], *outputs: str) -> NodeType:
    return NodeType(name, "values", inputs, outputs, unknown_route)


def _flag(name: str, default: bool = True) -> NodeInput:
    return flag(name, default)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A kind of node, and the outputs that follow from its inputs."""

    kind: NodeType
    route: Route


def _one_of(name: str, flag: str, on: str, off: str, *more: Any, kind: str = ANY, default: bool = True) -> _Pass:
    """Return a node that passes one of two inputs on, as a truth value says; `more` are its other outputs."""
    types = tuple("STRING" for _ in more)
    inputs = (link(on, kind, is_required=False), link(off, kind, is_required=False), _flag(flag, default))
    return _Pass(_row(name, inputs, kind, *types), lambda given: _with(given, on if given[flag] else off, *more))


def _with(given: Mapping[str, Any], name: str, *more: Any) -> tuple[Any, ...] | None:
    return (given[name], *more) if name in given else None


def _by_place(name: str, setting: str, first: int, inputs: tuple[str, ...], *more: str, kind: str = ANY) -> _Pass:
    """Return a node that passes the input at a place on."""
    given_inputs = (
        whole(setting, first, first, first + len(inputs) - 1),
        *(link(each, kind, is_required=False) for each in inputs),
    )

    def route(given: Mapping[str, Any]) -> tuple[Any, ...] | None:
        return _with(given, inputs[given[setting] - first], *more)

    return _Pass(_row(name, given_inputs, kind, *("STRING" for _ in more)), route)


def _through(name: str, source: str, *settings: NodeInput, kind: str = ANY, required: bool = True) -> _Pass:
    """Return a node that passes one input on, whatever its settings are."""
    inputs = (link(source, kind, is_required=required), *settings)
    return _Pass(_row(name, inputs, kind), lambda given: _with(given, source))


def _several_through(name: str, sources: Mapping[str, str], *settings: NodeInput) -> _Pass:
    """Return a node that passes each of its inputs on."""
    inputs = (*settings, *(link(source, kind, is_required=False) for source, kind in sources.items()))
    return _Pass(_row(name, inputs, *sources.values()), lambda given: tuple(given.get(source) for source in sources))


def _pipe(
    name: str,
    kind: str,
    fields: Mapping[str, str],
    *,
    base: str = "",
    gives: tuple[str, ...] | None = None,
    with_pipe: bool = True,
    settings: tuple[NodeInput, ...] = (),
) -> _Pass:
    """Return a node of pipes of a type. It takes another pipe (`base`), of which its own inputs replace parts, and
    gives a pipe, and the parts `gives`, all by default. `settings` are parts that are written in the node."""
    parts = tuple(fields) if gives is None else gives
    inputs = ((link(base, kind, is_required=False),) if base else ()) + tuple(
        next((one for one in settings if one.name == each), link(each, of, is_required=False))
        for each, of in fields.items()
    )

    def route(given: Mapping[str, Any]) -> tuple[Any, ...] | None:
        before = given.get(base) if base else None
        if before is not None and not isinstance(before, Bundle):
            return None
        own = {each: given[each] for each in fields if each in given}
        if any(isinstance(each, Bundle) for each in own.values()):  # pipes in pipes double at each node
            return None
        values = {**({} if before is None else before.values), **own}
        return (*((Bundle(values),) if with_pipe else ()), *(values.get(each) for each in parts))

    outputs = (*((kind,) if with_pipe else ()), *(fields[each] for each in parts))
    return _Pass(_row(name, inputs, *outputs), route)


def _out_of_pipe(name: str, kind: str, source: str, fields: Mapping[str, str], with_pipe: bool) -> _Pass:
    """Return a node that gives what a pipe carries."""

    def route(given: Mapping[str, Any]) -> tuple[Any, ...] | None:
        pipe = given.get(source)
        if not isinstance(pipe, Bundle):
            return None
        return (*((pipe,) if with_pipe else ()), *(pipe.values.get(each) for each in fields))

    outputs = (*((kind,) if with_pipe else ()), *fields.values())
    return _Pass(_row(name, (link(source, kind),), *outputs), route)


def _pipes_joined(name: str, kind: str, fields: Mapping[str, str], first_alone: bool) -> _Pass:
    """Return a node that passes the first pipe on that carries anything, or the parts of all: later ones replace
    earlier ones."""
    names = tuple(f"ctx_{place:02}" for place in range(1, _SWITCHED + 1))

    def route(given: Mapping[str, Any]) -> tuple[Any, ...] | None:
        pipes = [given[each] for each in names if each in given]
        if any(not isinstance(pipe, Bundle) for pipe in pipes):
            return None
        filled = [pipe.values for pipe in pipes if pipe.values]
        values: dict[str, Any] = {}
        for each in filled[:1] if first_alone else filled:
            values |= each
        return (Bundle(values), *(values.get(each) for each in fields))

    inputs = tuple(link(each, kind, is_required=False) for each in names)
    return _Pass(_row(name, inputs, kind, *fields.values()), route)


def _switched(given: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """One of several inputs, its name, and its place."""
    name = f"input{given['select']}"
    return _with(given, name, name, given["select"])


def _in_case(given: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """The input of the first case that is the condition."""
    cases = {given[f"case_{place}"]: f"input_{place}" for place in (3, 2, 1)}
    return _with(given, cases.get(given["switch_condition"], "input_default"))


def _where_true(name: str, condition: str, on: str, off: str) -> _Pass:
    """Return a node that passes one of two inputs on, as a value is true, which may be of any type."""

    def route(given: Mapping[str, Any]) -> tuple[Any, ...] | None:
        value = given.get(condition)
        if isinstance(value, list | Bundle):  # what a node makes later
            return None
        return _with(given, on if value else off)

    return _Pass(_row(name, (link(condition, ANY), *any_of(on, off)), ANY), route)


def _camera(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a model of views from other sides is told: the side, the height and the distance of a camera, by eighths of
    a turn, steps of 30 degrees, and thirds of the zoom."""
    turn = given["horizontal_angle"] % 360
    side = _SIDES_OF_VIEW[int((turn + 22.5) // 45) % len(_SIDES_OF_VIEW)]
    heights = ((-15, "low-angle shot"), (15, "eye-level shot"), (45, "elevated shot"))
    height = next((name for bound, name in heights if given["vertical_angle"] < bound), "high-angle shot")
    distance = next(
        (name for bound, name in ((2, "wide shot"), (6, "medium shot")) if given["zoom"] < bound), "close-up"
    )
    return f"<sks> {side} {height} {distance}", None


def _ways(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The input, at the output of the truth value; nothing at the other one."""
    return (given.get("any"), None) if given["boolean"] else (None, given.get("any"))


_BASIC = {"model": "MODEL", "clip": "CLIP", "vae": "VAE", "positive": "CONDITIONING", "negative": "CONDITIONING"}
_EASY = {
    "model": "MODEL", "pos": "CONDITIONING", "neg": "CONDITIONING", "latent": "LATENT", "vae": "VAE", "clip": "CLIP",
    "image": "IMAGE",
}  # fmt: skip
_CONTEXT = {**_BASIC, "latent": "LATENT", "images": "IMAGE", "seed": ANY}
_BIG_CONTEXT = {
    **_CONTEXT,
    **dict.fromkeys(
        ("steps", "step_refiner", "cfg", "ckpt_name", "sampler", "scheduler", "clip_width", "clip_height",
         "text_pos_g", "text_pos_l", "text_neg_g", "text_neg_l"), ANY),
    "mask": "MASK",
    "control_net": "CONTROL_NET",
}  # fmt: skip
#: a turn to the right, by eighths
_SIDES_OF_VIEW = (
    "front view", "front-right quarter view", "right side view", "back-right quarter view", "back view",
    "back-left quarter view", "left side view", "front-left quarter view",
)  # fmt: skip
_RGTHREE, _BASIC_PIPE, _PIPE_LINE = "RGTHREE_CONTEXT", "BASIC_PIPE", "PIPE_LINE"
_FACTS_OF_VIDEO = {"fps": "FLOAT", "frame_count": "INT", "duration": "FLOAT", "width": "INT", "height": "INT"}
_SOURCE, _LOADED = ({f"{when}_{name}": kind for name, kind in _FACTS_OF_VIDEO.items()} for when in ("source", "loaded"))
_MODULE = {
    **{name: _EASY[name] for name in ("model", "pos", "neg", "latent", "vae", "clip")},
    "controlnet": "CONTROL_NET",
    "image": "IMAGE",
    "seed": ANY,
}
_PIPES = (
    _pipe("ToBasicPipe", _BASIC_PIPE, _BASIC, gives=()),
    _out_of_pipe("FromBasicPipe", _BASIC_PIPE, "basic_pipe", _BASIC, with_pipe=False),
    _out_of_pipe("FromBasicPipe_v2", _BASIC_PIPE, "basic_pipe", _BASIC, with_pipe=True),
    _pipe("EditBasicPipe", _BASIC_PIPE, _BASIC, base="basic_pipe", gives=()),
    _pipe("easy pipeIn", _PIPE_LINE, _EASY, base="pipe", gives=()),
    _pipe("CR Module Pipe Loader", _PIPE_LINE, _MODULE, gives=(), settings=(whole("seed", 0, 0, 2**64 - 1),)),
    _out_of_pipe("CR Module Input", _PIPE_LINE, "pipe", _MODULE, with_pipe=True),
    _pipe("CR Module Output", _PIPE_LINE, _MODULE, base="pipe", gives=()),
    _pipe("Bus Node", "BUS", _BASIC, base="bus"),
    _out_of_pipe("easy pipeOut", _PIPE_LINE, "pipe", {**_EASY, "seed": ANY}, with_pipe=True),
    _pipe("Context (rgthree)", _RGTHREE, _CONTEXT, base="base_ctx"),
    _pipe("Context Big (rgthree)", _RGTHREE, _BIG_CONTEXT, base="base_ctx"),
    _pipes_joined("Context Switch (rgthree)", _RGTHREE, _CONTEXT, first_alone=True),
    _pipes_joined("Context Switch Big (rgthree)", _RGTHREE, _BIG_CONTEXT, first_alone=True),
    _pipes_joined("Context Merge (rgthree)", _RGTHREE, _CONTEXT, first_alone=False),
    _pipes_joined("Context Merge Big (rgthree)", _RGTHREE, _BIG_CONTEXT, first_alone=False),
    *(
        _out_of_pipe(name, "VHS_VIDEOINFO", "video_info", facts, with_pipe=False)
        for name, facts in (
            ("VHS_VideoInfo", {**_SOURCE, **_LOADED}),
            ("VHS_VideoInfoSource", _SOURCE),
            ("VHS_VideoInfoLoaded", _LOADED),
        )
    ),
)
_WAS_KINDS = (
    ("Text Input Switch", "text", "STRING"), ("Image Input Switch", "image", "IMAGE"),
    ("Latent Input Switch", "latent", "LATENT"), ("Conditioning Input Switch", "conditioning", "CONDITIONING"),
    ("Model Input Switch", "model", "MODEL"), ("VAE Input Switch", "vae", "VAE"), ("CLIP Input Switch", "clip", "CLIP"),
)  # fmt: skip
_COMFYROLL_KINDS = (
    ("Image", "image", "IMAGE"), ("Latent", "latent", "LATENT"), ("Conditioning", "conditioning", "CONDITIONING"),
    ("Clip", "clip", "CLIP"), ("Model", "model", "MODEL"), ("ControlNet", "control_net", "CONTROL_NET"),
    ("VAE", "VAE", "VAE"), ("Text", "text", "STRING"),
)  # fmt: skip


def _as_link(kind: str) -> str:
    """Return the type of an input of a switch: texts may be written or linked."""
    return ANY if kind == "STRING" else kind


_SWITCHES = (
    _one_of("BooleanSwitchNode", "state", "on_true", "on_false"),
    _one_of("easy ifElse", "boolean", "on_true", "on_false"),
    _one_of("easy imageSwitch", "boolean", "image_a", "image_b", kind="IMAGE"),
    _one_of("ImpactConditionalBranch", "cond", "tt_value", "ff_value"),
    _one_of("LayerUtility: If ", "if_condition", "when_TRUE", "when_FALSE"),
    *(_one_of(name, "boolean", f"{part}_a", f"{part}_b", kind=_as_link(kind)) for name, part, kind in _WAS_KINDS),
    *(
        _one_of(f"Switch {name} [Crystools]", "boolean", "on_true", "on_false", kind=_as_link(kind))
        for name, kind in (("string", "STRING"), ("image", "IMAGE"), ("latent", "LATENT"), ("mask", "MASK"),
                           ("conditioning", "CONDITIONING"))
    ),
    *(
        _by_place(f"CR {name} Input Switch", "Input", 1, (f"{part}1", f"{part}2"), "", kind=_as_link(kind))
        for name, part, kind in _COMFYROLL_KINDS
    ),
    *(
        _by_place(f"CR {name} Input Switch (4 way)", "Input", 1, tuple(f"{part}{n}" for n in range(1, 5)), "",
                  kind=_as_link(kind))
        for name, part, kind in (("Image", "image", "IMAGE"), ("Text", "text", "STRING"))
    ),
    _by_place("easy anythingIndexSwitch", "index", 0, tuple(f"value{place}" for place in range(_SWITCHED))),
    _by_place("easy imageIndexSwitch", "index", 0, tuple(f"image{place}" for place in range(_SWITCHED)), kind="IMAGE"),
    _by_place("easy textIndexSwitch", "index", 0, tuple(f"text{place}" for place in range(_SWITCHED))),
    _by_place("easy conditioningIndexSwitch", "index", 0, tuple(f"cond{place}" for place in range(_SWITCHED)),
              kind="CONDITIONING"),
    _by_place("easy textSwitch", "input", 1, ("text1", "text2")),
    *(
        _Pass(
            _row(
                name,
                (
                    whole("select", 1, 1, 999),
                    flag("sel_mode", False, is_required=False),
                    *(link(f"input{place}", kind, is_required=False) for place in range(1, _SWITCHED + 1)),
                ),
                *(kind, "STRING", "INT"),
            ),
            _switched,
        )
        for name, kind in (("ImpactSwitch", ANY), ("LatentSwitch", "LATENT"))
    ),
    _Pass(
        _row(
            "LayerUtility: SwitchCase",
            (
                link("input_default", ANY),
                text("switch_condition"),
                *(text(f"case_{place}") for place in (1, 2, 3)),
                *any_of(*(f"input_{place}" for place in (1, 2, 3))),
            ),
            ANY,
        ),
        _in_case,
    ),
    _Pass(_row("Switch from any [Crystools]", (link("any", ANY), _flag("boolean")), ANY, ANY), _ways),
    _where_true("If ANY execute A else B", "ANY", "IF_TRUE", "IF_FALSE"),
    _where_true("SimpleCondition+", "evaluate", "on_true", "on_false"),
)  # fmt: skip


def _image_and_mask(given: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return the image and the mask at a place, without a mask if none is linked; None without an image."""
    place = given["select"]
    image = given.get(f"images{place}" if place == 1 else f"images{place}_opt")
    return None if image is None else (image, given.get(f"mask{place}_opt"))


def _ways_by_place(given: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """The input, at the output of the place; nothing at the other ones."""
    if "input" not in given:
        return None
    return tuple(given["input"] if place == given["select"] else None for place in range(1, _SWITCHED + 1))


_MORE_SWITCHES = (
    *(
        _by_place(f"{name} Switch (JPS)", "select", 1, tuple(f"{part}_{place}" for place in range(1, 6)),
                  kind=_as_link(kind))
        for name, part, kind in (("Conditioning", "con", "CONDITIONING"), ("Latent", "latent", "LATENT"))
    ),
    _by_place("CR Pipe Switch", "Input", 1, ("pipe1", "pipe2"), kind=_PIPE_LINE),
    _Pass(
        _row(
            "ImageMaskSwitch",
            (whole("select", 1, 1, 4), link("images1", "IMAGE"), link("mask1_opt", "MASK", is_required=False),
             *(link(f"{name}{place}_opt", kind, is_required=False) for place in (2, 3, 4)
               for name, kind in (("images", "IMAGE"), ("mask", "MASK")))),
            *("IMAGE", "MASK"),
        ),
        _image_and_mask,
    ),
    _Pass(_row("ImpactInversedSwitch", (whole("select", 1, 1, 999), link("input", ANY),
                                        flag("sel_mode", False, is_required=False)), *[ANY] * _SWITCHED),
          _ways_by_place),
)  # fmt: skip
_TELLING = (combo("mode", ("always", "on empty queue"), is_required=False),)
_PASSED = (
    _through("easy showAnything", "anything", required=False),
    _through("easy cleanGpuUsed", "anything"),
    _through("easy clearCacheAll", "anything"),
    _through(
        "PlaySound|pysssss", "any", *_TELLING, NodeInput("volume", "FLOAT", 0.5, 0.0, 1.0), text("file", "", False)
    ),
    _through("SystemNotification|pysssss", "any", text("message", "", False), *_TELLING, required=False),
    _through("LayerUtility: AnyRerouter", "any"),
    _through("LayerUtility: PurgeVRAM V2", "anything", _flag("purge_cache"), _flag("purge_models")),
    _through("DebugPrint", "ANY"),
    _through("Combo Clone", "combo"),
    _through("ImagePass", "image", kind="IMAGE"),
    _through("ModelPassThrough", "model", kind="MODEL"),
    _through("Sleep", "input", whole("minutes", 0, 0, 1439), NodeInput("seconds", "FLOAT", 0.0, 0.0, 59.99)),
    _several_through(
        "VRAM_Debug",
        {"any_input": ANY, "image_pass": "IMAGE", "model_pass": "MODEL"},
        *(_flag(name) for name in ("empty_cache", "gc_collect", "unload_all_models")),
    ),
    _several_through("ImpactExecutionOrderController", {"signal": ANY, "value": ANY}),
)
_CLEANING = (
    _through("VRAMCleanup", "anything", _flag("offload_model"), _flag("offload_cache")),
    _through(
        "RAMCleanup",
        "anything",
        *(_flag(f"clean_{name}") for name in ("file_cache", "processes", "dlls")),
        whole("retry_times", 3, 1, 10),
    ),
    _through("UnloadAllModels", "value"),
    _through(
        "Free_Video_Memory",
        "images",
        *(text(name, "disable", False) for name in ("aggressive_cleanup", "report_memory")),
        kind="IMAGE",
    ),
    *(
        _through(f"FreeMemory{name}", name.lower(), flag("aggressive", False, is_required=False), kind=kind)
        for name, kind in (("Image", "IMAGE"), ("Latent", "LATENT"), ("Model", "MODEL"), ("CLIP", "CLIP"))
    ),
)
_CAMERA = _Pass(
    _row(
        "QwenMultiangleCameraNode",
        (
            whole("horizontal_angle", 0, 0, 360),
            whole("vertical_angle", 0, -90, 90),
            NodeInput("zoom", "FLOAT", 5.0, 0.0, 10.0),
            *(text(name, "", False) for name in ("default_prompts", "camera_view")),  # of the editor alone
            link("image", "IMAGE", is_required=False),
        ),
        *("STRING", "LOAD3D_CAMERA"),
    ),
    _camera,
)
_ROWS = (*_PIPES, *_SWITCHES, *_MORE_SWITCHES, *_PASSED, *_CLEANING, _CAMERA)
#: kinds of nodes that pass on their links
PACK_SWITCHES = tuple(each.kind for each in _ROWS)
#: what their outputs are, by kind; None where that is not known
ROUTES: Mapping[str, Route] = MappingProxyType({each.kind.name: each.route for each in _ROWS})
