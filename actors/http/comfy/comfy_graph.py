"""Converts a ComfyUI workflow in the API format to requests of the pool. Pure: images are read by a given function."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from modelpool.actors.http.comfy.comfy_cascade_nodes import decoder_fields, stage_c_of
from modelpool.actors.http.comfy.comfy_computing import ComputingWork
from modelpool.actors.http.comfy.comfy_image_nodes import UPSCALED_METHOD
from modelpool.actors.http.comfy.comfy_images import (
    LOADS_FRAMES,
    WorkflowImages,
    in_whole_cells,
    is_black,
    read_mask,
    read_steps,
)
from modelpool.actors.http.comfy.comfy_node_types import (
    ANY,
    AUDIOS,
    CONTROLNETS,
    EDITOR_INPUTS,
    GLIGENS,
    IMAGES,
    LORAS,
    MODELS,
    PREVIEW_NODES,
    SAMPLER_NAMES,
    SCHEDULE_NAMES,
    SOUND,
    STYLES,
    TEXT_ENCODERS,
    UPSCALERS,
    VAES,
    VIDEOS,
    VISION_ENCODERS,
    WIDGET_TYPES,
    NodeInput,
    NodeType,
    NodeUnsupported,
    check_parts,
    converted,
    file_stem,
    owner_of,
)
from modelpool.actors.http.comfy.comfy_nodes import NODE_TYPES
from modelpool.actors.http.comfy.comfy_pack_switches import Bundle
from modelpool.actors.http.comfy.comfy_refused_nodes import unknown_node
from modelpool.actors.http.comfy.comfy_request_fields import (
    PATCHES,
    acting_options,
    as_edited,
    blank_for,
    check_guidance,
    check_seen,
    clip_skip,
    controls_of,
    guidance_warning,
    guide_warnings,
    has_distilled_guidance,
    image_guidance,
    image_prompt_fields,
    image_prompts_of,
    is_one_image,
    lora_fields,
    makes_videos,
    negative_warnings,
    option_warnings,
    plain_text,
    reads_guidance,
    region_fields,
    seen_fields,
    seen_warnings,
    shift_of,
    silent_warnings,
    sound_fields,
    unread_warnings,
    whole_cells,
)
from modelpool.actors.http.comfy.comfy_values import (
    AUDIO_LATENTS,
    BlankLatent,
    ControlUse,
    DecodedImage,
    EncodedImage,
    ImageFile,
    ImagePromptUse,
    MaskFile,
    NodeImage,
    NodeMask,
    NoiseLevels,
    RegionUse,
    SampledLatent,
    SavedAs,
    ScaledLatent,
)
from modelpool.actors.http.comfy.node_errors import NodeError, WorkflowRejected, link_of
from modelpool.actors.http.service.shown_names import INPUT_MARK, shown_name
from modelpool.actors.request.audio_fields import AudioFile
from modelpool.actors.request.bounds import MAX_LORAS, MAX_PROMPT_CHARACTERS
from modelpool.actors.request.control_video_fields import VideoFile
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.inference.sampling.sampler_names import SAMPLERS, SCHEDULES
from modelpool.pool.values.core.errors import UserError, counted

if TYPE_CHECKING:
    from modelpool.pool.catalog.registry.listings import FileNames

#: how to get the API format, for messages
EXPORT_HINT = "export it with File > Export (API) in the editor"
#: in the `_meta` of a node that was converted from the editor's format: inputs with links to nodes that it lacks
LOST_LINKS = "lost_links"
#: nodes of a workflow, and nodes that save or preview images; published workflows have some dozen
MAX_NODES, MAX_OUTPUT_NODES = 1000, 256
#: noise levels that the nodes of a workflow list, all together
MAX_LISTED_LEVELS = 50_000
#: the method by which requests without a workflow scale latents
LATENT_METHOD = "bilinear"
#: ComfyUI's names of samplers that draw their noise on the GPU
_GPU_SAMPLERS = tuple(alias for each in SAMPLERS.values() for alias in each.aliases if alias.endswith("_gpu"))
#: the name of an embedding in a text. Source: `pool.models.text.chunks`
_EMBEDDING = re.compile(r"embedding:([^\s,()]+)")
#: types of links without which a node has nothing to work on
_NEEDED = ("MODEL", "CLIP", "VAE", "CONDITIONING", "LATENT", "IMAGE", "MASK")
#: values of images, and of masks
_TYPES: Mapping[str, tuple[type, ...]] = {
    "IMAGE": (ImageFile, NodeImage, DecodedImage),
    "MASK": (MaskFile, NodeMask),
}
#: names in the details of an error
_MOST_NAMED = 20


@dataclass(frozen=True, slots=True)
class PoolNames:
    """The names that nodes may choose. `models` has the titles of their families; `images` is None if any may be;
    `files` are proposed, and others may be chosen."""

    models: Mapping[str, str]
    loras: Sequence[str]
    images: Sequence[str] | None = None
    files: FileNames | None = None
    #: the kinds of nodes that work here; None: the pool's, without nodes of users
    known_kinds: Mapping[str, NodeType] | None = None
    #: width and height of an image of the user, by its name; raises UserError. None: they are not known
    image_size: Callable[[str], tuple[int, int]] | None = field(default=None, repr=False, compare=False)
    #: the facts of a video of the user, by its name; raises UserError. None: there are none
    video_facts: Callable[[str], VideoFile] | None = field(default=None, repr=False, compare=False)
    #: the names of these videos, which are proposed
    videos: Sequence[str] = ()
    #: the same of audio of the user
    audio_facts: Callable[[str], AudioFile] | None = field(default=None, repr=False, compare=False)
    audios: Sequence[str] = ()
    #: whether an image of the user has several frames, by its name; raises UserError. None: it is not known
    is_animation: Callable[[str], bool] | None = field(default=None, repr=False, compare=False)
    _sets: dict[str | tuple[str, ...], frozenset[str]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def kinds(self) -> Mapping[str, NodeType]:
        """The nodes that work here, by name."""
        return NODE_TYPES if self.known_kinds is None else self.known_kinds

    def choices(self, given: NodeInput) -> Sequence[str]:
        """Return the values of a COMBO, or those that are proposed for a STRING; () for any."""
        if not isinstance(given.choices, str) or not given.choices:
            return tuple(given.choices)
        lists: Mapping[str, Sequence[str]] = {
            MODELS: tuple(self.models),
            LORAS: self.loras,
            SAMPLER_NAMES: (*SAMPLERS, *_GPU_SAMPLERS),
            SCHEDULE_NAMES: tuple(SCHEDULES),
            IMAGES: self.images or (),
            CONTROLNETS: () if self.files is None else self.files.controlnets,
            UPSCALERS: () if self.files is None else self.files.upscalers,
            STYLES: () if self.files is None else self.files.image_prompts,
            GLIGENS: () if self.files is None else self.files.gligens,
            VIDEOS: self.videos,
            AUDIOS: self.audios,
            **dict.fromkeys((VAES, TEXT_ENCODERS, VISION_ENCODERS), ()),
        }
        return lists[given.choices]

    def has(self, given: NodeInput, value: str) -> bool:
        """Whether a value is one of the choices of a COMBO. Takes the same time for any number of them."""
        known = self._sets.get(given.choices)
        if known is None:
            known = self._sets[given.choices] = frozenset(self.choices(given))
        return value in known


class OutputNode(Protocol):
    """A node that saves or previews images, or sends them to web sockets (`is_sent`)."""

    @property
    def node_id(self) -> str:
        """Its id."""

    @property
    def is_preview(self) -> bool:
        """Whether its images are previews."""

    @property
    def is_sent(self) -> bool:
        """Whether its images are sent to web sockets."""

    @property
    def sampler_id(self) -> str:
        """The node that samples, for progress."""

    @property
    def made(self) -> tuple[Any, ...]:
        """What it saves: equal for nodes that save the same images."""

    @property
    def count(self) -> int:
        """The number of its images."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What nodes of its workflow ask for and do not get."""

    @property
    def is_animated(self) -> bool:
        """Whether its files are videos."""


@dataclass(frozen=True, slots=True)
class WorkflowOutput:
    """A node that saves or previews images, or sends them to web sockets (`is_sent`), and the sampler that generates
    them. `upscaler` enlarges them by `scale`, or by its own factor; "": none does."""

    node_id: str
    is_preview: bool
    latent: SampledLatent
    upscaler: str = ""
    scale: float | None = None
    is_sent: bool = False
    saved: SavedAs | None = None
    tiles: tuple[tuple[str, int], ...] = ()
    warnings: tuple[str, ...] = ()
    #: the same output as one with a workflow; raises WorkflowRejected
    as_graph: Callable[[], OutputNode] | None = field(default=None, compare=False)

    @property
    def sampler_id(self) -> str:
        """The node that samples, for progress."""
        return owner_of(self.latent.node_id)

    @property
    def is_animated(self) -> bool:
        """Whether its files are videos."""
        return self.saved is not None and self.saved.frame_rate > 0

    @property
    def made(self) -> tuple[Any, ...]:
        """What it saves: equal for nodes that save the same images."""
        return id(self.latent), self.upscaler, self.scale, self.saved, self.tiles

    @property
    def count(self) -> int:
        """The number of its images."""
        start: Any = self.latent.start
        while isinstance(start, ScaledLatent):
            start = start.latent.start
        return start.count if isinstance(start, BlankLatent) else 1


@dataclass(frozen=True, slots=True)
class KnownGraph:
    """A workflow of known nodes, with its names and what was evaluated so far."""

    nodes: Mapping[str, Mapping[str, Any]]
    names: PoolNames
    values: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    #: what nodes ask for and do not get, in order
    warnings: dict[str, None] = field(default_factory=dict)
    #: of the nodes that compute, which failed before and are computed again to name why
    work: ComputingWork = field(default_factory=ComputingWork, compare=False)
    #: width and height of what nodes make, as far as they are known
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict, compare=False)

    def unbuilt(self) -> KnownGraph:
        """Return a copy of the graph without built values and warnings."""
        return KnownGraph(self.nodes, self.names, work=self.work, sizes=self.sizes)

    def sizes_for(self, node_id: str) -> dict[str, tuple[int, int]]:
        """Return the sizes of what a node is linked to, by its inputs, as far as they are known."""
        node = self.nodes[node_id]
        links = {name: link[0] for name in node["inputs"] if (link := link_of(node, name)) is not None}
        return {name: self.sizes[source] for name, source in links.items() if source in self.sizes}

    def inputs_of(self, node_id: str) -> dict[str, Any]:
        """Return the inputs of a node, with its id, and its list of warnings. Its sources were evaluated. Raises
        WorkflowRejected for too much work."""
        node = self.nodes[node_id]
        name = node["class_type"]

        def warn(message: str) -> None:
            self.warnings[f"node {node_id} ({name}): {message}"] = None

        values = node_values(self, node, self.names.kinds[name])
        self.work.take(node_id, name, values)
        if unread := _unread_inputs(node, self.names.kinds[name]):
            warn(f"{', '.join(unread)[:1000]}: not read: the node has no such input here")
        if self.names.files is not None:
            for given in self.names.kinds[name].inputs:
                if (
                    given.type == "STRING"
                    and isinstance(values[given.name], str)
                    and "embedding:" in values[given.name]
                ):
                    values[given.name] = self._without_unknown(values[given.name], warn)
        return {**values, "node_id": node_id, "warn": warn}

    def _without_unknown(self, text: str, warn: Callable[[str], None]) -> str:
        """Return a text without the embeddings that the pool does not have: ComfyUI leaves them out, with a warning."""
        assert self.names.files is not None, "the names are known"
        known = {file_stem(name) for name in self.names.files.embeddings}

        def kept(match: re.Match[str]) -> str:
            if file_stem(match[1]) in known:
                return match[0]
            warn(f"the pool has no embedding {match[1][:100]!r}: it is left out")
            return ""

        return _EMBEDDING.sub(kept, text)


def output_nodes(nodes: Mapping[str, Mapping[str, Any]], kinds: Mapping[str, NodeType] = NODE_TYPES) -> list[str]:
    """Return the nodes that save or preview images. Raises WorkflowRejected for none, and for too many."""
    outputs = [node_id for node_id, node in nodes.items() if kinds[node["class_type"]].is_output]
    if not outputs:
        found = "the workflow has no node that saves or previews images"
        shows_text = any(node["class_type"] == "PreviewAny" for node in nodes.values())
        reason = ": PreviewAny shows texts in the editor, and the pool generates nothing for them" if shows_text else ""
        raise WorkflowRejected("prompt_no_outputs", found + reason)
    if len(outputs) > MAX_OUTPUT_NODES:
        saving = f"{counted(len(outputs), 'node')} that save or preview images"
        message = f"prompt: found {saving}, expected up to {MAX_OUTPUT_NODES}"
        raise WorkflowRejected("invalid_prompt", message, is_over_bound=True)
    return outputs


def request_outputs(
    nodes: Mapping[str, Mapping[str, Any]], outputs: Sequence[str], names: PoolNames, work: ComputingWork
) -> tuple[WorkflowOutput, ...]:
    """Return what these outputs of a workflow of known nodes generate, as far as requests without a workflow can say.
    Raises WorkflowRejected naming every wrong node."""
    graph = KnownGraph(nodes, names, work=work)
    errors: list[NodeError] = []
    listed_levels = 0
    for node_id in nodes_in_order(graph, outputs):
        node = graph.nodes[node_id]
        kind = names.kinds[node["class_type"]]
        found = list(input_errors(graph, node_id, node, kind))
        if not found and all(source in graph.values for source in sources_of(node)):
            try:
                graph.values[node_id] = kind.build(graph.inputs_of(node_id))
                for value in graph.values[node_id]:
                    if isinstance(value, SampledLatent):
                        check_guidance(value.positive, value.cfg, names.models.get(value.model.name, ""))
                        _sound_of(value, names)
            except NodeUnsupported as problem:
                found.append(node_error(node_id, node, "unsupported_value", "not supported by the pool", str(problem)))
            except ArithmeticError:  # powers and quotients of numbers that are permitted each
                message = "its numbers together have no finite result"
                found.append(node_error(node_id, node, "unsupported_value", "not supported by the pool", message))
            else:
                listed_levels += sum(len(v.sigmas) for v in graph.values[node_id] if isinstance(v, NoiseLevels))
                if listed_levels > MAX_LISTED_LEVELS:
                    message = f"prompt: found more than {MAX_LISTED_LEVELS} noise levels in all nodes together"
                    raise WorkflowRejected("invalid_prompt", message, is_over_bound=True)
        errors += found
    if errors:
        raise WorkflowRejected("prompt_outputs_failed_validation", "the workflow is not valid", errors)
    images = [(node_id, graph.values[node_id][0]) for node_id in outputs]
    kinds = {node_id: graph.nodes[node_id]["class_type"] for node_id in outputs}
    return tuple(
        WorkflowOutput(
            node_id,
            kinds[node_id] in PREVIEW_NODES,
            image.latent,
            image.upscaler,
            image.scale,
            kinds[node_id] == "SaveImageWebsocket",
            image.saved,
            image.tiles,
            tuple(dict.fromkeys((*graph.warnings, *_warnings_of_run(image.latent, names)))),
        )
        for node_id, image in images
        if isinstance(image, DecodedImage)
    )


def plain_requests(output: WorkflowOutput, names: PoolNames, images: WorkflowImages) -> list[GenerateRequest]:
    """Return a request for each image of an output: the images of a batch have seeds that count up. Raises UserError,
    also of `images`, and NodeUnsupported for what no request without a workflow can say."""
    latent = output.latent
    fields: dict[str, Any] = {}
    if isinstance(latent.start, ScaledLatent):
        fields["hires"] = _second_pass(latent, latent.start)
        latent = latent.start.latent
    fields |= decoder_fields(latent)
    fields |= _fields(stage_c_of(latent, names.models), names, images)
    if output.saved is not None:
        rate = fields.setdefault("frame_rate", output.saved.frame_rate) if output.saved.frame_rate else 0
        if rate != output.saved.frame_rate:
            found = f"{output.saved.frame_rate:g}, and {rate:g} for the model"
            raise NodeUnsupported(f"fps: found {found}, expected the same")
        fields |= output.saved.fields()
    fields |= dict(output.tiles)
    if output.upscaler:
        fields["upscale"] = {"model": output.upscaler, "scale": output.scale}
    first = GenerateRequest(**fields)
    if not latent.run_steps:
        first = first.without_steps()
    return [first, *(first.model_copy(update={"seed": latent.seed + place}) for place in range(1, output.count))]


def check_nodes(prompt: Any) -> None:
    """Raise WorkflowRejected for a workflow with nodes that do not work here: all that is known without the names of a
    pool."""
    known_nodes(prompt)


def known_nodes(prompt: Any, kinds: Mapping[str, NodeType] = NODE_TYPES) -> Mapping[str, Mapping[str, Any]]:
    """Return the nodes of a workflow, all of kinds that work here, without inputs that are null. Raises
    WorkflowRejected."""
    if not isinstance(prompt, dict) or not prompt:
        raise WorkflowRejected("no_prompt", "prompt: expected a workflow in the API format, nodes by their ids")
    if isinstance(prompt.get("nodes"), list):
        found = "prompt: found a part of a workflow as the editor saves it, with nodes and without links"
        raise WorkflowRejected("invalid_prompt", f"{found}; {EXPORT_HINT}")
    if len(prompt) > MAX_NODES:
        message = f"prompt: found {counted(len(prompt), 'node')}, expected up to {MAX_NODES}"
        raise WorkflowRejected("invalid_prompt", message, is_over_bound=True)
    errors: list[NodeError] = []
    unknown: list[NodeError] = []
    nodes: dict[str, Mapping[str, Any]] = {}
    lone = lone_nodes(prompt, kinds)
    for node_id, node in prompt.items():
        kind = node.get("class_type") if isinstance(node, dict) else None
        inputs = node.get("inputs") if isinstance(node, dict) else None
        inputs = {} if inputs is None else inputs
        if not isinstance(kind, str) or not isinstance(inputs, dict):
            damaged = "expected a table with class_type and inputs" if not isinstance(kind, str) else "expected a table"
            name = "inputs" if isinstance(kind, str) else ""
            class_type = kind[:100] if isinstance(kind, str) else ""
            errors.append(NodeError(node_id, class_type, "invalid_node", "the node is damaged", damaged, name))
        elif kind not in kinds:
            unknown += () if node_id in lone else (unknown_node(node_id, kind),)
        else:
            given = {name: value for name, value in inputs.items() if value is not None}
            nodes[node_id] = {"class_type": kind, "inputs": given}
    if errors:
        raise WorkflowRejected("invalid_prompt", "the workflow is damaged", errors)
    if not any(kinds[node["class_type"]].is_output for node in nodes.values()):  # one of them may be the output
        unknown += [unknown_node(node_id, prompt[node_id]["class_type"]) for node_id in lone]
    if unknown:
        listed = ", ".join(sorted({error.class_type for error in unknown})[:_MOST_NAMED])
        raise WorkflowRejected("missing_node_type", f"the pool does not have these nodes: {listed}", unknown)
    return nodes


def lone_nodes(prompt: Mapping[str, Any], kinds: Mapping[str, NodeType] = NODE_TYPES) -> dict[str, str]:
    """Return the warnings about nodes of unknown kinds that are linked to no other node, by their ids: whatever they
    do, no output needs them."""
    nodes = {
        node_id: node
        for node_id, node in prompt.items()
        if isinstance(node, dict) and isinstance(node.get("inputs") or {}, dict)
    }
    read = {source for node in nodes.values() for source in sources_of(node)}
    return {
        node_id: f"node {node_id} ({kind[:100]}) is left out: a node that is unknown, and linked to no other one"
        for node_id, node in nodes.items()
        if isinstance(kind := node.get("class_type"), str)
        and kind not in kinds
        and node_id not in read
        and not any(sources_of(node))
    }


def lost_link_warnings(prompt: Mapping[str, Any], needed: Collection[str]) -> Iterator[str]:
    """Yield warnings about links of the `needed` nodes to nodes that the editor's file does not have: it leaves them
    out, as the editor does, so that an optional input is not set."""
    for node_id, node in prompt.items():
        meta = node.get("_meta") if node_id in needed else None
        lost = meta.get(LOST_LINKS) if isinstance(meta, dict) else None
        for name, source in lost.items() if isinstance(lost, dict) else ():
            yield (
                f"node {node_id} ({node['class_type']}): the link of {str(name)[:100]} to node {str(source)[:100]} is "
                "left out: the workflow does not have this node"
            )


def animation_warnings(
    nodes: Mapping[str, Mapping[str, Any]], needed: Sequence[str], names: PoolNames
) -> Iterator[str]:
    """Yield warnings about loaded images with several frames: ComfyUI reads all of them, as a batch."""
    for node_id in needed:
        kind, image = nodes[node_id]["class_type"], nodes[node_id]["inputs"].get("image")
        if names.is_animation is None or kind not in LOADS_FRAMES or not isinstance(image, str):
            continue
        with suppress(UserError):  # the image is read again later, with its node
            if names.is_animation(image):
                yield f"node {node_id} ({kind}): image {image[:100]!r} has several frames: only the first is used"


def complete_outputs(
    nodes: Mapping[str, Mapping[str, Any]], outputs: Sequence[str], order: Sequence[str], kinds: Mapping[str, NodeType]
) -> tuple[list[str], tuple[str, ...]]:
    """Return the outputs of which all nodes have the links that they need, and warnings about the others: as in
    ComfyUI, these are not computed. All outputs, if none is complete. `order` comes from `nodes_in_order`."""
    missing: dict[str, str] = {}
    for node_id in order:
        node = nodes[node_id]
        kind, given = kinds[node["class_type"]], node["inputs"]
        needed = [each.name for each in kind.inputs if each.is_required and each.type not in (*WIDGET_TYPES, ANY)]
        absent = [name for name in needed if name not in given]
        # next to an unknown name, an input that is missing is more likely misspelt than left out
        if absent and not set(given) - {each.name for each in kind.inputs} - EDITOR_INPUTS:
            missing[node_id] = f"node {node_id} ({kind.name}) has no link to {', '.join(absent)}"
        elif found := next((missing[source] for source in sources_of(node) if source in missing), ""):
            missing[node_id] = found
    kept = [node_id for node_id in outputs if node_id not in missing]
    if not kept:
        return list(outputs), ()
    left = (
        f"node {node_id} ({nodes[node_id]['class_type']}) is left out: {missing[node_id]}"
        for node_id in outputs
        if node_id in missing
    )
    return kept, tuple(left)


def sources_of(node: Mapping[str, Any]) -> Iterator[str]:
    """Yield the ids of the nodes that an input of a node is linked to."""
    for name in node.get("inputs") or {}:
        if (link := link_of(node, name)) is not None:
            yield link[0]


def nodes_in_order(graph: KnownGraph, outputs: Sequence[str]) -> list[str]:
    """Return the nodes that the outputs need, each behind its sources. Raises WorkflowRejected for a cycle."""
    order: list[str] = []
    states: dict[str, int] = {}  # 1 while its sources are visited, 2 afterwards
    stack = list(reversed(outputs))
    while stack:
        node_id = stack[-1]
        if states.get(node_id) == 2:
            stack.pop()
        elif states.get(node_id) == 1:
            states[node_id] = 2
            order.append(stack.pop())
        else:
            states[node_id] = 1
            for source in sources_of(graph.nodes[node_id]):
                if source not in graph.nodes or states.get(source) == 2:
                    continue
                if states.get(source) == 1:
                    error = node_error(
                        node_id, graph.nodes[node_id], "dependency_cycle", "it depends on itself", source
                    )
                    raise WorkflowRejected("dependency_cycle", "the workflow has a cycle", [error])
                stack.append(source)
    return order


def node_error(
    node_id: str, node: Mapping[str, Any], kind: str, message: str, details: str, input_name: str = ""
) -> NodeError:
    return NodeError(node_id, node["class_type"], kind, message, details, input_name)


def input_errors(graph: KnownGraph, node_id: str, node: Mapping[str, Any], kind: NodeType) -> Iterator[NodeError]:
    """Yield the problems of the inputs of a node."""
    inputs = node.get("inputs", {})
    unknown = sorted(set(map(str, inputs)) - {given.name for given in kind.inputs} - EDITOR_INPUTS)
    for given in kind.inputs:
        if given.name not in inputs:
            # next to an unknown name, a setting that is missing is more likely misspelt than left out
            if not given.may_be_missing or (given.is_required and unknown):
                found = f"; found {', '.join(unknown[:_MOST_NAMED])[:1000]}, which is unknown" if unknown else ""
                details = f"{given.name}{found}"
                yield node_error(node_id, node, "required_input_missing", "an input is missing", details, given.name)
            continue
        link = link_of(node, given.name)
        if link is not None:
            found_errors = list(_link_errors(graph, node_id, node, given, link))
            yield from found_errors
            if not found_errors and given.type in WIDGET_TYPES and link[0] in graph.values:
                yield from _value_errors(graph.names, node_id, node, given, graph.values[link[0]][link[1]])
        elif given.type == ANY or isinstance(inputs[given.name], Bundle):
            continue
        elif given.type not in WIDGET_TYPES:
            details = f"{given.name}: expected a link to an output of type {given.type}"
            yield node_error(node_id, node, "bad_linked_input", "an input is not linked", details, given.name)
        else:
            yield from _value_errors(graph.names, node_id, node, given, inputs[given.name])


def model_errors(
    nodes: Mapping[str, Mapping[str, Any]], order: Sequence[str], names: PoolNames, kinds: Collection[str]
) -> Iterator[NodeError]:
    """Yield the problems of the models that nodes of these kinds name: other nodes take their place later."""
    for node_id in order:
        node = nodes[node_id]
        for given in names.kinds[node["class_type"]].inputs if node["class_type"] in kinds else ():
            written = node["inputs"].get(given.name)
            if given.type == "COMBO" and given.choices == MODELS and isinstance(written, str):
                yield from _value_errors(names, node_id, node, given, written)


def _link_errors(
    graph: KnownGraph, node_id: str, node: Mapping[str, Any], given: NodeInput, link: tuple[str, int]
) -> Iterator[NodeError]:
    source = graph.nodes.get(link[0])
    outputs = graph.names.kinds[source["class_type"]].outputs if source is not None else ()
    if not 0 <= link[1] < len(outputs):
        details = f"{given.name}: node {link[0]} has no output {link[1]}"
        yield node_error(node_id, node, "bad_linked_input", "an input is linked to nothing", details, given.name)
    elif (made := _type_of(graph, link, outputs[link[1]])) not in (given.type, given.also) and ANY not in (
        made,
        given.type,
    ):
        details = f"{given.name}: found {made}, expected {given.type}"
        yield node_error(node_id, node, "return_type_mismatch", "linked types differ", details, given.name)
    elif given.type == "LATENT" and given.also != SOUND and isinstance(_value_of(graph, link), AUDIO_LATENTS):
        details = f"{given.name}: found latents of audio, expected latents of images or frames: LTXVConcatAVLatent"
        yield node_error(node_id, node, "unsupported_value", "not supported by the pool", details, given.name)
    elif given.type in _NEEDED and link[0] in graph.values and graph.values[link[0]][link[1]] is None:
        details = f"{given.name}: output {link[1]} of node {link[0]} is empty: that node lacks the optional input"
        yield node_error(node_id, node, "bad_linked_input", "an input is linked to nothing", details, given.name)


def _value_of(graph: KnownGraph, link: tuple[str, int]) -> Any:
    """Return the value of an output; None if it was not evaluated."""
    return graph.values[link[0]][link[1]] if link[0] in graph.values else None


def _type_of(graph: KnownGraph, link: tuple[str, int], declared: str) -> str:
    """Return the type of an output; of one that may be of several, the type of its value, as far as it is known."""
    if declared != ANY or link[0] not in graph.values:
        return declared
    value = graph.values[link[0]][link[1]]
    return next((kind for kind, types in _TYPES.items() if isinstance(value, types)), ANY)


def _value_errors(
    names: PoolNames, node_id: str, node: Mapping[str, Any], given: NodeInput, written: Any
) -> Iterator[NodeError]:
    try:
        value = converted(given, written)
    except ValueError:
        details = f"{given.name}: found {str(written)[:100]!r}, expected {given.type}"
        yield node_error(node_id, node, "invalid_input_type", "a value has the wrong type", details, given.name)
        return
    if given.type in ("INT", "FLOAT") and not given.least <= value <= given.most:
        small = value < given.least
        bound = given.least if small else given.most
        details = f"{given.name}: found {str(written)[:100]}, expected at {'least' if small else 'most'} {bound:g}"
        error_kind = "value_smaller_than_min" if small else "value_bigger_than_max"
        yield node_error(node_id, node, error_kind, "a value is out of range", details, given.name)
    if given.type == "STRING" and len(value) > MAX_PROMPT_CHARACTERS:
        details = f"{given.name}: found {counted(len(value), 'character')}, expected up to {MAX_PROMPT_CHARACTERS}"
        yield node_error(node_id, node, "value_bigger_than_max", "a text is too long", details, given.name)
    any_image = given.choices == IMAGES and names.images is None
    if given.type == "COMBO" and given.choices and not any_image and not names.has(given, _chosen(given, value, names)):
        listed = ", ".join(names.choices(given)[:_MOST_NAMED])
        missing = "an image; none was uploaded" if given.choices == IMAGES else "a name of the pool, which has none"
        details = f"{given.name}: found {value[:100]!r}, expected {f'one of {listed}' if listed else missing}"
        yield node_error(node_id, node, "value_not_in_list", "a value is not one of the choices", details, given.name)


def _chosen(given: NodeInput, value: str, names: PoolNames) -> str:
    """Return the name that a value with choices means: models and other weights may be named by their files."""
    if given.choices in (MODELS, LORAS, CONTROLNETS, UPSCALERS, STYLES, GLIGENS) and not names.has(given, value):
        return file_stem(value)
    if given.choices != IMAGES:
        return value
    plain = value.removesuffix(INPUT_MARK)
    return shown if names.has(given, shown := shown_name(plain)) else plain


def _unread_inputs(node: Mapping[str, Any], kind: NodeType) -> list[str]:
    """Return the inputs of a node that its kind does not have here; tables and empty texts are of the editor."""
    known = {given.name for given in kind.inputs} | EDITOR_INPUTS
    found = node.get("inputs", {}).items()
    return sorted(name for name, value in found if name not in known and value != "" and not isinstance(value, dict))


def node_values(graph: KnownGraph, node: Mapping[str, Any], kind: NodeType) -> dict[str, Any]:
    """Return the inputs of a node: linked or written values, else its defaults."""
    values: dict[str, Any] = {}
    for given in kind.inputs:
        link = link_of(node, given.name)
        if link is not None:
            value = graph.values[link[0]][link[1]]
        else:
            value = node.get("inputs", {}).get(given.name, given.default)
        if given.type in WIDGET_TYPES and value is not None:
            value = converted(given, value)
        is_choice = given.type in ("COMBO", "STRING") and isinstance(value, str)
        values[given.name] = _chosen(given, value, graph.names) if is_choice else value
    return values


def _warnings_of_run(latent: SampledLatent, names: PoolNames) -> Iterator[str]:
    yield from guidance_warnings(latent, names)
    yield from _unread(latent, names)
    family = names.models.get(latent.model.name, "")
    seeing = latent if latent.positive.prior is None else latent.positive.prior
    yield from seen_warnings(seeing.positive, names.models.get(seeing.model.name, ""))
    yield from option_warnings(latent.node_id, latent.model, latent.cfg, family)
    yield from guide_warnings(latent.node_id, getattr(latent.start, "guides", ()), latent.model.name)
    if getattr(latent.start, "sound", None) is None:
        yield from silent_warnings(latent.node_id, latent.model.name, family)
    if isinstance(start := latent.start, ScaledLatent) and not _other_in(latent, start):
        method = UPSCALED_METHOD if start.via == "image" else LATENT_METHOD
        if start.method not in ("", method):
            yield (f"node {latent.node_id}: upscale_method {start.method} before it is not read: a second pass of a "
                   f"request has {method}")  # fmt: skip
        if latent.seed != start.latent.seed:
            yield (f"node {latent.node_id}: seed {latent.seed} is not read: a second pass of a request has the seed of "
                   f"the first, {start.latent.seed}")  # fmt: skip
    if latent.cfg != 1:
        family = names.models.get(latent.model.name, "")
        yield from negative_warnings(latent.node_id, latent.positive, latent.negative, family)


def guidance_warnings(latent: SampledLatent, names: PoolNames) -> tuple[str, ...]:
    """Return a warning about a guidance scale that a model does not read: as its input, or with a negative prompt."""
    family = names.models.get(latent.model.name, "")
    if latent.positive.guidance is None:
        if latent.cfg == 1 or not has_distilled_guidance(family):
            return ()
        reason = f"model {latent.model.name!r} has guidance as an input, of FluxGuidance"
        return (f"node {latent.node_id}: cfg {latent.cfg:g} is not read: {reason}",)
    if reads_guidance(family):
        return ()
    return (guidance_warning(latent.node_id, latent.positive.guidance, latent.model.name),)


def _unread(latent: SampledLatent, names: PoolNames) -> Iterator[str]:
    """Yield what nodes say of a run, and of those before it, and is not read."""
    start: Any = latent.start
    texts = (latent.positive, latent.negative) if latent.cfg != 1 else (latent.positive,)
    is_blank = isinstance(start, BlankLatent)
    size, seconds = ((start.width, start.height), start.seconds) if is_blank else ((0, 0), 0.0)
    yield from unread_warnings(texts, latent.model.name, names.models.get(latent.model.name, ""), size, seconds)
    if isinstance(start, ScaledLatent):
        yield from _unread(start.latent, names)


def _fields(latent: SampledLatent, names: PoolNames, read_image: WorkflowImages) -> dict[str, Any]:
    """Return the fields of a request for one run of a sampler."""
    family = names.models.get(latent.model.name, "")
    positive = as_edited(latent.positive, family)
    if positive.video is not None and (positive.video.nested or positive.video.prompt_without_image):
        raise NodeUnsupported("DualCFGGuider: changed guidance in guidance, and the text of cond1 in negative, are a "
                              "part of a workflow")  # fmt: skip
    check_parts("model", "LoRAs", len(latent.model.loras), MAX_LORAS)
    levels: dict[str, Any]
    levels = {"sigmas": latent.sigmas} if latent.sigmas else {"steps": latent.steps, "schedule": latent.schedule}
    if latent.beta is not None:
        levels |= dict(zip(("beta_alpha", "beta_beta"), latent.beta, strict=True))
    fields: dict[str, Any] = {
        "model": latent.model.name,
        "prompt": plain_text(positive, family),
        "negative": "" if latent.negative.is_zero else plain_text(latent.negative, family),
        "loras": tuple(lora_fields(lora, positive.clip) for lora in latent.model.loras),
        **levels,
        "sampler": latent.sampler.name,
        "eta": latent.sampler.eta,
        "s_noise": latent.sampler.s_noise,
        "seed": latent.seed,
        "clip_skip": clip_skip(positive, family),
        "controls": tuple(
            {
                "model": use.net.name,
                "mode": use.net.mode or None,
                "image": read_steps(use.image, read_image),
                "strength": use.strength,
                "start": use.start,
                "end": use.end,
                **use.shares_of,
                **({} if use.mask is None else {"mask": _control_mask(use, read_image)}),
            }
            for use in controls_of(latent.model, positive, family)
        ),
    }
    if positive.guidance is not None and reads_guidance(family):
        fields["cfg"] = positive.guidance
    elif not has_distilled_guidance(family):
        fields["cfg"] = latent.cfg
    options = acting_options(latent.model, latent.cfg, family)
    sound, sound_options = _sound_of(latent, names)
    fields |= sound
    options |= sound_options
    if options:
        fields["options"] = options
    if prompts := image_prompts_of(latent.model, positive, family):
        fields["image_prompts"] = tuple(_image_prompt(use, read_image) for use in prompts)
    check_seen(positive, latent.negative, latent.model.name, family)
    if is_one_image(positive, family):
        fields["image"] = read_steps(positive.seen[0].image, read_image)
    elif positive.seen:
        fields["image_prompts"] = tuple(
            {**seen_fields(use, latent.model.name, family), "image": read_steps(use.image, read_image)}
            for use in positive.seen
        )
    if positive.references:
        fields["reference"] = tuple(read_steps(image, read_image) for image in positive.references)
    if positive.references and not latent.positive.references:  # the latents have its size
        image = fields["reference"][0]
        fields |= {"width": image.width // PATCHES * PATCHES, "height": image.height // PATCHES * PATCHES}
    fields |= _start_fields(latent, read_image, family)
    if positive.video is not None:
        images = {name: read_steps(image, read_image) for name, image in positive.video.images().items()}
        fields |= positive.video.fields() | images
    fields |= image_guidance(positive, latent.negative, latent.cfg, family)
    if positive.regions:
        size = _size(latent.start)
        fields["regions"] = tuple(_region_fields(region, size, read_image) for region in positive.regions)
    sides = fields.get("width"), fields.get("height")
    if latent.model.sampling is not None and (shift := shift_of(latent.model.sampling, family, sides)):
        fields["shift"] = shift
    return fields


def _image_prompt(use: ImagePromptUse, read_image: WorkflowImages) -> dict[str, Any]:
    fields = {**image_prompt_fields(use), "image": read_steps(use.image, read_image)}
    if use.mask is None:
        return fields
    assert isinstance(use.mask, MaskFile), "masks that nodes make are in workflows"
    return {**fields, "mask": read_mask(use.mask, read_image)}


def _sound_of(latent: SampledLatent, names: PoolNames) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields and the options of a run for the audio that it samples with its frames: none without audio.
    Raises NodeUnsupported."""
    sound = getattr(latent.start, "sound", None)
    if sound is None:
        return {}, {}
    family = names.models.get(latent.model.name, "")
    return sound_fields(latent.positive, latent.cfg, latent.sound_cfg, family, sound)


def _control_mask(use: ControlUse, read_image: WorkflowImages) -> Any:
    assert isinstance(use.mask, MaskFile), "masks that nodes make are in workflows"
    return read_mask(use.mask, read_image, read_steps(use.image, read_image).size)


def _start_fields(latent: SampledLatent, read_image: WorkflowImages, family: str) -> dict[str, Any]:
    """Return the fields for what a sampler starts from. Raises NodeUnsupported for latents of an image with a model of
    videos, which are one frame."""
    start = latent.start
    is_encoded = isinstance(start, EncodedImage) and latent.run_steps and makes_videos(family)
    if is_encoded or (isinstance(start, BlankLatent) and blank_for(start, family).frames != start.frames):
        raise NodeUnsupported("latent_image: one image of a model of videos is a part of a workflow")
    if isinstance(start, BlankLatent):
        sides: dict[str, Any] = whole_cells(start.width, start.height) if start.width else {}
        sides |= {"frames": start.frames} if start.frames else {}
        sides |= {"seconds": start.seconds} if start.seconds else {}
        shown = start.guides[0].image if start.guides else start.image
        return sides | ({} if shown is None else {"image": read_steps(shown, read_image)})
    assert isinstance(start, EncodedImage), "scaled latents are those of a second pass"
    whole = read_steps(start.image, read_image)
    image = in_whole_cells(whole)
    if not latent.run_steps:
        return {"image": image}
    if start.mask is not None:
        mask = in_whole_cells(read_mask(start.mask, read_image, whole.size))
        if is_black(mask):
            raise NodeUnsupported("mask: found a black one, which regenerates nothing")
        return {"image": image, "mask": mask, "strength": _strength(latent)}
    if latent.positive.references and latent.run_steps == latent.steps:  # nothing of it is left, only its size
        return whole_cells(image.width, image.height)
    return {"image": image, "strength": _strength(latent)}


def _region_fields(region: RegionUse, size: tuple[int, int], read_image: WorkflowImages) -> dict[str, Any]:
    """Return a region of a request, with its mask read. Raises NodeUnsupported."""
    fields = region_fields(region, size)
    return {**fields, "mask": read_mask(region.mask, read_image)} if isinstance(region.mask, MaskFile) else fields


def _size(start: object) -> tuple[int, int]:
    if not isinstance(start, BlankLatent):
        raise NodeUnsupported("texts for parts of the image: expected latents that began empty")
    return start.width, start.height


def _second_pass(latent: SampledLatent, start: ScaledLatent) -> dict[str, Any]:
    """Return the second pass of a request. Raises NodeUnsupported if it differs in more than its steps."""
    if other := _other_in(latent, start):
        raise NodeUnsupported(
            f"node {latent.node_id}: found another {other} than node {start.latent.node_id}, "
            "expected the same, with other steps"
        )
    scaling = {"scale": start.scale, "via": start.via, "upscaler": start.upscaler or None}
    return {**scaling, "strength": _strength(latent), "steps": latent.steps}


def _other_in(latent: SampledLatent, start: ScaledLatent) -> str:
    """Return what a second pass has besides its steps that differs from the first one; "" for nothing."""
    first = start.latent
    same = ("model", "positive", "negative", "cfg", "sampler", "schedule", "sigmas", "beta", "sound_cfg")
    other = [name for name in same if getattr(first, name) != getattr(latent, name)]
    return ", ".join(other) or ("a third pass" if isinstance(first.start, ScaledLatent) else "")


def _strength(latent: SampledLatent) -> float:
    """Return the denoising strength that runs exactly `run_steps` of the schedule: half a step more is rounded down."""
    return min(1.0, (latent.run_steps + 0.5) / latent.steps)
