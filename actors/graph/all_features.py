"""The features of requests, and the loops over them: checks, defaults and recipes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.features.batch_graph import BATCH
from modelpool.actors.graph.features.control_graph import CONTROLS
from modelpool.actors.graph.features.control_video_graph import VIDEOS
from modelpool.actors.graph.features.decode_tiles_graph import DECODE_TILES
from modelpool.actors.graph.features.decoder_graph import DECODER
from modelpool.actors.graph.features.expert_graph import EXPERTS
from modelpool.actors.graph.features.feature import Feature, RecipeSource
from modelpool.actors.graph.features.gang_graph import GANG
from modelpool.actors.graph.features.image_concat_graph import IMAGE_CONCAT
from modelpool.actors.graph.features.image_prompt_graph import IMAGE_PROMPTS
from modelpool.actors.graph.features.lora_graph import LORAS
from modelpool.actors.graph.features.music_graph import MUSIC
from modelpool.actors.graph.features.option_checks import OPTIONS
from modelpool.actors.graph.features.recipe import Recipe, RecipeImages
from modelpool.actors.graph.features.reference_graph import REFERENCE_SIZE, REFERENCES
from modelpool.actors.graph.features.region_graph import REGIONS
from modelpool.actors.graph.features.sampling_defaults import BASE, CLIP, SAMPLER
from modelpool.actors.graph.features.schedule_guidance import NOISE
from modelpool.actors.graph.features.start_image_graph import HIRES, START_IMAGE
from modelpool.actors.graph.features.upscale_graph import UPSCALE
from modelpool.actors.graph.features.video_output_graph import FILE, FRAMES, SIZE
from modelpool.actors.graph.features.vision_graph import VIDEO_NUMBERS, VIEW
from modelpool.actors.graph.features.workflow_part import WORKFLOW
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError, together
from modelpool.pool.values.core.sampling_facts import ModelDefaults, SamplingFacts
from modelpool.pool.values.core.stage_params import LoraRef, ModelRef

#: all features. Checks and restored inputs have this order: `check_request` reports the first error
FEATURES: tuple[Feature, ...] = (
    *(BASE, LORAS, CLIP, SAMPLER, SIZE, FRAMES, START_IMAGE, HIRES, VIDEOS, VIEW, VIDEO_NUMBERS, IMAGE_CONCAT),
    *(REFERENCES, REFERENCE_SIZE, DECODER, EXPERTS, UPSCALE, OPTIONS, NOISE, MUSIC, FILE),
    *(CONTROLS, IMAGE_PROMPTS, REGIONS, BATCH, GANG, DECODE_TILES, WORKFLOW),
)
#: the features with defaults: of several sizes, the last one counts
DEFAULTS_ORDER: tuple[Feature, ...] = (
    *(
        BASE,
        EXPERTS,
        REFERENCE_SIZE,
        VIDEOS,
        IMAGE_CONCAT,
        SIZE,
        REFERENCES,
        NOISE,
        MUSIC,
        FILE,
        CONTROLS,
        IMAGE_PROMPTS,
        REGIONS,
    ),
)
#: the features with lines, in the order of `modelpool inspect`
LINE_ORDER: tuple[Feature, ...] = (
    *(BASE, NOISE, DECODER, UPSCALE, EXPERTS, OPTIONS, LORAS, CLIP, SAMPLER, SIZE, VIEW, FRAMES, VIDEO_NUMBERS),
    *(MUSIC, FILE, START_IMAGE, HIRES, CONTROLS, IMAGE_PROMPTS, REGIONS, REFERENCES, VIDEOS, IMAGE_CONCAT, BATCH, GANG),
    *(DECODE_TILES, WORKFLOW),
)


def check_request(request: GenerateRequest, facts: SamplingFacts, in_workflow: bool = False) -> None:
    """Raise UserError naming the field for a field that models of `facts` do not support; `in_workflow`, where the
    second model of two is a node of its own."""
    is_second = in_workflow and facts.is_decoder_stage
    for feature in FEATURES:
        if not is_second or feature is not DECODER:
            feature.check(request, facts)


def check_all_fields(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise one UserError that names all fields that models of `facts` do not support."""
    problems: list[UserError] = []
    for feature in FEATURES:
        try:
            feature.check(request, facts)
        except UserError as problem:
            problems.append(problem)
    if problems:
        raise together(problems)


def with_defaults(request: GenerateRequest, model: ModelRef, defaults: ModelDefaults) -> GenerateRequest:
    """Return `request`, which `model` supports, with every field that it leaves out filled in: sampling, sizes that
    follow its images, options of experts and references, file format. Fields and parts without an effect are left
    out."""
    fields: dict[str, Any] = {}
    for feature in DEFAULTS_ORDER:
        fields |= feature.defaults(request, model, defaults)
    return request.model_copy(update=fields)


def recipe_of(request: GenerateRequest, graph: JobGraph, loras: Sequence[LoraRef]) -> Recipe:
    """Return the recipe (without versions) of `request`, with its defaults filled in and with the task graph `graph`.
    `loras` are its LoRAs, which the graph has only as far as they change a component that runs."""
    source = RecipeSource(request, graph, loras)
    fields: dict[str, Any] = {}
    images: dict[str, Any] = {}
    for feature in FEATURES:
        fields |= feature.recipe.record(source)
        images |= feature.images.record(source)
    recorded = RecipeImages(**images)
    return Recipe(**fields, pictures=None if recorded == RecipeImages() else recorded)
