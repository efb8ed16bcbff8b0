"""ComfyUI nodes of Stable Cascade. Pure.

Two samplers that begin with noise, of stage C and of stage B, are one request with a decoder. Others are nodes of a
workflow: with an image to begin with, ControlNets, or latents of other sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modelpool.actors.http.comfy.comfy_families import family_of
from modelpool.actors.http.comfy.comfy_node_types import (
    MAX_BATCH,
    MAX_SIDE,
    MODELS,
    NodeInput,
    NodeType,
    NodeUnsupported,
    combo,
    file_stem,
    link,
    number,
    only_in_workflows,
    text,
    whole,
)
from modelpool.actors.http.comfy.comfy_sampling_nodes import complete_latent
from modelpool.actors.http.comfy.comfy_values import (
    AnyLatent,
    BlankLatent,
    ClipValue,
    ModelSampling,
    ModelValue,
    SampledLatent,
    TextValue,
    VaeValue,
)
from modelpool.pool.families.parts.two_stages import PRIOR_PIXELS, prior_side

#: the shift of the levels of stage C in ComfyUI
_SHIFT = 2.0
#: pixels that sides of stage B are multiples of
_STAGE_B_SIDE = 8


def _blank(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Empty latents of both stages: latents of stage C in the size of an output with so many cells. Raises
    NodeUnsupported."""
    width, height, compression = given["width"], given["height"], given["compression"]
    cells = width // compression, height // compression
    if width % _STAGE_B_SIDE or height % _STAGE_B_SIDE:
        raise NodeUnsupported(f"width, height: found {width}x{height}, expected multiples of {_STAGE_B_SIDE}")
    blank = BlankLatent(width, height, given["batch_size"], stage="b")
    return replace(blank, width=prior_side(cells[0]), height=prior_side(cells[1]), stage="c"), blank


def _conditioned(given: Mapping[str, Any]) -> tuple[Any, ...]:
    value: TextValue = given["conditioning"]
    if not isinstance(given["stage_c"], SampledLatent):
        raise NodeUnsupported("stage_c: expected the latents of the sampler of stage C, in a workflow of one request")
    return (replace(value, prior=complete_latent(given["stage_c"])),)


def _both_checkpoints(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Models and VAEs of both stages, and the encoders of stage C; then the names of their places in a cache."""
    second, first = given["stage_b"], given["stage_c"]
    models = (ModelValue(second, has_vae=True), VaeValue(second), ModelValue(first, has_vae=True), VaeValue(first))
    keys = given["key_opt_b"].strip() or second, given["key_opt_c"].strip() or first
    return (*models, file_stem(first), ClipValue(first), *keys)


def check_stage(positive: TextValue, start: AnyLatent, family: str) -> None:
    """Raise NodeUnsupported for texts and latents that the model of a sampling run does not read together."""
    stage, is_second = getattr(start, "stage", ""), is_second_stage(family)
    if not is_first_stage(family) and not is_second:
        if stage or positive.followed is not None:
            raise NodeUnsupported(f"model: found {family or 'an unknown family'}, expected one of Stable Cascade")
        return
    if is_second != (positive.followed is not None):
        raise NodeUnsupported("positive: stage B, and no other model, reads texts of StableCascade_StageB_Conditioning")
    if isinstance(start, BlankLatent) and stage != ("b" if is_second else "c"):
        raise NodeUnsupported("latent_image: expected empty latents of StableCascade_EmptyLatentImage for this stage")
    if is_second and (positive.controls or positive.regions or positive.image_prompts):
        others = "ControlNets, areas and image prompts are for stage C"
        raise NodeUnsupported(f"positive: found more than a text for stage B; {others}")


def is_first_stage(family: str) -> bool:
    """Whether stage B, and no VAE, decodes the latents of a family."""
    return family_of(family).facts.is_prior_stage


def is_second_stage(family: str) -> bool:
    """Whether a family reads the latents of stage C."""
    return family_of(family).facts.is_decoder_stage


def shift_of_stage(family: str) -> dict[str, float]:
    """Return the field with the shift of the levels of stage C, as in ComfyUI; nothing for other families."""
    return {"shift": _SHIFT} if is_first_stage(family) else {}


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
        raise NodeUnsupported("positive: found a ControlNet of stage C, which is a part of a workflow")
    blank = prior.start
    if not is_first_stage(own) or not is_second_stage(family):
        raise NodeUnsupported(f"model: found {own} and {family}, expected Stable Cascade C and B")
    if not isinstance(blank, BlankLatent) or not isinstance(start, BlankLatent):
        raise NodeUnsupported("latent_image: expected empty latents of both stages")
    if start.width % PRIOR_PIXELS or start.height % PRIOR_PIXELS:
        found = f"{start.width}x{start.height}"
        raise NodeUnsupported(f"latent_image: found {found}, expected multiples of {PRIOR_PIXELS} in one request")
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
    _row(
        "StableCascade_StageC_VAEEncode",
        (link("image", "IMAGE"), link("vae", "VAE"), whole("compression", 42, 4, 128)),
        only_in_workflows,
        "LATENT",
        "LATENT",
    ),
    _row(
        "ModelSamplingStableCascade",
        # all levels of shift 0 are 0
        (link("model", "MODEL"), number("shift", _SHIFT, 0.01, 100.0)),
        lambda given: (replace(given["model"], sampling=ModelSampling(given["shift"])),),
        "MODEL",
    ),
    # of ComfyUI-Inspire-Pack: both checkpoints. The cache changes no result
    _row(
        "StableCascade_CheckpointLoader //Inspire",
        (
            combo("stage_b", MODELS),
            text("key_opt_b", ""),
            combo("stage_c", MODELS),
            text("key_opt_c", ""),
            text("cache_mode", "none", choices=("none", "stage_b", "stage_c", "all")),
        ),
        _both_checkpoints,
        *("MODEL", "VAE", "MODEL", "VAE", "CLIP_VISION", "CLIP", "STRING", "STRING"),
    ),
)
