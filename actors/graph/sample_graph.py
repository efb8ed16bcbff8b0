"""Converts a sampling run of a request to its stage parameters. Pure functions of values and a catalog.

Every error names a field of a request.
"""

from __future__ import annotations

from dataclasses import replace

from modelpool.actors.graph.common.graph_catalog import GraphCatalog
from modelpool.actors.graph.common.output_shape import check_extent, duration_of
from modelpool.actors.graph.common.sampling_runs import SamplingRun
from modelpool.actors.graph.features.control_graph import control_refs
from modelpool.actors.graph.features.control_video_graph import leading_cells
from modelpool.actors.graph.features.image_concat_graph import image_concat_input
from modelpool.actors.graph.features.image_prompt_graph import image_prompt_refs
from modelpool.actors.graph.features.reference_graph import ReferenceInputs, read_references, reference_cfg
from modelpool.actors.graph.features.region_graph import EMPTY_TEXT, region_params
from modelpool.actors.graph.features.schedule_guidance import check_schedule, schedule_of
from modelpool.actors.graph.features.video_output_graph import first_frame_mode
from modelpool.actors.graph.features.vision_graph import (
    reads_own_images,
    seen_images,
    video_conditioning,
    view_condition,
)
from modelpool.actors.request.field_errors import missing_field
from modelpool.pool.families.control_video_models import takes_control_video, takes_face_video
from modelpool.pool.inference.sampling.model_choices import resolve_guidance
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.stage_params import (
    ControlVideoCondition,
    FaceCondition,
    GuidanceParams,
    ImageCondition,
    LoraRef,
    MaskCondition,
    MaskedImageCondition,
    OutputShape,
    ReferenceCondition,
    SampleCondition,
    SampleParams,
    StartCondition,
)


def sample_params(
    run: SamplingRun, loras: tuple[LoraRef, ...], catalog: GraphCatalog
) -> tuple[SampleParams, ReferenceInputs]:
    """Return the parameters of `run` with `loras`, and how it reads its reference images. Raises UserError for what the
    model does not support, and for missing inputs."""
    request, name, facts = run.request, run.model.name, run.facts
    if facts.is_decoder_stage and not run.reads_prior:
        expected = "a model that starts from noise; this one reads the latent of another model"
        raise unusable_field("model", request.model, expected)
    concat = image_concat_input(run)
    width, height = (side * concat.enlarges for side in run.size(run.scale))
    whole = run.size()
    schedule = schedule_of(run)
    check_schedule(run, schedule.sampler)
    # the second model of two is usually not guided, and may be
    cfg, distilled = (run.cfg, 0.0) if run.reads_prior else resolve_guidance(facts.defaults, run.cfg)
    numbers = video_conditioning(request, facts)
    duration = duration_of(request, name, facts)
    check_extent((width, height), duration.frames, name, run.defaults)
    reads_image = first_frame_mode(request, name, facts) is not None or concat.is_shown
    _check_mask(run)
    varies_image = _varies_image(run)
    references = read_references(run, whole)
    first_step = 0 if reads_image or (varies_image and not run.is_second) else run.first_step
    if request.strength == 0 and (facts.is_prior_stage or (first_step < run.steps and not run.is_second)):
        raise unusable_field("strength", 0, f"a number above 0: model {name!r} is not only a start for its decoder")
    starts = run.is_second or (request.image is not None and not varies_image)
    conditions: list[SampleCondition] = []
    if reads_image:
        ends = request.last_image is not None
        conditions.append(
            ImageCondition(concat.noise_level, numbers.image_noise, numbers.motion, numbers.elevation, ends)
        )
    elif starts and not (facts.inpaints and first_step == 0):
        conditions.append(StartCondition())
    if request.mask is not None:
        conditions.append(MaskedImageCondition() if facts.inpaints else MaskCondition())
    if takes_control_video(facts):
        conditions.append(ControlVideoCondition())
    if takes_face_video(facts):
        conditions.append(FaceCondition())
    if facts.takes_view:
        conditions.append(view_condition(request, name))
    conditions += [ReferenceCondition(*size) for size in references.sizes]
    conditions += [region_params(region, whole) for region in request.regions]
    if request.run_options.perp_neg is not None:
        conditions.append(EMPTY_TEXT)
    conditions += control_refs(request, catalog.controls)
    if varies_image or reads_own_images(request, name, facts):
        conditions += seen_images(request, name, facts)
    elif request.image_prompts:
        conditions += image_prompt_refs(request, catalog.image_prompts)
    params = SampleParams(
        run.model,
        loras,
        OutputShape(
            *(width, height, duration.frames, duration.frame_rate, duration.seconds), leading_cells(request, facts)
        ),
        replace(schedule, first_step=first_step),
        GuidanceParams(cfg, distilled, concat.image_cfg or reference_cfg(request, facts)),
        run.seed,
        tuple(conditions),
        request.run_options,
    )
    return params, references


def _varies_image(run: SamplingRun) -> bool:
    """Return whether the model varies an image, of which it reads the embedding alone. Raises UnusableField if there is
    none."""
    if run.facts.image_labels is None:
        return False
    if run.request.image is None and not run.request.image_prompts:
        raise missing_field("image", f"model {run.model.name!r} makes an image that resembles a given one")
    return True


def _check_mask(run: SamplingRun) -> None:
    """Raise UnusableField if an inpainting model has no mask."""
    if run.facts.inpaints and run.request.mask is None:
        reason = f"model {run.model.name!r} is an inpainting model and requires image and mask"
        has_start = run.is_second or run.request.image is not None
        raise missing_field("mask" if has_start else "image and mask", reason)
