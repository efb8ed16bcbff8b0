"""Names the node of a ComfyUI workflow that an error of a request is about. Pure.

A workflow is checked node by node; what follows from it is checked again as a request, by the pool: its errors name
fields and files. Clients show errors at nodes, so that every one needs a node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_graph import OutputNode, known_nodes
from modelpool.actors.http.comfy.comfy_node_types import NodeType, file_stem
from modelpool.actors.http.comfy.comfy_nodes import NODE_TYPES
from modelpool.actors.http.comfy.node_errors import NodeError, WorkflowRejected, link_of
from modelpool.actors.request.bounds import OverBound
from modelpool.pool.values.core.errors import UnknownName, UserError

_TEXTS = ("text", "prompt", "t5xxl", "clip_l", "text_g")
#: inputs, or kinds of nodes, from which the fields of requests follow; others have the name of their input
_PLACES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model": ("ckpt_name", "unet_name"),
        "lora": ("lora_name",),
        "loras": ("lora_name",),
        "controlnet": ("control_net_name",),
        "controls": ("control_net_name", "control_net"),
        "controls.mode": ("SetUnionControlNetType", "control_net_name"),
        "image_prompts": ("style_model_name", "style_model"),
        "gligen": ("gligen_name", "gligen_textbox_model"),
        "upscaler": ("model_name",),
        "upscale": ("model_name", "upscale_model"),
        "hires": ("upscale_model", "scale_by", "upscale_method", "denoise"),
        "regions": (
            "ConditioningSetArea", "ConditioningSetAreaPercentage", "ConditioningSetMask", "ConditioningCombine",
        ),
        "area": ("ConditioningSetArea", "ConditioningSetAreaPercentage"),
        "reference": ("ReferenceLatent", "TextEncodeQwenImageEdit", "TextEncodeQwenImageEditPlus"),
        "image": ("LoadImage", "LoadImageMask", "VAEEncode"),
        "mask": ("SetLatentNoiseMask", "VAEEncodeForInpaint", "InpaintModelConditioning", "LoadImageMask"),
        "strength": ("denoise", "start_at_step"),
        "seed": ("seed", "noise_seed"),
        "sampler": ("sampler_name",),
        "schedule": ("scheduler",),
        "shift": ("ModelSamplingSD3", "ModelSamplingAuraFlow", "ModelSamplingFlux"),
        "clip_skip": ("stop_at_clip_layer",),
        "prompt": _TEXTS,
        "negative": _TEXTS,
        "embedding": _TEXTS,
        "options.freeu": ("FreeU", "FreeU_V2"),
        "options.pag": ("PerturbedAttentionGuidance",),
        "options.sag": ("SelfAttentionGuidance",),
        "options.slg": ("SkipLayerGuidanceSD3", "SkipLayerGuidanceDiT"),
        "options.cfg_zero": ("CFGZeroStar",),
        "options.rescale_cfg": ("RescaleCFG",),
        "options.hypertile": ("HyperTile",),
        "options.rope": ("ScaleROPE",),
    }
)  # fmt: skip
#: characters of a value that may occur in a message by chance
_SHORT = 3
#: the field at the beginning of a message, or the kind of a name that is unknown
_FIELD = re.compile(r"(?:requests\[\d+\][.:] ?)?(?:unknown (\w+) '|node (\S+): |([A-Za-z_][\w.]*))")
_QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")


def rejection(
    prompt: Any,
    outputs: Sequence[OutputNode],
    problem: UserError,
    kinds: Mapping[str, NodeType] = NODE_TYPES,
) -> WorkflowRejected:
    """Return the rejection of a valid workflow with refused requests, with the node that the error is about: of
    the nodes that `outputs` need, the one with the field or the name in the message, else the sampler."""
    nodes = known_nodes(prompt, kinds)
    needed = list(_needed(nodes, [output.node_id for output in outputs]))
    node_id, input_name = _place(nodes, needed, str(problem)) or (outputs[0].sampler_id, "")
    is_name = isinstance(problem, UnknownName)
    kind, message = (
        ("value_not_in_list", "a value is not one of the choices")
        if is_name
        else ("unsupported_value", "not supported by the pool")
    )
    error = NodeError(node_id, nodes[node_id]["class_type"], kind, message, str(problem), input_name)
    is_over_bound = isinstance(problem, OverBound)
    return WorkflowRejected("prompt_outputs_failed_validation", "the workflow is not valid", [error], is_over_bound)


def _needed(nodes: Mapping[str, Mapping[str, Any]], outputs: Sequence[str]) -> Iterator[str]:
    """Yield the nodes that `outputs` need, from the outputs on."""
    waiting, seen = list(outputs), set(outputs)
    for node_id in waiting:
        yield node_id
        for name in nodes[node_id]["inputs"]:
            link = link_of(nodes[node_id], name)
            if link is not None and link[0] in nodes and link[0] not in seen:
                seen.add(link[0])
                waiting.append(link[0])


def _place(nodes: Mapping[str, Mapping[str, Any]], needed: Sequence[str], message: str) -> tuple[str, str] | None:
    """Return the node that a message is about, and its input, "" if it is about none; None if the message names
    neither."""
    quoted = {one or other for one, other in _QUOTED.findall(message)}
    match = _FIELD.match(message)
    # of a node that became several ones, the part before the slash is its id
    named = "" if match is None or match[2] is None else match[2].partition("/")[0]
    if named in needed:
        return named, ""
    field = "" if match is None else match[1] or match[3] or ""
    found = list(_places_of(nodes, needed, field))
    by_name = [each for each in found if any(_names(value, quoted, message) for value in _values(nodes, *each))]
    if found:
        return (by_name or found)[0]
    for node_id in needed:
        for name, value in nodes[node_id]["inputs"].items():
            if _names(value, quoted) or message.startswith(f"{value}: "):  # as errors of images begin
                return node_id, name
    return None


def _values(nodes: Mapping[str, Mapping[str, Any]], node_id: str, name: str) -> Sequence[Any]:
    """Return the value of an input, or of all inputs of a node for ""."""
    inputs = nodes[node_id]["inputs"]
    return [inputs[name]] if name else list(inputs.values())


def _places_of(nodes: Mapping[str, Mapping[str, Any]], needed: Sequence[str], field: str) -> Iterator[tuple[str, str]]:
    """Yield the nodes and inputs from which a field follows, or its whole if it is a part; those that the table names
    first come first."""
    while field:
        found = False
        for place in (*_PLACES.get(field, (field,)), field):
            for node_id in needed:
                if nodes[node_id]["class_type"] == place:
                    found = True
                    yield node_id, ""
                elif place in nodes[node_id]["inputs"]:
                    found = True
                    yield node_id, place
        field = "" if found else field.rpartition(".")[0]


def _names(value: Any, quoted: set[str], message: str = "") -> bool:
    """Whether the value of an input is, or names, one of the quoted texts, or occurs in `message`."""
    if not isinstance(value, str) or not value:
        return False
    if len(value) > _SHORT and value in message:
        return True
    return value in quoted or file_stem(value) in quoted or any(f"embedding:{name}" in value for name in quoted if name)
