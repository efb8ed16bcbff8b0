"""`modelpool run`: generates what a ComfyUI workflow describes."""

from __future__ import annotations

import re
import secrets
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelpool.actors.cli.terminal.option_groups import with_option_groups
from modelpool.actors.cli.terminal.options import OutputOptions, PoolOptions
from modelpool.actors.cli.terminal.session import session_of
from modelpool.pool.values.core.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

    from modelpool.actors.cli.terminal.command_ports import Pool
    from modelpool.actors.client.start_checks import NameCheck
    from modelpool.actors.http.comfy.comfy_graph import PoolNames
    from modelpool.actors.http.comfy.comfy_node_types import NodeType
    from modelpool.actors.request.requests import GenerateRequest

Workflow = Annotated[
    Path,
    typer.Argument(
        metavar="WORKFLOW",
        help="WORKFLOW.json, as ComfyUI saves or exports it, or a PNG file of ComfyUI, which has it inside.",
        show_default=False,
    ),
]
_PNG_BEGINS = b"\x89PNG\r\n"
#: texts of a PNG file of ComfyUI: the workflow in the API format, and in the editor's
_PNG_TEXTS = ("prompt", "workflow")


@with_option_groups
def run_workflow(
    context: typer.Context,
    workflow: Workflow,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help='Input of a node, as 3.seed=7 or 6.text="a red circle"; repeatable.',
            metavar="NODE.INPUT=VALUE",
            show_default=False,
        ),
    ] = None,
    *,
    output: OutputOptions,
    where: PoolOptions,
) -> None:
    """Generate the images of a ComfyUI workflow, or of a workflow of the pool. Images that it loads are searched next
    to it, and in ./input."""
    from modelpool.actors.cli.run.run_jobs import OutputPlan, started
    from modelpool.actors.request.workflow_inputs import inputs_of_texts, with_inputs

    session = session_of(context)
    names = session.check_names(where)
    graph = with_inputs(read_workflow(workflow, names.may_be_own_node), inputs_of_texts(tuple(inputs or ())))
    drawn = draw_seed(graph)
    known = requests_before_a_pool(graph, workflow, names)
    if output.name is not None:
        check_name(output.name, known)
    plan = OutputPlan.of(output, where)
    with started(session, where) as opened:
        requests = workflow_requests(graph, workflow, opened) if known is None else known
        if output.name is not None and known is None:
            check_name(output.name, requests)
        more = [*([] if drawn is None else ["--set", f"seed={drawn}"]), *([] if output.resume else ["--resume"])]
        resumed = shlex.join(["modelpool", *session.arguments, *more])
        code = plan.run(requests, resumed, opened)
    raise typer.Exit(code)


def draw_seed(graph: dict[str, Any]) -> int | None:
    """Set a seed beside a workflow of the pool with runs that have none, and return it: a command that resumes names
    it; None if it needs none. Raises UserError."""
    from modelpool.actors.request.workflow_inputs import is_own_workflow

    if not is_own_workflow(graph) or graph.get("seed") is not None:
        return None
    (request,) = own_requests(graph)
    assert request.workflow is not None, "a request with a workflow"
    if request.workflow.own_seed is not None:
        return None
    graph["seed"] = secrets.randbits(32)
    return int(graph["seed"])


def check_name(template: str, requests: Sequence[GenerateRequest] | None) -> None:
    """Raise UserError for an invalid template of file names, and for a template with a field that one of the
    `requests` lacks. None: the requests are not known yet."""
    from modelpool.actors.request.name_template import NameTemplate

    parsed = NameTemplate.of(template, "--name")
    for place, request in enumerate(requests or ()):
        parsed.check(request, f"image {place} of the workflow")


def read_workflow(path: Path, may_be_own: Callable[[str], bool]) -> dict[str, Any]:
    """Return a workflow in the API format, converted from ComfyUI's own format if it is in that; also nodes that
    `may_be_own`, of users. Raises UserError."""
    from modelpool.actors.http.comfy.comfy_export import api_format
    from modelpool.actors.http.comfy.node_errors import WorkflowRejected
    from modelpool.actors.request.json_text import NotJson, parse_json
    from modelpool.actors.request.workflow_inputs import is_own_workflow

    try:
        content = path.read_bytes()
        parsed = parse_json(_text_of_png(path) if content.startswith(_PNG_BEGINS) else content)
        return parsed if is_own_workflow(parsed) else api_format(parsed, may_be_own=may_be_own)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (NotJson, WorkflowRejected) as problem:
        raise UserError(f"{path}: {problem}") from None


def _text_of_png(path: Path) -> bytes:
    """Return the workflow in a PNG file of ComfyUI. Raises UserError."""
    from modelpool.actors.outputs.image_metadata import texts_of_image

    texts = texts_of_image(path)
    found = next((texts[name] for name in _PNG_TEXTS if name in texts), None)
    if found is None:
        raise UserError(f"{path}: found no workflow in it, expected the text {' or '.join(_PNG_TEXTS)} of ComfyUI")
    return found.encode()


def requests_before_a_pool(graph: dict[str, Any], place: Path, names: NameCheck) -> list[GenerateRequest] | None:
    """Return the requests of the workflow at `place`; None if its names are known to a pool only: then its nodes and
    images are checked. Raises UserError.
    """
    from modelpool.actors.cli.run.read_inputs import with_images_read
    from modelpool.actors.http.comfy.comfy_graph import check_nodes
    from modelpool.actors.http.comfy.comfy_node_types import IMAGES
    from modelpool.actors.http.comfy.comfy_nodes import NODE_TYPES
    from modelpool.actors.http.read_requests import image_next_to
    from modelpool.actors.request.workflow_inputs import is_own_workflow

    if is_own_workflow(graph):
        (request,) = own_requests(graph)
        names.check(request)
        check_operations(request, names)
        return [request]
    known, loras = names.model_names(), names.lora_names()
    own_nodes = names_of_nodes(graph).difference(NODE_TYPES)
    if own_nodes and all(map(names.may_be_own_node, own_nodes)):
        return None  # the pool describes them
    check_nodes(graph)
    if known is None or loras is None:
        for image in _values_of(graph, IMAGES):
            image_next_to(place, image)
        return None
    requests = _requests(graph, place, names_of_files(graph, names, known, loras))
    for request in requests:
        names.check(request)
        names.check_before_start(with_images_read(request))
    return requests


def names_of_files(
    graph: dict[str, Any],
    names: NameCheck,
    models: Sequence[str],
    loras: Sequence[str],
    kinds: Mapping[str, NodeType] | None = None,
) -> PoolNames:
    """Return the names of files of this machine, with the families of the models that a workflow names."""
    from modelpool.actors.http.comfy.comfy_graph import PoolNames
    from modelpool.actors.http.comfy.comfy_node_types import MODELS, file_stem

    wanted = {stem for value in _values_of(graph, MODELS) for stem in (value, file_stem(value))}
    families = {model: names.family_of(model) if {model, file_stem(model)} & wanted else "" for model in models}
    return PoolNames(families, loras, known_kinds=kinds)


def check_operations(request: GenerateRequest, names: NameCheck) -> None:
    """Raise UserError that names the node for an unknown operation, and for a setting that it does not have, or of
    another type. The pool checks the settings of users' nodes, and everything that depends on sizes."""
    from modelpool.actors.request.workflow_fields import OperationNode
    from modelpool.pool.inference.operations.operate import OPERATIONS, operation_named

    assert request.workflow is not None, "a request with a workflow"
    for node_id, node in request.workflow.in_order:
        if isinstance(node, OperationNode) and (node.name in OPERATIONS or not names.may_be_own_node(node.name)):
            try:
                operation_named(node.name).check_settings(node.settings)
            except UserError as problem:
                raise type(problem)(f"node {node_id}: {problem}") from None


def names_of_nodes(graph: dict[str, Any]) -> set[str]:
    """Return the kinds of the nodes of a workflow in the API format."""
    nodes = (node for node in graph.values() if isinstance(node, dict))
    return {kind for node in nodes if isinstance(kind := node.get("class_type"), str)}


def own_requests(graph: dict[str, Any]) -> list[GenerateRequest]:
    """Return the request of a workflow of the pool, which may be next to other fields of a request, such as a seed.
    Raises UserError."""
    from modelpool.actors.request.requests import GenerateRequest

    others = {name: value for name, value in graph.items() if name not in ("nodes", "output")}
    return [GenerateRequest(workflow={"nodes": graph["nodes"], "output": graph["output"]}, **others)]


def requests_with_names(graph: dict[str, Any], place: Path, names: NameCheck) -> list[GenerateRequest]:
    """Return the requests of the workflow at `place` by the names of files of this machine. Raises UserError."""
    from modelpool.actors.http.comfy.comfy_nodes import NODE_TYPES
    from modelpool.actors.http.comfy.comfy_own_nodes import kinds_as_used
    from modelpool.actors.request.workflow_inputs import is_own_workflow

    found = own_requests(graph) if is_own_workflow(graph) else requests_before_a_pool(graph, place, names)
    models, loras = names.model_names(), names.lora_names()
    if found is None and models is not None and loras is not None and names_of_nodes(graph).difference(NODE_TYPES):
        kinds = kinds_as_used(graph)  # the pool, which has them, is not there yet: it checks each line
        found = _requests(graph, place, names_of_files(graph, names, models, loras, kinds))
        for request in found:
            names.check(request)
    if found is None:
        raise UserError("--workflow: its models are known to another machine; expected a pool on this one")
    return found


def workflow_requests(graph: dict[str, Any], place: Path, pool: Pool) -> list[GenerateRequest]:
    """Return the requests of the workflow at `place`, with the names of a pool. Raises UserError."""
    from modelpool.actors.http.comfy.comfy_graph import PoolNames
    from modelpool.actors.http.comfy.comfy_own_nodes import kinds_with
    from modelpool.actors.request.workflow_inputs import is_own_workflow

    if is_own_workflow(graph):
        return own_requests(graph)
    models = {listing.name: listing.family for listing in pool.models() if not listing.problem}
    loras = [each.name for each in pool.loras() if not each.problem]
    return _requests(graph, place, PoolNames(models, loras, known_kinds=kinds_with(pool.file_names().nodes)))


def _hide_unguided() -> None:
    """Show no warning of a negative prompt without guidance: workflows have one for models of all kinds. It adds
    one filter: with each new one, Python shows earlier warnings again."""
    from modelpool.actors.graph.features.vision_graph import UNGUIDED

    hidden = [pattern.pattern for _, pattern, *_ in warnings.filters if isinstance(pattern, re.Pattern)]
    if UNGUIDED not in hidden:
        warnings.filterwarnings("ignore", UNGUIDED)


def _requests(graph: dict[str, Any], place: Path, names: PoolNames) -> list[GenerateRequest]:
    """The requests of a workflow, of which nodes may read images next to it. Warns of what nodes ask for and do not
    get: of rows of one workflow, once."""
    from modelpool.actors.http.comfy.comfy_images import image_size_of, is_animation_of
    from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
    from modelpool.actors.http.read_requests import audio_next_to, image_next_to, video_next_to

    def read(name: str) -> Image:
        return image_next_to(place, name)

    names = replace(
        names,
        image_size=image_size_of(read),
        is_animation=is_animation_of(read),
        video_facts=lambda name: video_next_to(place, name),
        audio_facts=lambda name: audio_next_to(place, name),
    )
    _hide_unguided()
    outputs = outputs_of(graph, names)
    for warning in dict.fromkeys(warning for output in outputs for warning in output.warnings):
        warnings.warn(f"{place}: {warning}", UserWarning, stacklevel=2)
    return [request for output in outputs for request in requests_of(output, names, read)]


def _values_of(graph: dict[str, Any], choices: str) -> Iterator[str]:
    """Yield the values of the inputs of a workflow that name one of a list."""
    from modelpool.actors.http.comfy.comfy_nodes import NODE_TYPES

    for node in graph.values():
        kind = NODE_TYPES.get(node["class_type"])  # a node that nothing is linked to may be of any kind
        for given in () if kind is None else kind.inputs:
            value = (node.get("inputs") or {}).get(given.name)
            if given.choices == choices and isinstance(value, str):
                yield value
