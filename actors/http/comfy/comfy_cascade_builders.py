"""What the nodes of Stable Cascade become in workflows: images that stage C begins with, and texts of stage B. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_made_nodes import MadeNodes
from modelpool.actors.http.comfy.comfy_node_types import Builder, NodeUnsupported
from modelpool.actors.http.comfy.comfy_values import BlankLatent, NodeImage, NodeLatent, TextValue
from modelpool.pool.families.parts.located_family import EFFICIENTNET_SIDE


def _encoded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The latents of an image for stage C, and empty ones of its size for stage B."""
    nodes: MadeNodes = given["nodes"]
    node_id, settings = given["node_id"], {"compression": given["compression"], "cell": EFFICIENTNET_SIDE}
    image = nodes.as_images(f"{node_id}/image", given["image"])
    scaled = nodes.operate(f"{node_id}/scaled", "image_scale_to_cells", NodeImage, {"image": image}, settings)
    assert isinstance(scaled, NodeImage), "the result of an operation on images"
    latent = nodes.encode(node_id, scaled, given["vae"].name)
    return latent, BlankLatent(0, 0, latent.count, stage="b", sized_as=image)


def _conditioned(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A text for stage B."""
    value: TextValue = given["conditioning"]
    if not isinstance(given["stage_c"], NodeLatent):
        raise NodeUnsupported("stage_c: expected the latents of a sampler of stage C, or of an image, found empty ones")
    return (value.each(lambda text: replace(text, followed=given["stage_c"])),)


#: what nodes become in workflows, by their kind
CASCADE_BUILDERS: Mapping[str, Builder] = MappingProxyType(
    {"StableCascade_StageC_VAEEncode": _encoded, "StableCascade_StageB_Conditioning": _conditioned}
)
