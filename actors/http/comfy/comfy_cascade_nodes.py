"""ComfyUI nodes of Stable Cascade: two samplers, of stage C and of stage B, are one request with a decoder. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modelpool.actors.http.comfy.comfy_node_types import (
    MAX_BATCH,
    MAX_SIDE,
    NodeInput,
    NodeType,
    NodeUnsupported,
    link,
    whole,
)
from modelpool.actors.http.comfy.comfy_sampling_nodes import complete_latent
from modelpool.actors.http.comfy.comfy_values import BlankLatent, SampledLatent, TextValue
from modelpool.pool.families.parts.two_stages import PRIOR_PIXELS, prior_cells

#: why graphs with ControlNets of stage C are refused
NO_CASCADE_CONTROLS = (
    "positive: found a ControlNet of stage C, expected texts and images of unCLIPConditioning: the pool does not run "
    "ControlNets of Stable Cascade"
)
#: the families of both stages, by the beginning of their titles, and the shift of the levels of stage C in ComfyUI
_STAGE_C, _STAGE_B, _SHIFT = "Stable Cascade C", "Stable Cascade B", 2.0


def _blank(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Empty latents of both stages. Raises NodeUnsupported for a size that the pool has other latents of."""
    width, height, compression = given["width"], given["height"], given["compression"]
    cells = height // compression, width // compression
    if width % PRIOR_PIXELS or height % PRIOR_PIXELS or cells != prior_cells(width, height):
        found = f"{width}x{height} at {compression}, {cells[1]}x{cells[0]} cells"
        wanted = prior_cells(width, height)
        expected = f"multiples of {PRIOR_PIXELS}, and {wanted[1]}x{wanted[0]} cells"
        raise NodeUnsupported(f"width, height, compression: found {found}; expected {expected}")
    blank = BlankLatent(width, height, given["batch_size"])
    return replace(blank, stage="c"), replace(blank, stage="b")


def _conditioned(given: Mapping[str, Any]) -> tuple[Any, ...]:
    value: TextValue = given["conditioning"]
    if not isinstance(given["stage_c"], SampledLatent):
        raise NodeUnsupported("stage_c: expected the latents of the sampler of stage C, in a workflow of one request")
    return (replace(value, prior=complete_latent(given["stage_c"])),)


def stage_c_of(latent: SampledLatent, families: Mapping[str, str]) -> SampledLatent:
    """Return the latents of the sampler that makes what `latent` begins with: of stage C, for latents of stage B; for
    others `latent` itself. Raises NodeUnsupported for stages that are no request together."""
    start, prior = latent.start, latent.positive.prior
    family = families.get(latent.model.name, "")
    if prior is None:
        if isinstance(start, BlankLatent) and start.stage:
            raise NodeUnsupported("latent_image: latents of stage C are decoded by stage B, expected its sampler")
        return latent
    own = families.get(prior.model.name, "")
    if prior.model.image_prompts or latent.model.image_prompts:
        raise NodeUnsupported("model: found an IP-Adapter, expected Stable Cascade without one")
    if prior.positive.controls:
        raise NodeUnsupported(NO_CASCADE_CONTROLS)
    blank = prior.start
    if not own.startswith(_STAGE_C) or not family.startswith(_STAGE_B):
        raise NodeUnsupported(f"model: found {own} and {family}, expected {_STAGE_C} and {_STAGE_B}")
    if not isinstance(blank, BlankLatent) or not isinstance(start, BlankLatent):
        raise NodeUnsupported("latent_image: expected empty latents of both stages")
    if replace(blank, stage="b") != start or blank.stage != "c" or start.count > 1:
        raise NodeUnsupported("latent_image: expected the empty latents of one image, of one node for both stages")
    # stage B reads no embeddings of images
    same = replace(latent.positive, prior=None, seen=()) == replace(prior.positive, seen=())
    if not same or (latent.cfg != 1 and latent.negative != prior.negative):
        raise NodeUnsupported("positive, negative: expected the texts of stage C for stage B, too")
    is_plain = not (latent.model.loras or latent.model.options or latent.model.sampling or latent.sigmas or latent.beta)
    if not is_plain or latent.sampler.eta is not None or latent.sampler.s_noise != 1:
        raise NodeUnsupported("model, sampler: expected stage B without LoRAs, options, and settings of its sampler")
    if latent.run_steps != latent.steps or prior.run_steps != prior.steps:
        raise NodeUnsupported("denoise: expected 1 for both stages")
    return prior


def decoder_fields(latent: SampledLatent) -> dict[str, Any]:
    """Return the fields of a request for stage B, and for the levels of stage C; nothing for other models."""
    if (prior := latent.positive.prior) is None:
        return {}
    names = {"sampler": latent.sampler.name, "schedule": latent.schedule}
    decoder = {"model": latent.model.name, "steps": latent.steps, "cfg": latent.cfg, "seed": latent.seed, **names}
    return {"decoder": decoder} | ({} if prior.model.sampling is not None else {"shift": _SHIFT})


def _row(name: str, inputs: tuple[NodeInput, ...], build: Any, *outputs: str) -> NodeType:
    return NodeType(name, "stable_cascade", inputs, outputs, build)


CASCADE_NODES = (
    _row(
        "StableCascade_EmptyLatentImage",
        (
            whole("width", 1024, 256, MAX_SIDE),
            whole("height", 1024, 256, MAX_SIDE),
            whole("compression", 42, 4, 128),
            whole("batch_size", 1, 1, MAX_BATCH),
        ),
        _blank,
        "LATENT",
        "LATENT",
    ),
    _row(
        "StableCascade_StageB_Conditioning",
        (link("conditioning", "CONDITIONING"), link("stage_c", "LATENT")),
        _conditioned,
        "CONDITIONING",
    ),
)
