"""Builds the recipe of a request from the stage parameters of its task graph; texts, file names and what no stage reads
come from the request. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.features.music_graph import MUSIC_FIELDS
from modelpool.actors.graph.features.recipe import (
    IMAGE_FORMAT,
    Recipe,
    RecipeControl,
    RecipeDecoder,
    RecipeImagePrompt,
    RecipeImages,
    RecipeLora,
    RecipeLowNoise,
    RecipeNoise,
    RecipeRegion,
    RecipeUpscale,
    RecipeView,
)
from modelpool.actors.request.low_noise_fields import LowNoiseRun
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.stage_params import (
    EncodeParams,
    LoraRef,
    SampleParams,
    SamplingSchedule,
    StageParams,
    UpscaleParams,
    ViewCondition,
    VisionEncodeParams,
)
from modelpool.pool.values.core.task_inputs import IMAGE_PROMPT, numbered


def recipe_of(request: GenerateRequest, graph: JobGraph, loras: Sequence[LoraRef]) -> Recipe:
    """Return the recipe (without versions) of `request`, whose defaults are filled in and whose task graph is `graph`.
    `loras` are its LoRAs, which the graph has only as far as they change a component that runs."""
    works = [graph.works[task.task_id] for task in graph.job.tasks]
    sampled = [work for work in works if isinstance(work, SampleParams)]
    sample, decoder = sampled[0], next((work for work in sampled if work.prior is not None), None)
    texts = (work for work in works if isinstance(work, EncodeParams))
    return Recipe(
        model=sample.model.name,
        model_sha256=sample.model.sha256,
        prompt=request.prompt,
        negative=request.negative,
        loras=tuple(_lora(lora) for lora in loras),
        steps=sample.schedule.steps,
        cfg=sample.guidance.distilled or sample.guidance.cfg,
        sampler=sample.schedule.sampler,
        schedule=sample.schedule.noise_schedule,
        width=sample.shape.width,
        height=sample.shape.height,
        seed=sample.seed,
        warnings=graph.warnings,
        pictures=_images(request, sample, works, _image_prompts(request, graph)),
        frames=sample.shape.frames,
        frame_rate=sample.shape.frame_rate,
        motion=sample.image_numbers.motion,
        image_noise=sample.image_numbers.image_noise,
        elevation=sample.image_numbers.elevation,
        seconds=sample.shape.seconds,
        format="" if request.format in (None, IMAGE_FORMAT) else request.format,
        quality=request.quality or 0,
        clip_skip=request.clip_skip,
        embeddings=tuple(sorted({(each.name, each.sha256) for work in texts for each in work.embeddings})),
        decoder=None if decoder is None else _decoder(decoder),
        noise=_noise(sample.schedule),
        view=next((_view(each) for each in sample.all_of(ViewCondition)), None),
        sigmas=sample.schedule.sigmas,
        shift=sample.schedule.shift,
        **{name: value for name in MUSIC_FIELDS if (value := getattr(request, name))},
        low_noise=_low_noise(request.low_noise),
        upscale=_upscale(request, graph),
        options=sample.options.settings(),
    )


def _lora(lora: LoraRef) -> RecipeLora:
    return RecipeLora(
        lora.name,
        lora.sha256,
        lora.strength,
        noise=lora.noise,
        text_strength=lora.text_strength,
        start=lora.start,
        end=lora.end,
        blocks=lora.blocks,
        keyframes=lora.keyframes,
        interpolation=lora.interpolation,
        only=lora.only,
    )


def _view(view: ViewCondition) -> RecipeView:
    return RecipeView(view.azimuth, view.elevation, view.distance, view.image_elevation)


def _noise(schedule: SamplingSchedule) -> RecipeNoise | None:
    noise = RecipeNoise(schedule.eta, schedule.s_noise, schedule.s_churn)
    return None if noise == RecipeNoise() else noise


def _decoder(work: SampleParams) -> RecipeDecoder:
    return RecipeDecoder(work.model.name, work.model.sha256, work.schedule.steps, work.guidance.cfg)


def _low_noise(options: LowNoiseRun | None) -> RecipeLowNoise | None:
    if options is None or options.boundary is None or options.cfg is None:
        return None
    return RecipeLowNoise(options.boundary, options.cfg)


def _images(
    request: GenerateRequest,
    sample: SampleParams,
    works: Sequence[StageParams],
    prompts: tuple[RecipeImagePrompt, ...],
) -> RecipeImages | None:
    """Return the input images of `request`, whose first sampling is `sample`; None if it uses none."""
    sources = (request.image, request.reference, request.hires, request.video)
    others = sample.controls or request.regions or prompts or sample.schedule.first_step
    if not any(each is not None for each in sources) and not others:
        return None
    references: Sequence[Any] = request.references
    files: dict[str, Any] = {}
    for name in ("image", "mask", "last_image", "video", "video_mask", "face_video"):
        if (source := getattr(request, name)) is not None:
            files |= {f"{name}_sha256": source.sha256, f"{name}_file": source.file}
    if references:
        files |= {"reference_sha256": references[0].sha256, "reference_file": references[0].file}
    return RecipeImages(
        **files,
        first_step=sample.schedule.first_step,
        paste=request.mask is not None and request.paste,
        hires=_hires(request, works),
        controls=_controls(request, sample),
        image_prompts=prompts,
        regions=tuple(
            RecipeRegion(each.prompt, each.strength, each.box, "" if each.mask is None else each.mask.sha256)
            for each in request.regions
        ),
        more_references=tuple(each.sha256 for each in references[1:]),
        more_reference_files=tuple(each.file for each in references[1:]),
        reference_as=request.reference_as or "",
        image_cfg=sample.guidance.image_cfg,
        noise_level=sample.image_numbers.noise_level,
    )


def _hires(request: GenerateRequest, works: Sequence[StageParams]) -> dict[str, Any]:
    """Return the second pass of `request`, with the upscaler of the first if it has one."""
    if request.hires is None:
        return {}
    found = request.hires.recorded()
    del found["upscaler"]
    if request.hires.upscaler is not None:
        # the first upscaling: that of the output comes after the second pass
        first = next(work for work in works if isinstance(work, UpscaleParams))
        found |= {"upscaler": first.model.name, "upscaler_sha256": first.model.sha256}
    return found


def _upscale(request: GenerateRequest, graph: JobGraph) -> RecipeUpscale | None:
    work = graph.works[graph.job.wanted]
    if request.upscale is None or not isinstance(work, UpscaleParams):
        return None
    scale = float(work.model.scale if request.upscale.scale is None else request.upscale.scale)
    return RecipeUpscale(work.model.name, work.model.sha256, scale, work.tile, work.overlap)


def _controls(request: GenerateRequest, sample: SampleParams) -> tuple[RecipeControl, ...]:
    """Return the ControlNets of `sample`, with the files of the images that `request` names for them."""
    found = []
    for control, ref in zip(request.controls, sample.controls, strict=True):
        image, mask = control.image or request.image, control.mask or request.mask
        found.append(
            RecipeControl(
                *(ref.name, ref.sha256, image.sha256, image.file),
                *(ref.strength, ref.start, ref.end),
                mode=ref.mode,
                said=dict(ref.config_overrides),
                mask_sha256="" if ref.mask_mode is None else mask.sha256,
            )
        )
    return tuple(found)


def _image_prompts(request: GenerateRequest, graph: JobGraph) -> tuple[RecipeImagePrompt, ...]:
    """Return the image prompts of the first sampling of `graph`, with the encoders and the files of their images."""
    if not request.image_prompts:
        return ()
    found = []
    task = next(task for task in graph.job.tasks if isinstance(graph.works[task.task_id], SampleParams))
    work, needs = graph.works[task.task_id], dict(zip(task.input_names, task.needs, strict=True))
    assert isinstance(work, SampleParams), "the task samples"
    for number, (prompt, ref) in enumerate(zip(request.image_prompts, work.image_prompts, strict=True)):
        encode = graph.works.get(needs.get(numbered(IMAGE_PROMPT, number), task.task_id))
        encoder = encode.model if isinstance(encode, VisionEncodeParams) else None
        images: Sequence[Any] = prompt.images
        masks: Sequence[Any] = prompt.masks
        found.append(
            RecipeImagePrompt(
                *(ref.name, ref.sha256),
                *(("", "") if encoder is None else (encoder.name, encoder.sha256)),
                *(ref.strength, ref.start, ref.end),
                image_sha256=tuple(image.sha256 for image in images),
                image_files=tuple(image.file for image in images),
                faces_sha256="" if prompt.faces is None else prompt.faces.sha256,
                faces_file="" if prompt.faces is None else prompt.faces.file,
                blocks=ref.blocks,
                mask_sha256=tuple(mask.sha256 for mask in masks),
                mask_files=tuple(mask.file for mask in masks),
            )
        )
    return tuple(found)
