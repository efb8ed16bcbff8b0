"""The recipe of a request that was cut into tasks: what it says, and what its sampling was found to be. Pure."""

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
from modelpool.pool.core.stage_params import LoraRef, SampleWork


def recipe_of(
    request: GenerateRequest,
    sample: SampleWork,
    loras: Sequence[LoraRef],
    written_as: str,
    warnings: tuple[str, ...],
    embeddings: tuple[tuple[str, str], ...],
    second: SampleWork | None,
) -> Recipe:
    """The recipe (without versions) of `request`, which leaves nothing open, and which `sample` was the first sampling
    of. `second` is what another model did with what that made, of an image that two make."""
    pictures = RecipeImages.of(request, sample.controls)
    return Recipe(
        model=sample.model.name,
        model_sha256=sample.model.sha256,
        prompt=request.prompt,
        negative=request.negative,
        loras=tuple(RecipeLora(lora.name, lora.sha256, lora.strength, lora.noise) for lora in loras),
        steps=sample.steps,
        cfg=sample.guidance or sample.cfg,
        sampler=sample.sampler,
        schedule=sample.schedule,
        width=sample.width,
        height=sample.height,
        seed=sample.seed,
        warnings=warnings,
        pictures=None if pictures is None else _as_used(pictures, sample),
        frames=sample.frames,
        frame_rate=sample.frame_rate,
        motion=sample.motion,
        image_noise=sample.image_noise,
        elevation=sample.elevation,
        seconds=sample.seconds,
        format="" if written_as == IMAGE_FORMAT else written_as,
        clip_skip=request.clip_skip,
        embeddings=embeddings,
        decoder=RecipeDecoder.of(second),
        low_noise=RecipeLowNoise.of(request.low_noise),
    )


def _as_used(pictures: RecipeImages, sample: SampleWork) -> RecipeImages:
    first_step, image_cfg, noise_level = sample.first_step, sample.image_cfg, sample.noise_level
    return replace(pictures, first_step=first_step, image_cfg=image_cfg, noise_level=noise_level)
