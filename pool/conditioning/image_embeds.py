"""The stage of vision encoders, an image into the states that a diffusion model is told of it; and how a run reads
those.

Knows the inputs of `SeeImageWork`, and which models are told states beside a text and which in place of one. No
memory is managed here.

Shape legend: L states or tokens, D width of a state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from modelpool.pool.conditioning.micro_conditioning import IMAGE_CONTEXT
from modelpool.pool.core.errors import CorruptFile
from modelpool.pool.core.sampling_facts import SamplingFacts, Sight
from modelpool.pool.core.stage_params import Encoded, ImagePixels, Result, RunHooks, SampleWork, SeeImageWork, Seen
from modelpool.pool.core.stopping import stop_check, stop_if_asked
from modelpool.pool.models.vision.preprocess import shown, side_of, states
from modelpool.pool.models.vision.qwen import grid_of, patches_of, read_patches
from modelpool.pool.patcher.model_patcher import ModelPatcher
from modelpool.pool.pixels.image_ops import covering


def see_images(
    works: Sequence[SeeImageWork],
    inputs: Sequence[Sequence[Result]],
    encoder: ModelPatcher,
    sight: Sight | None,
    hooks: RunHooks,
) -> tuple[Seen, ...]:
    """What the encoder says of the images among each of `inputs`, one after the other; without a `sight` as states
    that stand among the words of a text. One step.

    Raises CorruptFile for a result with NaN or infinity, and Stopped at an image or layer.
    """
    found = []
    with encoder.running(stop_check(hooks)) as module:
        for work, read in zip(works, inputs, strict=True):
            images = [one for one in read if isinstance(one, ImagePixels)] or [_black()]
            parts = []
            for image in images:
                stop_if_asked(hooks.should_stop)
                parts.append(_states_of(image, module, encoder, sight, (work.width, work.height)))
            states_LD = torch.cat([*parts, *parts[-1:] * (work.images - len(parts))])
            if not torch.isfinite(states_LD).all():
                raise CorruptFile(f"vision encoder {encoder.key}: found states with NaN or infinity, expected numbers")
            grid = grid_of((work.width, work.height)) if sight is None else (0, 0)
            found.append(Seen(states_LD.contiguous().numpy(), grid))
    hooks.on_step(1, 1)
    return tuple(found)


def _black() -> ImagePixels:
    """What is seen where no image is given."""
    return ImagePixels(np.zeros((1, 1, 3), np.uint8))


def _states_of(
    image: ImagePixels, module: nn.Module, encoder: ModelPatcher, sight: Sight | None, size: tuple[int, int]
) -> Tensor:
    """What `module`, which is that of `encoder`, says of an image, [L, D] on the CPU; nothing stays on the device."""
    if sight is None:
        patches_NP = patches_of(covering(image.pixels_HWC, *size)).to(encoder.device)
        return read_patches(module, patches_NP.to(encoder.compute_dtype), grid_of(size)).float().to("cpu")
    shown_BCHW = shown(image.pixels_HWC, side_of(module), sight).to(encoder.device)
    return states(module, shown_BCHW.to(encoder.compute_dtype), sight)[0].float().to("cpu")


def texts_read(work: SampleWork, read: Sequence[Result], facts: SamplingFacts) -> tuple[Encoded, ...]:
    """The texts that a run reads. A model that is told of images alone has the states of its image in place of the
    prompt, and zeros in place of the negative prompt."""
    if facts.reads_text:
        return tuple(one for one in read if isinstance(one, Encoded))
    states_LD = _seen(read).states_LD
    blind = () if work.cfg == 1 else (Encoded(np.zeros_like(states_LD)),)
    return (Encoded(states_LD), *blind)


def told_of_sight(inputs: Sequence[Sequence[Result]], facts: SamplingFacts) -> dict[str, Tensor]:
    """What a model is told with every text by its vision encoder, [B, L, D] on the CPU; nothing for one that has the
    states in place of a text."""
    if facts.sight is None or not facts.sight.is_told or not facts.reads_text:
        return {}
    return {IMAGE_CONTEXT: torch.stack([torch.from_numpy(_seen(read).states_LD.copy()) for read in inputs])}


def _seen(read: Sequence[Result]) -> Seen:
    """The one image that a run sees; another number of them is our mistake."""
    (found,) = [one for one in read if isinstance(one, Seen)]
    return found
