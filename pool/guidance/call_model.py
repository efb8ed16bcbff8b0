"""How a diffusion model is asked for a guess, whatever its kind, and what it is told beside a text.

Knows that UNets and transformers are called differently, and which of a run's numbers a model wants to hear. Does not
know samplers.

Shape legend: B batch, C latent channels, L tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from modelpool.pool.conditioning.micro_conditioning import (
    CONTEXT,
    FRAME_RATE,
    GUIDANCE,
    IMAGE_CONTEXT,
    POOLED,
    SECONDS,
    SIZE,
    Extras,
    Residuals,
    call_unet,
)
from modelpool.pool.conditioning.video_numbers import NUMBERS, numbers_of_video
from modelpool.pool.core.sampling_facts import SamplingFacts, VideoFacts
from modelpool.pool.core.stage_params import Encoded, FloatArray, SampleWork
from modelpool.pool.guidance.controlled_transformer import AddedTo
from modelpool.pool.models.diffusion.rows import ARCHITECTURES

#: what stays float32, since half precision has no digits for it
_NUMBERS = frozenset({GUIDANCE, SIZE, FRAME_RATE, SECONDS, NUMBERS})


def ask(
    facts: SamplingFacts,
    module: nn.Module,
    x_BC: Tensor,
    level_B: Tensor,
    context_BLD: Tensor,
    told: Extras,
    residuals: Residuals | None = None,
) -> Tensor:
    """What `module` predicts for the latents `x_BC` at `level_B`, in the dtype of `x_BC`, told a text (the states of a
    image, where a model reads no text) and what is beside it. Numbers about the image stay float32, masks what they
    are. `residuals` are what ControlNets add to the model."""
    if not facts.model:
        return call_unet(module, x_BC, level_B, context_BLD, told, residuals)
    if residuals is not None:
        module = AddedTo(module, residuals)
    dtype = x_BC.dtype
    text = CONTEXT if facts.reads_text else IMAGE_CONTEXT
    texts = {text: context_BLD.to(dtype), **{name: as_told(name, value, dtype) for name, value in told.items()}}
    return ARCHITECTURES[facts.model].call(module, x_BC, level_B, texts)


def as_told(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """What a model that computes in `dtype` is told by this name: numbers about the image stay float32, masks what
    they are."""
    return value if name in _NUMBERS or not value.is_floating_point() else value.to(dtype)


def video_cells(video: VideoFacts, frames: int) -> int:
    """Cells of time of the latent of a video of so many frames."""
    return 1 + (frames - 1) // video.multiple


def tokens_of(facts: SamplingFacts, work: SampleWork) -> int:
    """Patches of the latent of `work`, which the shift of some flows depends on."""
    return patches_of(facts, work.width, work.height, work.frames)


def patches_of(facts: SamplingFacts, width: int, height: int, frames: int) -> int:
    """Patches of the latent of an image of this many pixels, or of a video of so many such frames."""
    side, video = max(1, facts.side_multiple), facts.video
    cells = 1 if video is None or not frames else video_cells(video, frames)
    return cells * (width // side) * (height // side)


def told_beside(facts: SamplingFacts, texts: Sequence[Encoded], work: SampleWork) -> dict[str, Tensor]:
    """What a model of `facts` is told beside the states of `texts`, one for each image of a run like `work`: each
    [B, ...], on the CPU."""
    told = {
        name: torch.stack([torch.from_numpy(text.others[name].copy()) for text in texts]) for name in texts[0].others
    }
    if texts[0].pooled_V is not None and POOLED in facts.reads:
        told[POOLED] = torch.stack([torch.from_numpy(_pooled(text)) for text in texts])
    return told | numbers_told(facts, work, len(texts))


def numbers_told(facts: SamplingFacts, work: SampleWork, count: int) -> dict[str, Tensor]:
    """What a model of `facts` is told of `work` beside texts, for `count` images; [B, ...], on the CPU."""
    told = {}
    if GUIDANCE in facts.reads:
        told[GUIDANCE] = torch.full((count,), work.guidance, dtype=torch.float32)
    if FRAME_RATE in facts.reads:
        told[FRAME_RATE] = torch.full((count,), work.frame_rate, dtype=torch.float32)
    if SECONDS in facts.reads:
        told[SECONDS] = torch.tensor([[0.0, work.seconds]], dtype=torch.float32).repeat(count, 1)
    if facts.video is not None and facts.video.numbers is not None:
        numbers = numbers_of_video(facts.video.numbers, work)
        told[NUMBERS] = numbers.repeat(count, *[1] * numbers.dim())
    if SIZE in facts.reads:
        told[SIZE] = torch.tensor([[work.height, work.width]], dtype=torch.float32).repeat(count, 1)
    return told


def _pooled(text: Encoded) -> FloatArray:
    assert text.pooled_V is not None, "some texts of a run are pooled, others are not"
    return text.pooled_V.copy()
