"""Image inputs of a diffusion model besides the noisy latent: inpaint mask and masked image latents, the latent or the
pixels of an image to edit or enlarge, reference images, control video.

Knows the order in which `pool.values.core.stage_params.SampleParams` reads them and the form that each model was
trained with (`pool.values.core.sampling_facts.ImageConcat`); runs nothing. First frames of videos are in `first_frame`.

Shape legend: B batch, C channels, H W height and width of a latent (of an image for masks of pixels).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from modelpool.pool.families.control_video_models import FACE, control_input, control_video_channels
from modelpool.pool.families.parts.video_calls import FACE_SIDE
from modelpool.pool.inference.conditioning.camera_path import CAMERA, camera_numbers
from modelpool.pool.inference.conditioning.camera_view import VIEW, view_inputs
from modelpool.pool.inference.conditioning.image_embeds import vision_inputs
from modelpool.pool.inference.conditioning.micro_conditioning import (
    CLASS_LABELS,
    ESTIMATES,
    IMAGE,
    IMAGE_CONTEXT,
    IMAGE_LATENT,
    IMAGE_PLACES,
)
from modelpool.pool.inference.conditioning.run_parts import DenoisingRun, RunPart
from modelpool.pool.inference.pixels.image_ops import HALF, covering, there_and_back
from modelpool.pool.inference.pixels.latent_pixels import to_vae_scale
from modelpool.pool.inference.sampling.noise import ImageNoise, image_noise_seed
from modelpool.pool.inference.sampling.schedules import sigma_table
from modelpool.pool.models.components.common.infer_config import image_concat_channels
from modelpool.pool.models.components.diffusion.camera_rays import NUMBERS
from modelpool.pool.values.core import task_inputs
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.sampling_facts import FirstFrameMode, ImageConcat, SamplingFacts
from modelpool.pool.values.core.stage_params import (
    CameraCondition,
    ControlVideoCondition,
    FaceCondition,
    ImagePixels,
    Latent,
    Mask,
    MaskedImageCondition,
    PixelArray,
    SampleParams,
    VideoFrames,
)
from modelpool.pool.values.core.task_inputs import TaskInputs, numbered

#: share of noise in the latent of an image to refine
_NOISE_SHARE = 0.25
#: model inputs: patches of a reference image next to the model's, and the noise level of an image
REFERENCE, NOISE_LEVEL = "reference", "noise_level"
#: model input: the result of the prior of a two-stage model
PRIOR = "prior"


@dataclass(frozen=True, slots=True, eq=False)
class ImageInputs:
    """Model inputs by name, each [B, ...] on the CPU.

    model_kwargs  with every text
    negative  with the negative prompt, replacing inputs of the same names
    without  with the negative prompt, for a prediction without the image; None if there is none
    left_out  names of inputs that this prediction has not
    """

    model_kwargs: Mapping[str, Tensor] = field(default_factory=dict)
    negative: Mapping[str, Tensor] = field(default_factory=dict)
    without: Mapping[str, Tensor] | None = None
    left_out: frozenset[str] = frozenset()


def image_inputs_part(run: DenoisingRun) -> RunPart | None:
    """Add the images that the model reads to its inputs."""
    cells = run.latent.sides(run.work.shape.width, run.work.shape.height)
    found = image_inputs(run.works, run.inputs, run.facts, run.latent, cells)
    run.prompts = run.prompts.with_inputs(found.model_kwargs, found.negative)
    if found.without is not None:
        # the inputs of a text of its own stay
        without = {**(run.prompts.without_image or {}), **found.without}
        run.prompts = replace(run.prompts, without_image=without, left_out=found.left_out)
    return None


def image_inputs(
    works: Sequence[SampleParams],
    inputs: Sequence[TaskInputs],
    facts: SamplingFacts,
    latent: LatentFacts,
    cells: tuple[int, int],
) -> ImageInputs:
    """Return the inputs of a model of `facts` from the images that these works read, for latents of `cells` (height,
    width); of a first frame, only inputs that are repeated for every frame."""
    work, model_kwargs, negative = works[0], dict[str, Tensor](), dict[str, Tensor]()
    if work.image is not None and facts.image_concat is ImageConcat.PIXELS:
        model_kwargs[IMAGE] = torch.stack([_noisy(each, read, facts) for each, read in zip(works, inputs, strict=True)])
        model_kwargs[NOISE_LEVEL] = torch.full((len(works),), work.image_numbers.noise_level, dtype=torch.long)
    elif work.image is not None and facts.image_concat is ImageConcat.DEPTH:
        model_kwargs[IMAGE] = torch.stack([_depth(work, read, cells) for read in inputs])
    elif work.image is not None and facts.image_concat is ImageConcat.INSTEAD:
        model_kwargs[IMAGE_LATENT] = _latents(inputs, task_inputs.IMAGE)
        model_kwargs[CLASS_LABELS] = torch.tensor([ESTIMATES] * len(works))
    elif work.image is not None and facts.video is None:
        model_kwargs[IMAGE] = _latents(inputs, task_inputs.IMAGE)
        if facts.image_concat is ImageConcat.NOISED_LATENT:
            model_kwargs[IMAGE] = _with_noise(model_kwargs[IMAGE], works)
        if facts.image_concat is ImageConcat.UNSCALED:
            model_kwargs[IMAGE] = to_vae_scale(model_kwargs[IMAGE], latent)
        if facts.takes_view:
            model_kwargs[VIEW] = view_inputs(work, len(works))
            negative |= {name: torch.zeros_like(model_kwargs[name]) for name in (IMAGE, VIEW)}
    elif work.image is not None and repeats_image(facts):
        model_kwargs[IMAGE] = to_vae_scale(_latents(inputs, task_inputs.IMAGE), latent)
        negative[IMAGE] = torch.zeros_like(model_kwargs[IMAGE])
    if work.has(ControlVideoCondition):
        model_kwargs[control_input(facts)] = _latents(inputs, task_inputs.CONTROL_VIDEO)
    if cameras := work.all_of(CameraCondition):
        numbers_FN = camera_numbers(cameras[0], work.shape.frames, work.shape.width, work.shape.height)
        model_kwargs[CAMERA] = numbers_FN.repeat(len(works), 1, 1)
    if work.has(FaceCondition):
        model_kwargs[FACE] = torch.stack([_face(work, read) for read in inputs])
        # Source: diffusers' WanAnimatePipeline
        negative[FACE] = torch.full_like(model_kwargs[FACE], -1.0)
    if work.has(MaskedImageCondition):
        masks = [
            covering(read.read(task_inputs.MASK, Mask).values_HW, work.shape.width, work.shape.height)
            for read in inputs
        ]
        hidden_BCHW = _latents(inputs, task_inputs.MASKED_IMAGE)
        model_kwargs[IMAGE] = _masked_image(facts.image_concat, masks, hidden_BCHW, cells, latent.downscale)
    for number, name in enumerate(reference_names(work)):
        model_kwargs[name] = _latents(inputs, numbered(task_inputs.REFERENCE, number))
    if work.prior is not None:
        model_kwargs[PRIOR] = _latents(inputs, task_inputs.PRIOR)
        # Source: `effnet` of diffusers' StableCascadeDecoderPipeline
        negative[PRIOR] = torch.zeros_like(model_kwargs[PRIOR])
    without = None
    if work.guidance.without_image and not facts.names_images:  # a text without names of images is one without images
        blank = reference_names(work) if facts.blank_reference else (IMAGE,)
        without = {name: torch.zeros_like(model_kwargs[name]) for name in blank if name in model_kwargs}
    vision_kwargs = vision_inputs(works, inputs, facts)
    if facts.seen_as is not None and IMAGE_CONTEXT in vision_kwargs:
        # Source: `negative_image_embeds` of diffusers' StableCascadePriorPipeline
        negative[IMAGE_CONTEXT] = torch.zeros_like(vision_kwargs[IMAGE_CONTEXT])
    if CLASS_LABELS in vision_kwargs:
        # Source: `_encode_image` of diffusers' StableUnCLIPImg2ImgPipeline
        negative[CLASS_LABELS] = torch.zeros_like(vision_kwargs[CLASS_LABELS])
    return ImageInputs({**model_kwargs, **vision_kwargs}, negative, without, left_out(work, facts))


def repeats_image(facts: SamplingFacts) -> bool:
    """Whether the first frame is repeated for every frame of a video."""
    return facts.video is not None and facts.video.begins is FirstFrameMode.REPEATED


def empty_image_inputs(
    facts: SamplingFacts, work: SampleParams, shape_CHW: tuple[int, ...], batch: int, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Return empty image inputs, [batch, ...], of a model of `facts` in a run like `work` with latents of `shape_CHW`,
    for dry runs. A model that reads an image always gets one."""
    model_kwargs, cells = dict[str, Tensor](), shape_CHW[1:]
    if facts.image_concat is ImageConcat.INSTEAD:
        model_kwargs[IMAGE_LATENT] = torch.empty((batch, *shape_CHW), dtype=torch.float32, device=device)
        model_kwargs[CLASS_LABELS] = torch.empty((batch, len(ESTIMATES)), dtype=torch.float32, device=device)
    elif facts.image_concat is not None:
        channels, downscale = shape_CHW[0], work.shape.height // shape_CHW[-2]
        shape = batch, image_concat_channels(facts.image_concat, channels, downscale), *cells
        model_kwargs[IMAGE] = torch.empty(shape, dtype=torch.float32, device=device)
    if facts.takes_view:
        model_kwargs[VIEW] = view_inputs(work, batch).to(device or "cpu")
    if facts.image_concat is ImageConcat.PIXELS:
        model_kwargs[NOISE_LEVEL] = torch.empty((batch,), dtype=torch.long, device=device)
    if work.has(ControlVideoCondition):
        channels = control_video_channels(facts, shape_CHW[0], work.shape.height // shape_CHW[-2])
        shape = batch, channels, *cells
        model_kwargs[control_input(facts)] = torch.empty(shape, dtype=torch.float32, device=device)
    if work.has(CameraCondition):
        model_kwargs[CAMERA] = torch.empty((batch, work.shape.frames, NUMBERS), dtype=torch.float32, device=device)
    if work.has(FaceCondition):
        face = batch, 3, work.shape.frames, FACE_SIDE, FACE_SIDE
        model_kwargs[FACE] = torch.empty(face, dtype=torch.float32, device=device)
    for name, (width, height) in reference_names(work).items():
        size = height * cells[-2] // work.shape.height, width * cells[-1] // work.shape.width
        model_kwargs[name] = torch.empty((batch, shape_CHW[0], *size), dtype=torch.float32, device=device)
    if facts.names_images and work.references:  # on the host, which computes with them
        places = [[place, place + 1] for place in range(len(work.references))]
        model_kwargs[IMAGE_PLACES] = torch.tensor([places] * batch)
    return model_kwargs


def left_out(work: SampleParams, facts: SamplingFacts) -> frozenset[str]:
    """Return the names of the model inputs that a prediction without images of `work` has not: reference images. Texts
    that name images are without them where they name none, and others read zeros."""
    has_all = facts.names_images or facts.blank_reference or not facts.guides_by_references
    return frozenset(() if has_all else reference_names(work))


def reference_names(work: SampleParams) -> dict[str, tuple[int, int]]:
    """Return the names of the reference images among the model inputs, in order, and their sizes."""
    return {
        REFERENCE if number == 1 else f"{REFERENCE}_{number}": (reference.width, reference.height)
        for number, reference in enumerate(work.references, start=1)
    }


def cell_corners(mask_HW: PixelArray, cells: tuple[int, int]) -> Tensor:
    """Return the mask as models read it, [H, W] of 0 and 1: whether the first pixel of each latent position is
    regenerated, as in training. Source: diffusers, `prepare_mask_latents` of StableDiffusionInpaintPipeline."""
    corners_HW: Tensor = functional.interpolate(_white(mask_HW)[None, None], size=cells)[0, 0]
    return corners_HW


def cell_pixels(mask_HW: PixelArray, cells: tuple[int, int], downscale: int) -> Tensor:
    """Return the mask with one channel for each pixel of a latent position, row by row: [pixels, H, W] of 0 and 1.
    Source: diffusers, `prepare_mask_latents` of FluxFillPipeline."""
    height, width = cells
    by_cell = _white(mask_HW).reshape(height, downscale, width, downscale)
    pixels_CHW: Tensor = by_cell.permute(1, 3, 0, 2).reshape(downscale**2, height, width)
    return pixels_CHW


def _masked_image(
    image_concat: ImageConcat | None,
    masks: Sequence[PixelArray],
    hidden_BCHW: Tensor,
    cells: tuple[int, int],
    downscale: int,
) -> Tensor:
    """Return the mask and the masked image latent, concatenated along the channels."""
    if image_concat is ImageConcat.INPAINT_BY_PIXEL:
        pixels = torch.stack([cell_pixels(mask, cells, downscale) for mask in masks])
        return torch.cat([hidden_BCHW, pixels], dim=1)
    assert image_concat is ImageConcat.INPAINT, f"a model with image input {image_concat} reads no inpaint mask"
    return torch.cat([torch.stack([cell_corners(mask, cells) for mask in masks])[:, None], hidden_BCHW], dim=1)


def _noisy(work: SampleParams, read: TaskInputs, facts: SamplingFacts) -> Tensor:
    """Return the image to enlarge, [C, H, W] from -1 to 1, with the model's noise at the requested level, from separate
    random numbers (from the seed's complement)."""
    image = read.read(task_inputs.IMAGE, ImagePixels)
    pixels_CHW = torch.from_numpy(image.pixels_HWC.copy()).permute(2, 0, 1).float() / 127.5 - 1.0
    sigma = sigma_table(facts.noise).sigmas[work.image_numbers.noise_level]
    noise_CHW = ImageNoise(image_noise_seed(work.seed)).draw((1, *pixels_CHW.shape))[0]
    return (pixels_CHW + noise_CHW * sigma) / math.hypot(1.0, sigma)


def _with_noise(latent_BC: Tensor, works: Sequence[SampleParams]) -> Tensor:
    """Return image latents with noise, from separate random numbers of each image (from the seed's complement).
    Source: `prepare_latents` of diffusers' HunyuanImageRefinerPipeline."""
    noises = [ImageNoise(image_noise_seed(work.seed)).draw((1, *latent_BC.shape[1:])) for work in works]
    return torch.cat(noises) * _NOISE_SHARE + latent_BC * (1.0 - _NOISE_SHARE)


def _depth(work: SampleParams, read: TaskInputs, cells: tuple[int, int]) -> Tensor:
    """Return the luminance of a depth map at the cells of the latent, [1, H, W] from -1 to 1: the whole range, whatever
    the map's. Source: `prepare_depth_map` of diffusers' StableDiffusionDepth2ImgPipeline."""
    image = read.read(task_inputs.IMAGE, ImagePixels)
    whole_HWC = covering(image.pixels_HWC, work.shape.width, work.shape.height)
    grey_HW = np.asarray(Image.fromarray(whole_HWC).convert("L")).astype(np.float32)
    depth_CHW = functional.interpolate(torch.from_numpy(grey_HW)[None, None], size=cells, mode="bicubic")[0]
    least, most = depth_CHW.min(), depth_CHW.max()
    # a flat map has no depth
    found_CHW: Tensor = 2.0 * (depth_CHW - least) / (most - least).clamp(min=1e-6) - 1.0
    return found_CHW


def _face(work: SampleParams, read: TaskInputs) -> Tensor:
    """Return the frames of a face, [C, T, H, W] from -1 to 1; after the last one, back and forth as often as it takes.
    Source: `pad_video_frames` of diffusers' WanAnimatePipeline."""
    frames_THWC = read.read(task_inputs.FACE_VIDEO, VideoFrames).frames_THWC
    places = there_and_back(len(frames_THWC), work.shape.frames)
    faces = [covering(frames_THWC[place], FACE_SIDE, FACE_SIDE) for place in places]
    return torch.from_numpy(np.stack(faces)).permute(3, 0, 1, 2).float() / 127.5 - 1.0


def _latents(inputs: Sequence[TaskInputs], name: str) -> Tensor:
    """Return the latent of this name of each image of a run."""
    return torch.stack([torch.from_numpy(read.read(name, Latent).samples_CHW.copy()) for read in inputs])


def _white(mask_HW: PixelArray) -> Tensor:
    return torch.from_numpy((mask_HW >= HALF).astype(np.float32))
