"""Evaluates the nodes of a workflow that have no tensors: values, texts, numbers, reroutes and switches. Pure.

Links to them are replaced with what they give: a value, or a link to another node. What cannot be computed, because a
setting is wrong or comes from a node with tensors, stays as it is: the check of the workflow then names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from modelpool.actors.http.comfy.comfy_computing import ComputingWork
from modelpool.actors.http.comfy.comfy_images import LOADS_IMAGE
from modelpool.actors.http.comfy.comfy_node_types import (
    ANY,
    EDITOR_INPUTS,
    WIDGET_TYPES,
    NodeInput,
    NodeType,
    NodeUnsupported,
    converted,
)
from modelpool.actors.http.comfy.comfy_nodes import NODE_TYPES
from modelpool.actors.http.comfy.comfy_pack_loaders import LOADING_ROUTES
from modelpool.actors.http.comfy.comfy_pack_parts import PART_KINDS, parts_of
from modelpool.actors.http.comfy.comfy_pack_pipes import PipeParts
from modelpool.actors.http.comfy.comfy_pack_switches import ROUTES, Bundle
from modelpool.actors.http.comfy.comfy_sizes import (
    CORNERS_OF_CROPS,
    SIZE_NODES,
    SIZE_RULES,
    Pixels,
    nearest_of_xl,
    settled,
)
from modelpool.actors.http.comfy.comfy_value_nodes import COMPUTED_NODES, PASSING_NODES
from modelpool.actors.http.comfy.node_errors import NodeError, WorkflowRejected, link_of
from modelpool.actors.request.control_video_fields import VideoFile
from modelpool.pool.values.core.errors import UserError

#: the size of an image of the user, by its name; raises UserError
ImageSize: TypeAlias = "Callable[[str], Pixels]"
#: what nodes give before a workflow is compiled: values, links, and pipes of them; others are made then
_KNOWN = (str, bool, int, float, list, Bundle)
#: the node that takes a video apart
_COMPONENTS = "GetVideoComponents"
#: characters of the texts that the nodes of a workflow compute, all together
MAX_COMPUTED_CHARACTERS = 1 << 22


def evaluated(
    nodes: Mapping[str, Mapping[str, Any]],
    order: Sequence[str],
    kinds: Mapping[str, NodeType] = NODE_TYPES,
    image_size: ImageSize | None = None,
    video_facts: Callable[[str], VideoFile] | None = None,
    work: ComputingWork | None = None,
    warnings: dict[str, None] | None = None,
    sizes: dict[str, Pixels] | None = None,
) -> dict[str, Mapping[str, Any]]:
    """Return the nodes of `order` with the values of nodes without tensors, and of nodes of a size, and the nodes that
    others stand for in their place. Each is behind its sources in `order`, so that every node is evaluated once,
    whatever the graph. `warnings` gets the warnings of nodes, and `sizes` the known sizes of their results. Raises
    WorkflowRejected for too much text, for more `work` than there is room for, and naming every node that cannot be put
    in the place of another."""
    work = work or ComputingWork()
    nodes, order = dict(nodes), list(order)
    problems: list[NodeError] = []
    sizes = {} if sizes is None else sizes
    videos: dict[str, VideoFile] = {}
    found: dict[str, Mapping[str, Any]] = {}
    outputs: dict[str, tuple[Any, ...]] = {}
    characters = 0
    for node_id in order:
        node = nodes[node_id]
        kind = kinds[node["class_type"]]
        inputs = _with_values(nodes, node, kind, outputs)
        found[node_id] = {"class_type": node["class_type"], "inputs": inputs}
        is_linked = _is_linked(nodes, found[node_id], kinds)
        if is_linked and (video := _video_of(found[node_id], videos, video_facts)) is not None:
            videos[node_id], sizes[node_id] = video, (video.width, video.height)
            if kind.name == _COMPONENTS:
                outputs[node_id] = (None, None, video.frame_rate, "8", "sRGB")
            continue
        if is_linked and (settings := settled(kind.name, inputs, _sizes_of(found[node_id], sizes))):
            inputs = {name: value for name, value in {**inputs, **settings}.items() if value is not None}
            found[node_id] = {"class_type": node["class_type"], "inputs": inputs}
        if is_linked and (size := _size_of(found[node_id], kind, sizes, image_size)) is not None:
            sizes[node_id] = size
        is_passing = kind.name in ROUTES or kind.name in PART_KINDS
        is_linked = is_linked and (not is_passing or _fits(nodes, found[node_id], kind, kinds))
        try:
            parts = (
                _parts_of(node_id, found[node_id], kind, video_facts) if is_linked and kind.name in PART_KINDS else None
            )
        except NodeUnsupported as problem:
            message = "not supported by the pool"
            problems.append(NodeError(node_id, kind.name, "unsupported_value", message, str(problem)))
            continue
        if parts is not None:
            found.pop(node_id)
            # a node of the user with a part of its own id is an output, and no other node reads that part
            found |= {name: part for name, part in parts.nodes.items() if name == node_id}
            more = {name: part for name, part in parts.nodes.items() if name != node_id}
            nodes |= more
            place = order.index(node_id) + 1
            order[place:place] = more
            if warnings is not None:
                warnings |= dict.fromkeys(f"node {node_id} ({kind.name}): {warning}" for warning in parts.warnings)
            made: tuple[Any, ...] | None = parts.outputs
        else:
            made = _outputs_of(node_id, found[node_id], kind, sizes, work) if is_linked else None
        if made is None:
            continue
        outputs[node_id] = given = tuple(value if isinstance(value, _KNOWN) else None for value in made)
        characters += sum(len(value) for value in given if isinstance(value, str))
        if characters > MAX_COMPUTED_CHARACTERS:
            message = f"prompt: found more than {MAX_COMPUTED_CHARACTERS} characters in the texts that nodes compute"
            raise WorkflowRejected("invalid_prompt", message, is_over_bound=True)
    if problems:
        raise WorkflowRejected("prompt_outputs_failed_validation", "the workflow is not valid", problems)
    return found


def _parts_of(
    node_id: str, node: Mapping[str, Any], kind: NodeType, video_facts: Callable[[str], VideoFile] | None
) -> PipeParts | None:
    """Return the nodes that a node stands for; None if a setting is not known. Raises NodeUnsupported."""
    widgets = [each for each in kind.inputs if each.type in WIDGET_TYPES]
    # names of models are checked with the nodes that load them
    named = [each for each in widgets if each.type == "COMBO" and isinstance(each.choices, str)]
    settings = _settings(node, kind, [each for each in widgets if each not in named])
    if settings is None or any(not isinstance(node["inputs"].get(each.name), str) for each in named):
        return None
    return parts_of(node_id, kind, {**node["inputs"], **settings}, video_facts)


def _with_values(
    nodes: Mapping[str, Mapping[str, Any]],
    node: Mapping[str, Any],
    kind: NodeType,
    outputs: Mapping[str, tuple[Any, ...]],
) -> dict[str, Any]:
    """Return the inputs of a node, in which links to values of the right type are these values."""
    inputs = dict(node["inputs"])
    types = {given.name: given.type for given in kind.inputs}
    for name in inputs:
        link = link_of(node, name)
        if link is None or link[0] not in outputs or not 0 <= link[1] < len(outputs[link[0]]):
            continue
        made = NODE_TYPES[nodes[link[0]]["class_type"]].outputs[link[1]]
        if outputs[link[0]][link[1]] is None:  # an output that is made later
            continue
        if ANY in (made, types.get(name, ANY)) or made == types[name]:
            inputs[name] = outputs[link[0]][link[1]]
    return inputs


def _is_linked(nodes: Mapping[str, Mapping[str, Any]], node: Mapping[str, Any], kinds: Mapping[str, NodeType]) -> bool:
    """Whether all links of a node begin at an output."""
    links = [link for name in node["inputs"] if (link := link_of(node, name)) is not None]
    return all(
        source in nodes and 0 <= slot < len(kinds[nodes[source]["class_type"]].outputs) for source, slot in links
    )


def _fits(
    nodes: Mapping[str, Mapping[str, Any]], node: Mapping[str, Any], kind: NodeType, kinds: Mapping[str, NodeType]
) -> bool:
    """Whether what is linked to a node that passes it on is there, and has the types of its inputs: nobody else would
    name it."""
    for given in kind.inputs:
        if given.name not in node["inputs"] and given.is_required and given.type not in WIDGET_TYPES:
            return False
        if given.type in (ANY, *WIDGET_TYPES) or given.name not in node["inputs"]:
            continue
        if isinstance(node["inputs"][given.name], Bundle):
            continue
        link = link_of(node, given.name)
        if link is None or kinds[nodes[link[0]]["class_type"]].outputs[link[1]] not in (ANY, given.type):
            return False
    return True


def _video_of(
    node: Mapping[str, Any],
    videos: Mapping[str, VideoFile],
    video_facts: Callable[[str], VideoFile] | None,
) -> VideoFile | None:
    """Return the facts of the video of the user that a node loads, or takes apart; None if it is not known."""
    if node["class_type"] == _COMPONENTS:
        link = link_of(node, "video")
        return None if link is None else videos.get(link[0])
    name = node["inputs"].get("file")
    if node["class_type"] != "LoadVideo" or video_facts is None or not isinstance(name, str):
        return None
    try:
        return video_facts(name)
    except UserError:  # the video is looked up again later, with its node
        return None


def _size_of(
    node: Mapping[str, Any], kind: NodeType, sizes: Mapping[str, Pixels], image_size: ImageSize | None
) -> Pixels | None:
    """Return the size of what a node makes; None if it is not known."""
    if kind.name in LOADS_IMAGE and image_size is not None and isinstance(name := node["inputs"].get("image"), str):
        try:
            return image_size(name)
        except UserError:  # the image is read again later, with its node
            return None
    rule = SIZE_RULES.get(kind.name)
    # names of files, samplers and the like say nothing about a size
    wanted = [each for each in kind.inputs if each.type in WIDGET_TYPES and not isinstance(each.choices, str)]
    settings = None if rule is None else _settings(node, kind, wanted)
    if rule is None or settings is None:
        return None
    links = {name: link[0] for name in node["inputs"] if (link := link_of(node, name)) is not None}
    return rule({**links, **settings}, _sizes_of(node, sizes))


def _sizes_of(node: Mapping[str, Any], sizes: Mapping[str, Pixels]) -> dict[str, Pixels]:
    """Return the sizes of what a node is linked to, by its inputs, as far as they are known."""
    links = {name: link[0] for name in node["inputs"] if (link := link_of(node, name)) is not None}
    return {name: sizes[source] for name, source in links.items() if source in sizes}


def _outputs_of(
    node_id: str, node: Mapping[str, Any], kind: NodeType, sizes: Mapping[str, Pixels], work: ComputingWork
) -> tuple[Any, ...] | None:
    """Return what a node gives: values, or links; None if it has tensors, or cannot be evaluated. `sizes` has the size
    of the image that it makes, if it is known."""
    inputs = node["inputs"]
    if kind.name in SIZE_NODES:
        source, outputs = SIZE_NODES[kind.name]
        link = link_of(node, source)
        size = None if link is None else sizes.get(node_id if kind.name in SIZE_RULES else link[0])
        if size is None:
            return None
        width, height = size  # how many images there are is not known
        known = {"width": width, "height": height, "image": inputs.get(source), "longest": max(size)}
        known["sdxl_width"], known["sdxl_height"] = nearest_of_xl(size)
        known["side"] = (min if inputs.get("side") == "Shortest" else max)(size)
        return tuple(known.get(each) for each in outputs)
    if kind.name in CORNERS_OF_CROPS:
        wanted = [each for each in kind.inputs if each.type in WIDGET_TYPES]
        settings, size = _settings(node, kind, wanted), _sizes_of(node, sizes).get("image")
        corner = None if settings is None or size is None else CORNERS_OF_CROPS[kind.name](settings, size)
        return None if corner is None else (None, *corner)
    if kind.name in PASSING_NODES:
        settings = _settings(node, kind, tuple(given for given in kind.inputs if given.type in WIDGET_TYPES))
        there = tuple(given.name for given in kind.inputs if given.type == ANY and given.name in inputs)
        chosen = None if settings is None else PASSING_NODES[kind.name](settings, there)
        return None if chosen is None or chosen not in inputs else (inputs[chosen],)
    if (route := ROUTES.get(kind.name) or LOADING_ROUTES.get(kind.name)) is not None:
        settings = _settings(node, kind, tuple(given for given in kind.inputs if given.type in WIDGET_TYPES))
        others = {given.name: inputs[given.name] for given in kind.inputs if given.name in inputs}
        try:
            return None if settings is None else route({**others, **settings})
        except NodeUnsupported:  # it is named when it is compiled
            return None
    if kind.name not in COMPUTED_NODES:
        return None
    settings = _settings(node, kind, kind.inputs)
    if settings is None:
        return None
    work.take(node_id, kind.name, settings)
    try:
        return kind.build(settings)
    except (NodeUnsupported, ArithmeticError):
        return None


def _settings(node: Mapping[str, Any], kind: NodeType, wanted: Sequence[NodeInput]) -> dict[str, Any] | None:
    """Return the written values of a node in their types, and the defaults of others; None if one is linked, missing
    or wrong."""
    found: dict[str, Any] = {}
    # next to an unknown name, a setting that is missing is more likely misspelt than left out
    names = {given.name for given in kind.inputs}
    has_unknown = bool(set(node["inputs"]) - names - EDITOR_INPUTS)
    for given in wanted:
        if given.name not in node["inputs"]:
            if not given.may_be_missing or (given.is_required and has_unknown):
                return None
            found[given.name] = given.default
            continue
        if link_of(node, given.name) is not None:
            return None
        try:
            value = converted(given, node["inputs"][given.name])
        except ValueError:
            return None
        if given.type in ("INT", "FLOAT") and not given.least <= value <= given.most:
            return None
        if given.type == "COMBO" and value not in given.choices:
            return None
        found[given.name] = value
    return found
