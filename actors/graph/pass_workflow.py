"""Converts a request with passes to a workflow: its own run, and each pass on the result of the one before."""

from __future__ import annotations

from typing import Any

from modelpool.actors.graph.features.upscale_graph import output_nodes
from modelpool.actors.request.field_table import OUTER_FIELDS
from modelpool.actors.request.pass_fields import DEFAULT_PASS_STRENGTH, Pass
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.upscale_fields import Upscale
from modelpool.actors.request.workflow_fields import (
    DecodeNode,
    EncodeNode,
    OperationNode,
    SampleNode,
    UpscaleNode,
    Workflow,
    WorkflowNode,
)

#: fields of the whole request, which its first run does not have
_OUTER = frozenset(("seed", *OUTER_FIELDS))
#: fields of all its decodes
_DECODES = ("vae_tile", "vae_frames")
#: fields that a pass takes from the request; and its fields that a pass with another model does not take
_OF_REQUEST = (
    *("prompt", "negative", "steps", "cfg", "sampler", "schedule", "eta", "s_noise", "s_churn", "clip_skip"),
    *("loras", "shift", "options", "gpus", "controls", "image_prompts", "reference", "reference_as", "image_cfg"),
)
_OF_MODEL = ("loras", "shift", "options", "controls", "image_prompts", "reference", "reference_as", "image_cfg")
#: fields that noise levels follow from: of a run that continues another one they are the other's
_LEVELS = ("steps", "schedule", "sigmas", "shift", "beta_alpha", "beta_beta")
#: settings of a schedule, which a pass with the same one takes
_SCHEDULE = ("beta_alpha", "beta_beta")
#: fields with images that are checked, and may be in the pool already
_CHECKED = frozenset(("image", "strength", "reference", "controls", "image_prompts", "regions"))
_PASS_FIELDS = ("loras", "prompt", "negative", "steps", "cfg", "sampler", "schedule", "shift", "options", "seed")


def workflow_of_passes(request: GenerateRequest) -> Workflow:
    """Return the workflow of a request with passes. Raises UserError."""
    first = _node_request({name: getattr(request, name) for name in request.model_fields_set.difference(_OUTER)})
    nodes: dict[str, Any] = {"base": SampleNode(kind="sample", request=first)}
    latent, model = "base", request.model
    for number, each in enumerate(request.passes, start=1):
        latent, model = _add_pass(nodes, number, each, request, (latent, model))
    nodes["image"] = _decode(request, model, latent)
    nodes |= output_nodes(request)
    return Workflow(nodes=nodes, output=list(nodes)[-1])


def _decode(request: GenerateRequest, model: str, latent: str) -> DecodeNode:
    tiles = {name: value for name in _DECODES if (value := getattr(request, name)) is not None}
    return DecodeNode(kind="decode", model=model, inputs={"latent": latent}, **tiles)


def _add_pass(
    nodes: dict[str, WorkflowNode], number: int, wanted: Pass, request: GenerateRequest, before: tuple[str, str]
) -> tuple[str, str]:
    """Add the nodes of a pass; return the node of its latent and its model. `before` are these of the run before."""
    latent, model_before = before
    model, name = wanted.model or request.model, f"pass-{number}"
    taken = _OF_REQUEST if model == request.model else tuple(each for each in _OF_REQUEST if each not in _OF_MODEL)
    fields = {each: getattr(request, each) for each in taken if each in request.model_fields_set}
    if "controls" in fields:  # a control without an image reads the image of the request, which a pass does not have
        fields["controls"] = tuple(
            each if each.image is not None else each.model_copy(update={"image": request.image})
            for each in request.controls
        )
    fields |= {each: value for each in _PASS_FIELDS if (value := getattr(wanted, each)) is not None}
    if (wanted.schedule, wanted.sampler) == (None, None):
        fields |= {each: getattr(request, each) for each in _SCHEDULE if each in request.model_fields_set}
    elif wanted.schedule is None:
        fields.pop("schedule", None)  # another sampler may not have the schedule of the request
    if request.sigmas and (wanted.steps, wanted.schedule) == (None, None):
        fields |= {"sigmas": request.sigmas}
        fields.pop("schedule", None)
    if wanted.start_step is not None:
        last = nodes[latent]
        assert isinstance(last, SampleNode), "each pass follows a sampling run"
        levels = {each: getattr(last.request, each) for each in _LEVELS if each in last.request.model_fields_set}
        fields = {each: value for each, value in fields.items() if each not in _LEVELS} | levels
        own = _node_request({"model": model, "prompt": request.prompt, **fields})
        nodes[latent] = last.model_copy(update={"last_step": wanted.start_step, "keeps_noise": True})
        node = SampleNode(
            kind="sample", request=own, inputs={"latent": latent}, first_step=wanted.start_step, adds_noise=False
        )
        nodes[name] = node
        return name, model
    own = _node_request({"model": model, "prompt": request.prompt, **fields})
    source = _scaled(nodes, name, wanted, (latent, model_before), model, request)
    strength = DEFAULT_PASS_STRENGTH if wanted.strength is None else wanted.strength
    nodes[name] = SampleNode(kind="sample", request=own, inputs={"latent": source}, strength=strength)
    return name, model


def _scaled(
    nodes: dict[str, WorkflowNode],
    name: str,
    wanted: Pass,
    before: tuple[str, str],
    model: str,
    request: GenerateRequest,
) -> str:
    """Add the nodes that scale the latent, or the decoded image, before a pass; return the node of the latent."""
    latent, model_before = before
    settings: dict[str, Any] = {"method": "bilinear"}
    if wanted.width is not None:
        settings |= {"width": wanted.width, "height": wanted.height}
    elif wanted.scale is not None:
        settings |= {"factor": wanted.scale}
    via = wanted.via or ("image" if wanted.upscaler is not None or model != model_before else "latent")
    if via == "latent":
        if len(settings) == 1:
            return latent
        operation = "latent_upscale_by" if wanted.scale is not None else "latent_upscale_to_pixels"
        nodes[f"{name}-latent"] = OperationNode(
            kind="operation", name=operation, settings=settings, inputs={"samples": latent}
        )
        return f"{name}-latent"
    image = f"{name}-decoded"
    nodes[image] = _decode(request, model_before, latent)
    if wanted.upscaler is not None:
        upscale = Upscale(model=wanted.upscaler, scale=wanted.scale)
        nodes[f"{name}-enlarged"] = UpscaleNode(kind="upscale", upscale=upscale, inputs={"image": image})
        image, settings = f"{name}-enlarged", {each: value for each, value in settings.items() if each != "factor"}
    if len(settings) > 1:
        nodes[f"{name}-scaled"] = OperationNode(
            kind="operation",
            name="image_scale" if wanted.width is not None else "image_scale_by",
            settings=settings,
            inputs={"image": image},
        )
        image = f"{name}-scaled"
    nodes[f"{name}-encoded"] = EncodeNode(kind="encode", model=model, inputs={"image": image})
    return f"{name}-encoded"


def _node_request(fields: dict[str, Any]) -> GenerateRequest:
    """Return the request of a node: `fields` are of a request, and valid."""
    plain = GenerateRequest(**{name: value for name, value in fields.items() if name not in _CHECKED})
    return plain.model_copy(update={name: value for name, value in fields.items() if name in _CHECKED})
