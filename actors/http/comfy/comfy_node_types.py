"""Types of ComfyUI nodes and their inputs, and functions that declare inputs. Pure.

Nodes, inputs and outputs have the names of ComfyUI's API.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from modelpool.pool.values.core.errors import UserError

#: lists of names that the pool fills in
MODELS, LORAS, SAMPLER_NAMES, SCHEDULE_NAMES, IMAGES = "models", "loras", "samplers", "schedules", "images"
#: the same for files of videos and of audio
VIDEOS, AUDIOS = "videos", "audios"
#: the same for files that are looked up when the workflow runs: any name is accepted before
CONTROLNETS, UPSCALERS, STYLES, GLIGENS = "controlnets", "upscalers", "styles", "gligens"
#: the same for files that belong to a model of the pool: names are not read, and none is proposed
VAES, TEXT_ENCODERS, VISION_ENCODERS = "vaes", "text_encoders", "vision_encoders"
#: kinds of nodes with images that are previews, and no outputs
PREVIEW_NODES = frozenset(("PreviewImage", "MaskPreview", "MaskPreview+"))
#: types of values that are written in a node, and not linked
WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
#: the type of inputs and outputs that take every value
ANY = "*"
#: latents of audio that belongs to a video, which inputs of latents name as another type if they take them
SOUND = "SOUND"
MAX_SIDE, MAX_BATCH, MAX_SEED, MOST_GROWN = 16384, 64, 2**64 - 1, 64
#: what the editor writes next to the inputs of a node, and the server does not read
EDITOR_INPUTS = frozenset(
    ("control_after_generate", "control_before_generate", "upload", "image_upload", "choose file to upload")
)
#: between the id of a node and the name of one of the nodes that it stands for
PART = "/+"
#: inputs that must be in a workflow, though they have a default
_ALWAYS_WRITTEN = frozenset(("seed", "noise_seed", "value"))


#: where texts in boxes act
NO_NEGATIVE_BOXES = "negative: found texts in boxes of GLIGENTextBoxApply, expected them in positive alone"


class NodeUnsupported(UserError):
    """A node with values that ask for something that the pool does not do."""


#: what makes the outputs of a node from its inputs
Builder: TypeAlias = Callable[[Mapping[str, Any]], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class NodeInput:
    """An input of a node.

    type     of a link, or one of `WIDGET_TYPES`
    choices  the values of a COMBO: one of the lists that the pool fills in, or the values themselves. Of a STRING: the
             values that are proposed; () for a free text
    is_required  as ComfyUI lists it
    only_with  another input of the node and its values with which the editor shows this one: its value is in files of
               the editor with these alone
    also     another type of outputs that it may be linked to
    """

    name: str
    type: str
    default: Any = None
    least: float = 0.0
    most: float = 0.0
    choices: str | tuple[str, ...] = ()
    is_required: bool = True
    only_with: tuple[str, tuple[str, ...]] | None = None
    also: str = ""

    @property
    def may_be_missing(self) -> bool:
        """Whether a workflow may leave it out: it is optional, or has a default. Files of the editor, and of ComfyUI's
        earlier versions, lack settings that were added later. A seed must be there: all images would be one."""
        if not self.is_required or self.only_with is not None:
            return True
        return self.default not in (None, "") and self.name not in _ALWAYS_WRITTEN

    def is_shown(self, values: Mapping[str, Any]) -> bool:
        """Whether the editor shows it next to other values of its node."""
        return self.only_with is None or values.get(self.only_with[0]) in self.only_with[1]


@dataclass(frozen=True, slots=True)
class NodeType:
    """A kind of node. `build` returns its outputs from its inputs; the one called "node_id" is the id of the node."""

    name: str
    category: str
    inputs: tuple[NodeInput, ...]
    outputs: tuple[str, ...]
    build: Builder
    is_output: bool = False


def node_row(
    name: str, inputs: tuple[NodeInput, ...], build: Builder, *outputs: str, category: str, is_output: bool = False
) -> NodeType:
    """Return a kind of node, for the tables of them."""
    return NodeType(name, category, inputs, outputs, build, is_output)


def warn(given: Mapping[str, Any], message: str) -> None:
    """Tell the user what a node asks for and does not get. `given` are the inputs of the node, with "warn"."""
    if (tell := given.get("warn")) is not None:
        tell(message)


def warn_unread(given: Mapping[str, Any], name: str, reason: str, own: Any = None) -> None:
    """Tell the user that an input of a node is not read, unless it has the value `own`, with which that is the same."""
    if (found := given.get(name)) is not None and found != own:
        shown = f"{found:g}" if isinstance(found, float) else str(found)[:100]
        warn(given, f"{name}: found {shown}, which is not read: {reason}")


def owner_of(node_id: str) -> str:
    """Return the id of the node of the user that a node is a part of: its own, for one that is none."""
    return node_id.partition(PART)[0]


def only_in_workflows(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Refuse a node that no request without a workflow can express."""
    raise NodeUnsupported("it is a part of a workflow of several steps")


def check_parts(name: str, what: str, found: int, most: int) -> None:
    """Raise NodeUnsupported if a value would have more than `most` parts. What a node adds is checked before it is
    built."""
    if found > most:
        raise NodeUnsupported(f"{name}: found {found} {what}, expected up to {most}")


def sound_latent(name: str) -> NodeInput:
    """Return an input that is linked to latents, of audio of a video too."""
    return NodeInput(name, "LATENT", also=SOUND)


def link(name: str, kind: str, is_required: bool = True) -> NodeInput:
    """Return an input that is linked to an output of type `kind`."""
    return NodeInput(name, kind, is_required=is_required)


def whole(name: str, default: int, least: int, most: int, is_required: bool = True) -> NodeInput:
    """Return an input with a whole number."""
    return NodeInput(name, "INT", default, least, most, is_required=is_required)


def number(name: str, default: float, least: float, most: float, is_required: bool = True) -> NodeInput:
    """Return an input with a number."""
    return NodeInput(name, "FLOAT", default, least, most, is_required=is_required)


def text(name: str, default: str = "", is_required: bool = True, choices: str | tuple[str, ...] = ()) -> NodeInput:
    """Return an input with a text, for which one of `choices` is proposed."""
    return NodeInput(name, "STRING", default, choices=choices, is_required=is_required)


def flag(name: str, default: bool = False, is_required: bool = True) -> NodeInput:
    """Return an input that is on or off."""
    return NodeInput(name, "BOOLEAN", default, is_required=is_required)


def any_of(*names: str) -> tuple[NodeInput, ...]:
    """Return inputs that take everything, and may be missing."""
    return tuple(link(name, ANY, is_required=False) for name in names)


def combo(name: str, choices: str | tuple[str, ...], is_required: bool = True) -> NodeInput:
    """Return an input with one of `choices`: by default the first of values that are named here."""
    default = choices[0] if isinstance(choices, tuple) else None
    return NodeInput(name, "COMBO", default, choices=choices, is_required=is_required)


def chosen_by(name: str, *choices: str, inputs: tuple[NodeInput, ...]) -> tuple[NodeInput, ...]:
    """Return inputs that are there with some choices of the input `name` alone; their names begin with its name and a
    dot, as ComfyUI writes them."""
    return tuple(
        shown_with(name, choices, replace(each, name=f"{name}.{each.name}", is_required=False)) for each in inputs
    )


def is_one(value: float) -> bool:
    """Whether a number is 1: sliders of the editor give 1.0000000000000002."""
    return math.isclose(value, 1.0)


def shown_with(name: str, values: tuple[str, ...], given: NodeInput) -> NodeInput:
    """Return an input that a node has with some values of its input `name` alone."""
    return replace(given, only_with=(name, values))


def converted(given: NodeInput, value: Any) -> Any:
    """Return the written value of a widget in its type, converted as ComfyUI does: with int(), float(), str() and
    bool(). Raises ValueError. The texts of numbers are numbers, and a fraction is cut off a whole number. No text but
    "true" is a truth value, and "enable", as earlier versions of nodes wrote it: ComfyUI reads "false" as true.
    """
    if not isinstance(value, str | int | float):
        raise ValueError(f"no value of {given.type}")
    match given.type:
        case "INT":
            try:
                return int(value)
            except OverflowError:
                raise ValueError("no finite number") from None
        case "FLOAT":
            return _finite(value)
        case "BOOLEAN":
            if isinstance(value, str) and value.strip().lower() not in ("true", "enable"):
                raise ValueError("no truth value")
            return bool(value)
        case "STRING":
            return str(value)
        case "*":
            return value
    if not isinstance(value, str):
        raise ValueError("no name")
    return value


def _finite(value: str | float) -> float:
    try:
        found = float(value)
    except OverflowError:
        raise ValueError("no finite number") from None
    if not math.isfinite(found):
        raise ValueError("no finite number")
    return found


def file_stem(name: str) -> str:
    """Return the name of a model, LoRA or ControlNet from the name of its file."""
    stem = name.replace("\\", "/").rpartition("/")[2]
    for ending in (".safetensors", ".sft", ".gguf", ".ckpt", ".pt", ".pth", ".bin"):
        stem = stem.removesuffix(ending)
    return stem
