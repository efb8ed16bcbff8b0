"""Images and frames that guide a video at frames of it (LTX-Video, LTX-2): model inputs, the start of a run, and its
end.

The image of the first frame takes the place of that cell; each other one is a cell of its own, and frames are as many
cells as their latent has. These lead the latent and are dropped in the end. While it is sampled, the latent has the
full noise everywhere. The model reads a guided cell as a mixture, of which `strength` is the image: its noise level is
as much lower, and the step changes it as much less.

Frames of a lower resolution (IC-LoRA) are in every second, third, ... row and column of their cells; the model reads
nothing of the places between.

Sources: diffusers' LTX2ConditionPipeline and LTX2InContextPipeline. With x the latent here, its latent is
(1 - strength) x + strength image, and its steps of that are these steps of x.

Shape legend: B batch, C latent channels, T latent frames, H W height and width of a latent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelpool.pool.families.parts.forward import ModelKwargs
from modelpool.pool.inference.conditioning.run_parts import DenoisingRun, RunPart
from modelpool.pool.inference.conditioning.starts import StartLatent
from modelpool.pool.values.core import task_inputs
from modelpool.pool.values.core.sample_conditions import GuideCondition
from modelpool.pool.values.core.stage_params import Latent, SampleParams
from modelpool.pool.values.core.task_inputs import TaskInputs, numbered

#: model inputs: the latents of images where they guide, their strengths there, and the frames of leading cells
GUIDE, GUIDE_MASK, GUIDE_FRAMES = "guide", "guide_mask", "guide_frames"
#: model inputs of guides of several cells: which of them each leading cell is, -1 for an image, and the cells of the
#: video that it covers along a side; and the places of the leading cells that the model reads, if these are not all
GUIDE_CELLS, GUIDE_PLACES = "guide_cells", "guide_places"


def guides_part(run: DenoisingRun) -> RunPart | None:
    """Add the images that guide a video to the inputs of its model."""
    if run.work.guides:
        run.prompts = run.prompts.with_inputs(guide_inputs(run.work, run.inputs, run.shape_CHW))
    return None


def guide_inputs(work: SampleParams, inputs: Sequence[TaskInputs], shape_CTHW: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the inputs of the model for latents of this shape."""
    read = [
        torch.stack(
            [torch.from_numpy(each.read(numbered(task_inputs.GUIDE, n), Latent).samples_CHW) for each in inputs]
        )
        for n, _ in enumerate(work.guides)
    ]
    return placed_guides(work.guides, read, shape_CTHW)


def placed_guides(
    guides: Sequence[GuideCondition], images_BCHW: Sequence[Tensor], shape_CTHW: tuple[int, ...]
) -> dict[str, Tensor]:
    """Return the inputs of the model for the latents of images, [B, C, H, W] each, and of frames, [B, C, T, H, W]."""
    like = images_BCHW[0]
    clean = like.new_zeros((len(like), *shape_CTHW))
    mask = like.new_zeros((len(like), 1, *shape_CTHW[1:]))
    leading = [guide.frame for guide in guides for _ in range(guide.leading)]
    cell = 0
    for guide, image in zip(guides, images_BCHW, strict=True):
        place, count, step = (cell if guide.leading else len(leading)), guide.leading or 1, guide.factor or 1
        cell += guide.leading
        image_BCTHW = image if image.dim() == clean.dim() else image.unsqueeze(2)
        clean[:, :, place : place + count, ::step, ::step] = image_BCTHW
        mask[:, :, place : place + count, ::step, ::step] = guide.strength
    found = {GUIDE: clean, GUIDE_MASK: mask}
    if leading:
        found[GUIDE_FRAMES] = torch.tensor(leading, device=like.device).expand(len(like), -1)
    if any(guide.cells > 1 or guide.factor for guide in guides):
        # a cell alone is one frame
        cells = [(n if guide.cells > 1 else -1, guide.factor or 1) for guide in guides for n in range(guide.leading)]
        found[GUIDE_CELLS] = torch.tensor(cells, device=like.device).expand(len(like), -1, -1)
    if any(guide.factor > 1 for guide in guides):
        places = _read_places([factor for _, factor in cells], *shape_CTHW[2:])
        found[GUIDE_PLACES] = torch.tensor(places, device=like.device).expand(len(like), -1)
    return found


def _read_places(factors: Sequence[int], height: int, width: int) -> list[int]:
    """Return the places, counted along T, H and W, that a model reads of leading cells with these factors."""
    return [
        (cell * height + row) * width + column
        for cell, step in enumerate(factors)
        for row in range(0, height, step)
        for column in range(0, width, step)
    ]


def guide_shape(guide: GuideCondition, shape_CTHW: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the latent of a guide for a video with latents of `shape_CTHW`."""
    channels, _, height, width = shape_CTHW
    step = guide.factor or 1
    return (channels, *([guide.cells] if guide.cells else []), height // step, width // step)


def guided_start(
    start: StartLatent, work: SampleParams, inputs: Sequence[TaskInputs], shape_CTHW: tuple[int, ...]
) -> StartLatent:
    """Return the start of a run with the images in it; as it is without images."""
    if not work.guides:
        return start
    found = guide_inputs(work, inputs, shape_CTHW)
    base = start.latent_BCHW
    if base is None:
        base = torch.zeros_like(found[GUIDE])
    else:
        leading = base.new_zeros((*base.shape[:2], work.shape.leading, *base.shape[3:]))
        base = torch.cat((leading, base), dim=2)
    if base.shape != found[GUIDE].shape:  # of another size, which the caller refuses
        return StartLatent(base, start.inpainting)
    return StartLatent(torch.where(found[GUIDE_MASK] > 0, found[GUIDE], base), start.inpainting)


def guided_end(samples_BCTHW: Tensor, work: SampleParams, model_kwargs: ModelKwargs) -> Tensor:
    """Return the latents after a run as the model reads them: mixtures with the images. A run that keeps noise passes
    its latents on as they are."""
    if not work.guides or (work.part is not None and work.part.keeps_noise):
        return samples_BCTHW
    return samples_BCTHW + (model_kwargs[GUIDE] - samples_BCTHW) * model_kwargs[GUIDE_MASK]
