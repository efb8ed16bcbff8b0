"""What a ComfyUI workflow generates: requests without a workflow where these can say it, else requests with one.

Both are one walk over the nodes, with other values. Pure: images are read by a given function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_adapter_nodes import ADAPTER_BUILDERS
from modelpool.actors.http.comfy.comfy_audio_nodes import AUDIO_BUILDERS
from modelpool.actors.http.comfy.comfy_cascade_builders import CASCADE_BUILDERS
from modelpool.actors.http.comfy.comfy_computing import ComputingWork
from modelpool.actors.http.comfy.comfy_custom_nodes import CUSTOM_BUILDERS
from modelpool.actors.http.comfy.comfy_encoder_nodes import ENCODER_BUILDERS
from modelpool.actors.http.comfy.comfy_evaluation import evaluated
from modelpool.actors.http.comfy.comfy_graph import (
    KnownGraph,
    OutputNode,
    PoolNames,
    WorkflowOutput,
    animation_warnings,
    complete_outputs,
    input_errors,
    known_nodes,
    lone_nodes,
    lost_link_warnings,
    model_errors,
    node_error,
    nodes_in_order,
    output_nodes,
    plain_requests,
    request_outputs,
    sources_of,
)
from modelpool.actors.http.comfy.comfy_images import ReadImage, WorkflowImages, is_black, read_mask, read_steps
from modelpool.actors.http.comfy.comfy_ltx_nodes import LTX_BUILDERS
from modelpool.actors.http.comfy.comfy_made_nodes import FRAME, MadeNodes
from modelpool.actors.http.comfy.comfy_node_types import (
    PART,
    PREVIEW_NODES,
    Builder,
    NodeUnsupported,
    check_parts,
    owner_of,
)
from modelpool.actors.http.comfy.comfy_operation_nodes import OPERATION_BUILDERS, PASSED_BUILDERS
from modelpool.actors.http.comfy.comfy_pack_edits import PACK_EDIT_BUILDERS
from modelpool.actors.http.comfy.comfy_pack_images import PACK_IMAGE_BUILDERS
from modelpool.actors.http.comfy.comfy_pack_loaders import LOADING_BUILDERS
from modelpool.actors.http.comfy.comfy_pack_parts import PART_KINDS
from modelpool.actors.http.comfy.comfy_pack_saves import SAVING_BUILDERS
from modelpool.actors.http.comfy.comfy_patch_nodes import PATCH_BUILDERS
from modelpool.actors.http.comfy.comfy_resize_nodes import RESIZE_BUILDERS
from modelpool.actors.http.comfy.comfy_sizes import Pixels
from modelpool.actors.http.comfy.comfy_tiled_nodes import TILED_BUILDERS
from modelpool.actors.http.comfy.comfy_tokens import with_tokens
from modelpool.actors.http.comfy.comfy_track_nodes import TRACK_BUILDERS
from modelpool.actors.http.comfy.comfy_user_videos import USER_VIDEO_BUILDERS
from modelpool.actors.http.comfy.comfy_values import ImageFile, MaskFile, NodeImage
from modelpool.actors.http.comfy.comfy_workflow_nodes import WORKFLOW_NODES
from modelpool.actors.http.comfy.node_errors import NodeError, WorkflowRejected
from modelpool.actors.request.audio_fields import MAX_AUDIO_SAMPLES, AudioFile
from modelpool.actors.request.control_video_fields import VideoFile
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.workflow_fields import MAX_NODES, Workflow

#: what nodes become in workflows, by their kind; others have the same values as in requests without one
BUILDERS: Mapping[str, Builder] = MappingProxyType(
    {
        **WORKFLOW_NODES,
        **ENCODER_BUILDERS,
        **AUDIO_BUILDERS,
        **LTX_BUILDERS,
        **CUSTOM_BUILDERS,
        **PASSED_BUILDERS,
        **OPERATION_BUILDERS,
        **RESIZE_BUILDERS,
        **PATCH_BUILDERS,
        **ADAPTER_BUILDERS,
        **USER_VIDEO_BUILDERS,
        **TRACK_BUILDERS,
        **LOADING_BUILDERS,
        **SAVING_BUILDERS,
        **PACK_IMAGE_BUILDERS,
        **PACK_EDIT_BUILDERS,
        **CASCADE_BUILDERS,
        **TILED_BUILDERS,
    }
)
#: seeds are below this, and continue at 0
_SEEDS = 2**64
#: kinds of errors of nodes that a workflow of the pool may not have
_MAY_BE_WORKFLOW = "unsupported_value"


@dataclass(frozen=True, slots=True)
class GraphOutput:
    """A node that saves or previews images, or sends them to web sockets (`is_sent`), and the nodes that make them."""

    node_id: str
    is_preview: bool
    image: NodeImage
    nodes: MadeNodes
    is_sent: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def sampler_id(self) -> str:
        """The node that samples, for progress; the output itself if none does."""
        return owner_of(self.image.sampler or self.node_id)

    @property
    def is_animated(self) -> bool:
        """Whether its files are videos."""
        return self.image.saved is not None and self.image.saved.frame_rate > 0

    @property
    def made(self) -> tuple[Any, ...]:
        """What it saves: equal for nodes that save the same images."""
        return id(self.nodes), self.image.node, self.image.saved

    @property
    def count(self) -> int:
        """The number of its images."""
        return self.image.count


def outputs_of(prompt: Any, names: PoolNames) -> tuple[OutputNode, ...]:
    """Return what a workflow generates. Raises WorkflowRejected naming every wrong node."""
    nodes = with_tokens(known_nodes(prompt, names.kinds))
    if (mixed_up := next((node_id for node_id in nodes if PART in node_id), None)) is not None:
        problem = f"prompt: found a node with the id {mixed_up[:100]!r}, expected ids without {PART!r}"
        raise WorkflowRejected("invalid_prompt", f"{problem}: parts of nodes have such ids")
    outputs = output_nodes(nodes, names.kinds)
    order = nodes_in_order(KnownGraph(nodes, names), outputs)
    outputs, incomplete = complete_outputs(nodes, outputs, order, names.kinds)
    if incomplete:  # what only they need is not computed
        order = nodes_in_order(KnownGraph(nodes, names), outputs)
    if errors := list(model_errors(nodes, order, names, PART_KINDS)):
        raise WorkflowRejected("prompt_outputs_failed_validation", "the workflow is not valid", errors)
    work, warnings, sizes = ComputingWork(), dict[str, None](), dict[str, Pixels]()
    try:
        made = evaluated(nodes, order, names.kinds, names.image_size, names.video_facts, work, warnings, sizes)
        shown = [each for each in outputs if each in made]
        if not shown:
            raise WorkflowRejected("prompt_no_outputs", "the workflow hides all its images: image_output is Hide")
        found = _outputs(KnownGraph(made, names, work=work, sizes=sizes), shown)
    except WorkflowRejected as rejected:
        raise _of_owners(rejected, nodes) from None
    lost = lost_link_warnings(prompt, frozenset(order))
    animated = animation_warnings(nodes, order, names)
    left_out = (*lone_nodes(prompt, names.kinds).values(), *lost, *incomplete, *animated, *warnings)
    return tuple(replace(each, warnings=(*left_out, *each.warnings)) for each in found)


def _of_owners(rejected: WorkflowRejected, nodes: Mapping[str, Mapping[str, Any]]) -> WorkflowRejected:
    """Return a rejection in which errors of a part of a node are of that node, which clients know."""
    if all(error.node_id in nodes for error in rejected.errors):
        return rejected
    errors = []
    for error in rejected.errors:
        owner = owner_of(error.node_id)
        details = error.details if owner == error.node_id else f"{error.class_type} of it: {error.details}"
        errors.append(replace(error, node_id=owner, class_type=nodes[owner]["class_type"], details=details))
    return WorkflowRejected(rejected.kind, rejected.headline, errors, rejected.is_over_bound)


def _outputs(graph: KnownGraph, outputs: Sequence[str]) -> tuple[WorkflowOutput | GraphOutput, ...]:
    """Return what evaluated nodes generate: requests without a workflow where these can say it. Raises
    WorkflowRejected."""

    def plain(wanted: Sequence[str]) -> tuple[WorkflowOutput, ...]:
        found = request_outputs(graph.nodes, wanted, graph.names, graph.work)
        return tuple(replace(each, as_graph=partial(_graph_output, graph, each.node_id)) for each in found)

    try:
        return plain(outputs)
    except WorkflowRejected as rejected:
        if not rejected.errors:
            raise
    graphs = {each.node_id: each for each in _graph_outputs(graph, outputs)}
    if len(outputs) == 1:
        return tuple(graphs.values())
    found: list[WorkflowOutput | GraphOutput] = []
    for node_id in outputs:  # an output that is one request is that request, whatever else the workflow makes
        try:
            found += plain([node_id])
        except WorkflowRejected:
            found.append(graphs[node_id])
    return tuple(found)


def requests_of(output: OutputNode, names: PoolNames, read_image: ReadImage | WorkflowImages) -> list[GenerateRequest]:
    """Return a request for each image of an output: the images of a batch have seeds that count up. Outputs that share
    a `WorkflowImages` share its bound. Raises UserError, also of `read_image`."""
    images = read_image if isinstance(read_image, WorkflowImages) else WorkflowImages(read_image)
    if isinstance(output, WorkflowOutput):
        try:
            return plain_requests(output, names, images)
        except NodeUnsupported as problem:
            try:
                assert output.as_graph is not None, "outputs are those of `outputs_of`"
                output = output.as_graph()
            except WorkflowRejected:
                raise problem from None
    assert isinstance(output, GraphOutput), "an output without a request has a workflow"
    return _workflow_requests(output, images)


def _graph_output(graph: KnownGraph, output: str) -> GraphOutput:
    """Return what one output of a workflow generates. Raises WorkflowRejected."""
    return _graph_outputs(graph, [output])[0]


def _graph_outputs(evaluated_graph: KnownGraph, outputs: Sequence[str]) -> tuple[GraphOutput, ...]:
    """Return what outputs of a workflow generate, as workflows of the pool. Raises WorkflowRejected."""
    graph = evaluated_graph.unbuilt()
    nodes, names = graph.nodes, graph.names
    made = MadeNodes(names.models, names.video_facts, names.audio_facts)
    errors: list[NodeError] = []
    for node_id in nodes_in_order(graph, outputs):
        node = nodes[node_id]
        kind = names.kinds[node["class_type"]]
        found = list(input_errors(graph, node_id, node, kind))
        if not found and all(source in graph.values for source in sources_of(node)):
            build = BUILDERS.get(kind.name, kind.build)
            try:
                graph.values[node_id] = build(
                    {**graph.inputs_of(node_id), "nodes": made, "sizes": graph.sizes_for(node_id)}
                )
            except NodeUnsupported as problem:
                found.append(node_error(node_id, node, _MAY_BE_WORKFLOW, "not supported by the pool", str(problem)))
            except ArithmeticError:
                message = "its numbers together have no finite result"
                found.append(node_error(node_id, node, _MAY_BE_WORKFLOW, "not supported by the pool", message))
        errors += found
    if errors:
        raise WorkflowRejected("prompt_outputs_failed_validation", "the workflow is not valid", errors)
    kinds = {node_id: nodes[node_id]["class_type"] for node_id in outputs}
    return tuple(
        GraphOutput(
            node_id,
            kinds[node_id] in PREVIEW_NODES,
            graph.values[node_id][0],
            made,
            kinds[node_id] == "SaveImageWebsocket",
            (*graph.warnings, *made.warnings),
        )
        for node_id in outputs
    )


def _workflow_requests(output: GraphOutput, images: WorkflowImages) -> list[GenerateRequest]:
    """Return a request for each image of an output, with a workflow."""
    read: dict[Any, Any] = {}
    found = []
    for place in range(output.count):
        nodes, last = _nodes_at(output.nodes, output.image.node, place)
        each = Workflow(nodes=_with_images(nodes, images, read), output=last)
        *_, seed = (0, *(node.request.seed or 0 for node in each.samplings))
        file = {} if output.image.saved is None else output.image.saved.fields()
        found.append(GenerateRequest(workflow=each, seed=seed, **file))
    return found


def _nodes_at(made: MadeNodes, output: str, place: int) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the nodes that the image at `place` of a batch depends on, by their ids, and the id of its own node."""
    waiting = [made.resolved(output, place)]
    names = {waiting[0]: waiting[0][0]}
    nodes: dict[str, dict[str, Any]] = {}
    for node_id, at in waiting:
        fields, inputs = made.fields[node_id], {}
        for name, source in fields["inputs"].items():
            key = made.resolved(source, at)
            if key not in names:
                # one node at two places of its batch is two nodes
                taken = key[0] in names.values()
                names[key] = f"{key[0]}@{key[1]}" if taken else key[0]
                check_parts("workflow", "nodes", len(names), MAX_NODES)
                waiting.append(key)
            inputs[name] = names[key]
        nodes[names[node_id, at]] = _fields_at(made, node_id, at) | {"inputs": inputs}
    return nodes, names[waiting[0]]


def _fields_at(made: MadeNodes, node_id: str, place: int) -> dict[str, Any]:
    """Return the fields of a node for the image at `place` of its batch: samplers have seeds that count up."""
    fields = made.fields[node_id]
    if fields["kind"] == FRAME:
        settings = {"start": place, "length": 1}
        return {"kind": "operation", "name": "image_from_batch", "settings": settings}
    if (places := made.places.get(node_id)) is None:
        return fields
    more = places.first + (0 if places.is_same else place)
    if not more:
        return fields
    seed = ((fields["request"]["seed"] or 0) + more) % _SEEDS
    return {**fields, "request": {**fields["request"], "seed": seed}}


def _with_images(value: Any, images: WorkflowImages, read: dict[Any, Any]) -> Any:
    """Return the fields of a node with its images and masks read, each once."""
    match value:
        case {"kind": "mask", "mask": MaskFile() as mask} if is_black(found := _with_images(mask, images, read)):
            settings = {"level": 0.0, "width": found.width, "height": found.height}
            return {"kind": "operation", "name": "mask_solid", "settings": settings, "inputs": {}}
        case VideoFile():
            images.take((value.width, value.height * value.frames))
            return value.path
        case AudioFile():
            images.take((min(MAX_AUDIO_SAMPLES, math.ceil(value.seconds * value.rate * value.channels)), 1))
            return value.path
        case ImageFile() | MaskFile():
            if value not in read:
                read[value] = read_steps(value, images) if isinstance(value, ImageFile) else read_mask(value, images)
            return read[value]
        case dict():
            return {name: _with_images(each, images, read) for name, each in value.items()}
        case list():
            return [_with_images(each, images, read) for each in value]
    return value
