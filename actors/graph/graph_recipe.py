"""Builds the recipe of a request from the request and the work of its sampling. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from modelpool.actors.graph.recipe import (
    IMAGE_FORMAT,
    Recipe,
    RecipeDecoder,
    RecipeImages,
    RecipeLora,
    RecipeLowNoise,
)
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.core.stage_params import LoraRef, SampleParams


def recipe_of(
    request: GenerateRequest,
    sample: SampleParams,
    loras: Sequence[LoraRef],
    written_as: str,
    warnings: tuple[str, ...],
    embeddings: tuple[tuple[str, str], ...],
    second: SampleParams | None,
) -> Recipe:
    """Return the recipe (without versions) of `request`, whose defaults are filled in; `sample` is its first sampling,
    `second` the work of the decoder of a two-stage model."""
    images = RecipeImages.of(request, sample.controls)
    return Recipe(
        model=sample.model.name,
        model_sha256=sample.model.sha256,
        prompt=request.prompt,
        negative=request.negative,
        loras=tuple(RecipeLora(lora.name, lora.sha256, lora.strength, lora.noise) for lora in loras),
        steps=sample.schedule.steps,
        cfg=sample.guidance.distilled or sample.guidance.cfg,
        sampler=sample.schedule.sampler,
        schedule=sample.schedule.noise_schedule,
        width=sample.shape.width,
        height=sample.shape.height,
        seed=sample.seed,
        warnings=warnings,
        pictures=None if images is None else _as_used(images, sample),
        frames=sample.shape.frames,
        frame_rate=sample.shape.frame_rate,
        motion=sample.image_numbers.motion,
        image_noise=sample.image_numbers.image_noise,
        elevation=sample.image_numbers.elevation,
        seconds=sample.shape.seconds,
        format="" if written_as == IMAGE_FORMAT else written_as,
        clip_skip=request.clip_skip,
        embeddings=embeddings,
        decoder=RecipeDecoder.of(second),
        low_noise=RecipeLowNoise.of(request.low_noise),
    )


def _as_used(images: RecipeImages, sample: SampleParams) -> RecipeImages:
    return replace(
        images,
        first_step=sample.schedule.first_step,
        image_cfg=sample.guidance.image_cfg,
        noise_level=sample.image_numbers.noise_level,
    )
