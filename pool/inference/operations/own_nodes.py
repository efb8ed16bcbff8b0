"""`CustomNode`: a node that a user writes, found by its entry point. It is used only where the operator's configuration
lists it: then the catalog and the workers import it; a request only names it.

A distribution declares it in the group `modelpool.nodes`:

    [project.entry-points."modelpool.nodes"]
    edge_lines = "my_nodes.edges:EDGE_LINES"

Torch-free. Shape legend: H W height and width, T frames, C colours (3).
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from types import MappingProxyType
from typing import Any

import numpy as np

from modelpool.pool.inference.operations.operate import OPERATIONS
from modelpool.pool.inference.operations.operation import (
    IMAGE,
    LATENT,
    MASK,
    Inputs,
    Operation,
    Size,
    Sizes,
    need,
    size_of_result,
)
from modelpool.pool.values.core.errors import UnknownName, UnusableField, UserError, unusable_field
from modelpool.pool.values.core.node_listing import NodeListing, NodeSettingListing
from modelpool.pool.values.core.results import ImagePixels, Latent, Mask, Result, VideoFrames, VideoMask
from modelpool.pool.values.core.stage_params import SettingValue

#: the group of entry points of distributions with nodes
ENTRY_POINTS = "modelpool.nodes"
#: setting of a task that its digest has besides the settings of the node
VERSION = "@version"
#: of inputs and results
NODE_KINDS = (IMAGE, MASK, LATENT)
MAX_THREADS, MAX_NODE_BYTES, MAX_VERSION = 64, 64 << 30, 100
_TYPES: Mapping[Any, str] = MappingProxyType(
    {
        bool: "bool",
        int: "int",
        float: "float",
        str: "str",
        tuple[int, ...]: "tuple[int, ...]",
        tuple[float, ...]: "tuple[float, ...]",
    }
)
_DTYPES: Mapping[str, Any] = MappingProxyType({IMAGE: np.uint8, MASK: np.uint8, LATENT: np.float32})
_SETTING = "modelpool.setting"


@dataclass(frozen=True, slots=True)
class _Limits:
    """What a setting may be. `choices` of a text; () for any."""

    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()


def node_setting(
    default: Any, *, least: float | None = None, most: float | None = None, choices: Sequence[str] = ()
) -> Any:
    """Return a field of the settings of a node, with the values that it may have."""
    return field(default=default, metadata={_SETTING: _Limits(least, most, tuple(choices))})


@dataclass(frozen=True, slots=True)
class CustomNode:
    """A node of a user.

    version       of its results: it is part of the id of each task, so that a changed node is computed again
    inputs        kinds of its inputs by name: "image", "mask" or "latent"
    result        kind of its result
    settings      frozen dataclass of numbers, texts and tuples of numbers; all have defaults (`node_setting`)
    run           (settings, arrays by the names of the inputs) -> array. Equal arguments, equal bytes. Arrays are
                  read-only: an image [H, W, 3] or frames [T, H, W, 3] in uint8, a mask [H, W] or [T, H, W] in uint8
                  (255: regenerated), a latent [C, H, W] or [C, T, H, W] in float32
    size          (settings, sizes by the names of the inputs) -> `Size` of the result: it is known before anything runs
    optional      inputs that may be missing
    threads       CPU threads that torch has while it runs
    memory_bytes  that it needs besides its inputs, and the largest result; the run waits for no memory: a machine
                  that has less refuses it
    title, category  for the lists of nodes
    """

    version: str
    inputs: Mapping[str, str]
    result: str
    settings: type[Any]
    run: Callable[[Any, Mapping[str, Any]], Any]
    size: Callable[[Any, Sizes], Size]
    optional: frozenset[str] = frozenset()
    threads: int = 1
    memory_bytes: int = 1 << 30
    title: str = ""
    category: str = "own"


@dataclass(frozen=True, slots=True)
class OpenedNode:
    """A node of a user that was imported and checked, as an operation."""

    name: str
    declared: CustomNode
    operation: Operation
    listing: NodeListing

    def parsed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings in which tuples of numbers that are texts, as in ComfyUI's workflows, are tuples. Raises
        UnusableField."""
        tuples = {one.name: one.type for one in self.listing.settings if one.type.startswith("tuple")}
        return {
            name: _numbers(f"{self.name}: {name}", value, tuples[name]) if name in tuples else value
            for name, value in settings.items()
        }

    def work_settings(self, settings: Sequence[tuple[str, SettingValue]]) -> tuple[tuple[str, SettingValue], ...]:
        """Return the settings of a task: with the version, so that its id has it."""
        return ((VERSION, self.declared.version), *settings)


def _numbers(what: str, value: Any, kind: str) -> Any:
    """Return the numbers of a text with commas; other values as they are."""
    if not isinstance(value, str):
        return value
    make: Callable[[str], float] = int if "int" in kind else float
    try:
        return tuple(make(part) for part in value.replace(",", " ").split())
    except ValueError:
        raise unusable_field(what, value[:100], "numbers with commas") from None


#: none
NO_NODES: Mapping[str, OpenedNode] = MappingProxyType({})


class NodeFailed(UserError):
    """A node of a user raised an error, or returned something else than it declares."""


def open_nodes(names: Sequence[str]) -> Mapping[str, OpenedNode]:
    """Import the nodes that an operator has listed. Raises UserError for one that is not installed, is installed twice,
    or is declared wrongly; the message names it."""
    if not names:
        return NO_NODES
    points: dict[str, list[metadata.EntryPoint]] = {}
    for point in metadata.entry_points(group=ENTRY_POINTS):
        if point.value not in (known.value for known in points.get(point.name, ())):
            points.setdefault(point.name, []).append(point)
    return MappingProxyType({name: _opened(name, points) for name in dict.fromkeys(names)})


def _opened(name: str, points: Mapping[str, Sequence[metadata.EntryPoint]]) -> OpenedNode:
    where = f"[workflows] nodes: {name}"
    found = points.get(name, ())
    if not found:
        known = ", ".join(sorted(points)) or "none"
        raise UnknownName(f"{where}: no installed distribution has it in the group {ENTRY_POINTS}; found {known}")
    if len(found) > 1:
        owners = ", ".join(sorted(point.dist.name if point.dist is not None else point.value for point in found))
        raise UserError(f"{where}: several distributions have it: {owners}; expected one")
    try:
        declared = found[0].load()
    except Exception as error:
        raise UserError(f"{where}: {found[0].value} cannot be imported: {type(error).__name__}: {error}") from error
    try:
        return checked_node(name, declared)
    except UserError as problem:
        raise type(problem)(f"{where}: {problem}") from None


def checked_node(name: str, declared: Any) -> OpenedNode:
    """Return a declared node as an operation. Raises UserError for a declaration that cannot be used."""
    if not isinstance(declared, CustomNode):
        raise unusable_field("entry point", type(declared).__name__, "an object of modelpool.CustomNode")
    if not name.isidentifier() or name in OPERATIONS:
        raise unusable_field("name", name, "an identifier that no operation of the pool has")
    if not isinstance(declared.version, str) or not 0 < len(declared.version) <= MAX_VERSION:
        raise unusable_field("version", declared.version, f"a text of 1 to {MAX_VERSION} characters")
    for what, kind in (*declared.inputs.items(), ("result", declared.result)):
        if kind not in NODE_KINDS:
            raise unusable_field(what, kind, f"one of {', '.join(NODE_KINDS)}")
    if unknown := sorted(declared.optional - declared.inputs.keys()):
        raise unusable_field("optional", ", ".join(unknown), f"names of inputs: {', '.join(declared.inputs)}")
    need("threads", declared.threads, 1, MAX_THREADS)
    need("memory_bytes", declared.memory_bytes, 1, MAX_NODE_BYTES)
    settings = _settings_of(declared)
    params = dataclasses.make_dataclass(
        f"{name}_settings",
        [(one.name, one.type, field(default=one.default)) for one in settings],
        frozen=True,
        slots=True,
    )
    inputs, kept = dict(declared.inputs), tuple(settings)
    operation = Operation(
        name,
        params,
        MappingProxyType(inputs),
        declared.result,
        lambda values, given: _run(name, declared, values, given),
        lambda values, sizes: _size(name, declared, kept, values, sizes),
        declared.optional,
    )
    listing = NodeListing(
        name,
        declared.version,
        declared.title or name,
        declared.category,
        tuple(inputs.items()),
        tuple(sorted(declared.optional)),
        declared.result,
        kept,
    )
    return OpenedNode(name, declared, operation, listing)


def _settings_of(declared: CustomNode) -> list[NodeSettingListing]:
    if not dataclasses.is_dataclass(declared.settings):
        raise unusable_field("settings", str(declared.settings), "a dataclass")
    hints = typing.get_type_hints(declared.settings)
    found = []
    for one in dataclasses.fields(declared.settings):
        kind = _TYPES.get(hints[one.name])
        if kind is None or one.default is dataclasses.MISSING or one.name in declared.inputs:
            expected = "bool, int, float, str or a tuple of numbers, with a default, and no name of an input"
            raise unusable_field(f"settings: {one.name}", str(one.type), expected)
        limits: _Limits = one.metadata.get(_SETTING, _Limits())
        found.append(NodeSettingListing(one.name, kind, one.default, limits.least, limits.most, limits.choices))
    return found


def _settings(declared: CustomNode, values: Any) -> Any:
    """Return the settings in the class of the user."""
    return declared.settings(**{one.name: getattr(values, one.name) for one in dataclasses.fields(values)})


def _size(name: str, declared: CustomNode, known: Sequence[NodeSettingListing], values: Any, sizes: Sizes) -> Size:
    for one in known:
        value = getattr(values, one.name)
        for number in value if isinstance(value, tuple) else (value,):
            if (one.least is not None and number < one.least) or (one.most is not None and number > one.most):
                bounds = f"{'any' if one.least is None else one.least} to {'any' if one.most is None else one.most}"
                raise UnusableField(f"{name}: {one.name}: found {number}, expected {bounds}")
        if one.choices and value not in one.choices:
            raise UnusableField(f"{name}: {one.name}: found {str(value)[:100]!r}, expected {', '.join(one.choices)}")
    try:
        found = declared.size(_settings(declared, values), sizes)
    except UserError as problem:
        raise UnusableField(f"{name}: {problem}") from None
    except Exception as error:
        raise NodeFailed(f"{name}: its size raised {type(error).__name__}: {error}") from error
    whole = isinstance(found, Size) and all(type(each) is int for each in (found.width, found.height, found.frames))
    if not whole or found.width < 1 or found.height < 1 or found.frames < 0:
        raise NodeFailed(f"{name}: its size is {found!r}, expected a Size with sides of at least 1")
    return found


def _run(name: str, declared: CustomNode, values: Any, inputs: Inputs) -> Result:
    """Return the checked result of a node. Raises NodeFailed, which names it."""
    where = f"{name} (version {declared.version})"
    given = {each: _array_of(value) for each, value in inputs.items() if value is not None}
    sizes = {each: size_of_result(value) for each, value in inputs.items() if value is not None}
    try:
        made = declared.run(_settings(declared, values), MappingProxyType(given))
    except UserError as problem:
        raise NodeFailed(f"{where}: {problem}") from problem
    except Exception as error:
        raise NodeFailed(f"{where}: {type(error).__name__}: {error}") from error
    expected = declared.size(_settings(declared, values), sizes)
    array = _checked_array(where, declared, made, expected)
    if declared.result == MASK:
        return VideoMask(array) if expected.frames else Mask(array)
    if declared.result == LATENT:
        return Latent(array)
    if not expected.frames:
        return ImagePixels(array)
    rate = next((value.frame_rate for value in inputs.values() if isinstance(value, VideoFrames)), 24.0)
    return VideoFrames(array, rate)


def _checked_array(where: str, declared: CustomNode, made: Any, size: Size) -> Any:
    """Return a copy of what a node returned. Raises NodeFailed unless it has the declared kind and size."""
    kind, dtype = declared.result, _DTYPES[declared.result]
    if not isinstance(made, np.ndarray) or made.dtype != dtype:
        found = f"an array of {made.dtype}" if isinstance(made, np.ndarray) else type(made).__name__
        raise NodeFailed(
            f"{where}: returned {found}, expected an array of {np.dtype(dtype).name} for a value of kind {kind}"
        )
    frames = (size.frames,) if size.frames else ()
    if kind == LATENT:
        fits = made.ndim == 3 + len(frames) and made.shape[1:] == (*frames, size.height, size.width)
        shape: tuple[Any, ...] = ("channels", *frames, size.height, size.width)
    else:
        shape = (*frames, size.height, size.width, *((3,) if kind == IMAGE else ()))
        fits = made.shape == shape
    if not fits:
        raise NodeFailed(f"{where}: returned the shape {made.shape}, expected ({', '.join(map(str, shape))})")
    if made.nbytes > declared.memory_bytes:
        raise NodeFailed(f"{where}: returned {made.nbytes} bytes, expected up to memory_bytes, {declared.memory_bytes}")
    if kind == LATENT and not np.isfinite(made).all():
        raise NodeFailed(f"{where}: returned numbers that are not finite")
    return made.copy()


def _array_of(value: Result) -> Any:
    match value:
        case ImagePixels():
            array: Any = value.pixels_HWC
        case VideoFrames():
            array = value.frames_THWC
        case Mask():
            array = value.values_HW
        case VideoMask():
            array = value.values_THW
        case Latent():
            array = value.samples_CHW
        case _:
            raise AssertionError(f"an input of no kind of nodes: {type(value).__name__}")
    view = array.view()
    view.flags.writeable = False
    return view
