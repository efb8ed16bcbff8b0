"""Runs vision encoders, and selects the texts and image embeddings that a run reads.

Knows the inputs of `VisionEncodeParams`, and which models read image embeddings in addition to a text or instead of
one. Does not manage memory.

Shape legend: L states or tokens, D width of a state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from modelpool.pool.inference.conditioning.image_labels import image_labels, image_states, pooled_images
from modelpool.pool.inference.conditioning.micro_conditioning import IMAGE_CONTEXT
from modelpool.pool.inference.pixels.image_ops import covering
from modelpool.pool.models.components.vision.preprocess import preprocess_image, side_of, states
from modelpool.pool.models.components.vision.seen_images import seen_grid, seen_patches, seen_states
from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.values.core.sampling_facts import SamplingFacts, SeenAs, VisionEncoderUse
from modelpool.pool.values.core.stage_params import (
    Encoded,
    ImageEmbeds,
    ImagePixels,
    RunHooks,
    SampleParams,
    SeenImages,
    VisionEncodeParams,
)
from modelpool.pool.values.core.stopping import stop_check, stop_if_asked
from modelpool.pool.values.core.task_inputs import (
    IMAGE,
    IMAGE_EMBEDS,
    NEGATIVE,
    POSITIVE,
    REGION,
    WITHOUT_IMAGES,
    TaskInputs,
    enumerated,
)
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher


def use_of(work: VisionEncodeParams, facts: SamplingFacts) -> VisionEncoderUse | None:
    """Return which output of the vision encoder `work` reads: its own `use`, else the use of `facts`."""
    return VisionEncoderUse(work.use) if work.use else facts.vision_use


def embed_images(
    works: Sequence[VisionEncodeParams],
    inputs: Sequence[TaskInputs],
    encoder: ModelPatcher,
    vision_use: VisionEncoderUse | None,
    hooks: RunHooks,
) -> tuple[ImageEmbeds, ...]:
    """Return the embeddings of the images in each of `inputs`; without a `vision_use`, as states among the tokens of a
    text. One step.

    Raises CorruptFile for a result with NaN or infinity, and Stopped at an image or layer.
    """
    found = []
    with encoder.running(stop_check(hooks)) as module:
        for work, read in zip(works, inputs, strict=True):
            images = () if work.blank else read.read_all(IMAGE, ImagePixels) or (_black(),)
            parts = [_blank_states(module, encoder, vision_use)] if work.blank and vision_use is not None else []
            for image in images:
                stop_if_asked(hooks.should_stop)
                parts.append(_states_of(image, module, encoder, vision_use, (work.width, work.height)))
            states_LD = torch.cat([*parts, *parts[-1:] * (work.images - len(parts))])
            if not torch.isfinite(states_LD).all():
                message = f"vision encoder {encoder.key}: found states with NaN or infinity, expected finite numbers"
                raise CorruptFile(message)
            grid = seen_grid(module, (work.width, work.height)) if vision_use is None else (0, 0)
            found.append(ImageEmbeds(states_LD.contiguous().numpy(), grid))
    hooks.on_step(1, 1)
    return tuple(found)


def _black() -> ImagePixels:
    """Return the image that is encoded if none is set."""
    return ImagePixels(np.zeros((1, 1, 3), np.uint8))


def _states_of(
    image: ImagePixels,
    module: nn.Module,
    encoder: ModelPatcher,
    vision_use: VisionEncoderUse | None,
    size: tuple[int, int],
) -> Tensor:
    """Return the states of an image by `module` of `encoder`, [L, D] on the CPU; frees all device memory."""
    if vision_use is None:
        patches_NP = seen_patches(module, covering(image.pixels_HWC, *size)).to(encoder.device)
        return seen_states(module, patches_NP.to(encoder.compute_dtype), size).float().to("cpu")
    shown_BCHW = preprocess_image(image.pixels_HWC, side_of(module), vision_use).to(encoder.device)
    return states(module, shown_BCHW.to(encoder.compute_dtype), vision_use)[0].float().to("cpu")


def _blank_states(module: nn.Module, encoder: ModelPatcher, vision_use: VisionEncoderUse) -> Tensor:
    """Return the states of zeros in place of a normalised image, [L, D] on the CPU."""
    shown_BCHW = torch.zeros((1, 3, *[side_of(module)] * 2), dtype=encoder.compute_dtype, device=encoder.device)
    return states(module, shown_BCHW, vision_use)[0].float().to("cpu")


def texts_read(work: SampleParams, read: TaskInputs, facts: SamplingFacts) -> tuple[Encoded, ...]:
    """Return the texts that a run reads: prompt, negative prompt, text without images, regions; not the lyrics. A model
    that reads only images gets the embeddings of its image instead of the prompt, and zeros instead of the negative
    prompt."""
    if facts.reads_text:
        names = (POSITIVE, NEGATIVE) if work.reads_negative and not facts.learned_negative else (POSITIVE,)
        if (facts.names_images or work.guidance.of_prompt) and work.guidance.without_image:
            names = (*names, WITHOUT_IMAGES)
        return tuple(read.read(name, Encoded) for name in (*names, *enumerated(REGION, work.regions)))
    states_LD = _embeds(read).states_LD
    zeros = (Encoded(np.zeros_like(states_LD)),) if work.reads_negative else ()
    return (Encoded(states_LD), *zeros)


def vision_inputs(
    works: Sequence[SampleParams], inputs: Sequence[TaskInputs], facts: SamplingFacts
) -> dict[str, Tensor]:
    """Return the image embeddings that a model reads with every text, [B, L, D] on the CPU, or the class labels that
    are made of them; nothing for a model that reads them instead of a text."""
    if facts.image_labels is not None:
        return image_labels(works, [_embeds(read).states_LD for read in inputs], facts.image_labels)
    if facts.seen_as is SeenAs.STATES and works[0].has(SeenImages):
        return {IMAGE_CONTEXT: image_states(works, [_embeds(read).states_LD for read in inputs])}
    if facts.vision_use is None or not facts.vision_use.is_model_input or not facts.reads_text:
        return {}
    return {IMAGE_CONTEXT: torch.stack([torch.from_numpy(_embeds(read).states_LD.copy()) for read in inputs])}


def pooled_vision(works: Sequence[SampleParams], inputs: Sequence[TaskInputs], facts: SamplingFacts) -> Tensor | None:
    """Return the embeddings of images that take the place of the pooled prompt, [B, D] on the CPU; None for runs
    without."""
    if facts.seen_as is not SeenAs.POOLED or not works[0].has(SeenImages):
        return None
    return pooled_images(works, [_embeds(read).states_LD for read in inputs])


def _embeds(read: TaskInputs) -> ImageEmbeds:
    return read.read(IMAGE_EMBEDS, ImageEmbeds)
