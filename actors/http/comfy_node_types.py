"""Types of ComfyUI nodes and their inputs, and functions that declare inputs. Pure.

The names of nodes, inputs and outputs are those of ComfyUI's API.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from modelpool.pool.core.errors import UserError

#: lists of names that the pool fills in
MODELS, LORAS, SAMPLER_NAMES, SCHEDULE_NAMES, IMAGES = "models", "loras", "samplers", "schedules", "images"
#: the same for files that are looked up when the workflow runs: any name is accepted before
CONTROLNETS, UPSCALERS, STYLES = "controlnets", "upscalers", "styles"
#: types of values that are written in a node, and not linked
WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
MAX_SIDE, MAX_BATCH, MAX_SEED, MOST_GROWN = 16384, 64, 2**64 - 1, 64


class NodeUnsupported(UserError):
    """A node whose values ask for something that the pool does not do."""


@dataclass(frozen=True, slots=True)
class NodeInput:
    """An input of a node.

    type     of a link, or one of `WIDGET_TYPES`
    choices  the values of a COMBO: one of the lists that the pool fills in, or the values themselves; () for any. Of a
             STRING: the list that is shown
    """

    name: str
    type: str
    default: Any = None
    least: float = 0.0
    most: float = 0.0
    choices: str | tuple[str, ...] = ()
    is_required: bool = True


@dataclass(frozen=True, slots=True)
class NodeType:
    """A kind of node. `build` returns its outputs from its inputs; the one called "node_id" is the id of the node."""

    name: str
    category: str
    inputs: tuple[NodeInput, ...]
    outputs: tuple[str, ...]
    build: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    is_output: bool = False


def check_parts(name: str, what: str, found: int, most: int) -> None:
    """Raise NodeUnsupported if a value would have more than `most` parts. What a node adds is checked before it is
    built."""
    if found > most:
        raise NodeUnsupported(f"{name}: found {found} {what}, expected up to {most}")


def link(name: str, kind: str, is_required: bool = True) -> NodeInput:
    """Return an input that is linked to an output of type `kind`."""
    return NodeInput(name, kind, is_required=is_required)


def whole(name: str, default: int, least: int, most: int, is_required: bool = True) -> NodeInput:
    """Return an input with a whole number."""
    return NodeInput(name, "INT", default, least, most, is_required=is_required)


def number(name: str, default: float, least: float, most: float, is_required: bool = True) -> NodeInput:
    """Return an input with a number."""
    return NodeInput(name, "FLOAT", default, least, most, is_required=is_required)


def text(name: str, default: str = "", is_required: bool = True, choices: str = "") -> NodeInput:
    """Return an input with a text, for which one of `choices` is proposed."""
    return NodeInput(name, "STRING", default, choices=choices, is_required=is_required)


def combo(name: str, choices: str | tuple[str, ...] = (), is_required: bool = True) -> NodeInput:
    """Return an input with one of `choices`."""
    return NodeInput(name, "COMBO", choices=choices, is_required=is_required)


def file_stem(name: str) -> str:
    """Return the name of a model, LoRA or ControlNet from the name of its file."""
    stem = name.replace("\\", "/").rpartition("/")[2]
    for ending in (".safetensors", ".sft", ".gguf", ".ckpt", ".pt", ".pth", ".bin"):
        stem = stem.removesuffix(ending)
    return stem
