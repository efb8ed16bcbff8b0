"""What conditions a sampling run besides its texts, as values that name the inputs which they read. Torch-free.

`inputs(number)` of each kind returns names of `pool.values.core.task_inputs`; `number` counts the values of that kind
in a task. Negative prompts, image embeddings and the state of another expert follow from guidance, model and schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from modelpool.pool.values.core.refs import ControlMaskMode, ControlRef, GligenRef, ImagePromptRef
from modelpool.pool.values.core.task_inputs import (
    BOX,
    CONTROL,
    CONTROL_MASK,
    CONTROL_MASKED_IMAGE,
    CONTROL_VIDEO,
    FACE_VIDEO,
    GUIDE,
    IMAGE,
    IMAGE_PROMPT,
    IMAGE_PROMPT_BLANK,
    IMAGE_PROMPT_FACE,
    IMAGE_PROMPT_MASK,
    MASK,
    MASKED_IMAGE,
    PRIOR,
    REFERENCE,
    REGION,
    REGION_MASK,
    SOUND,
    START,
    VOICE,
    numbered,
)


@dataclass(frozen=True, slots=True)
class StartCondition:
    """Noise is added to a `Latent` of any size; otherwise the run starts from noise."""

    def inputs(self, number: int) -> tuple[str, ...]:
        """Return the names of its inputs."""
        return (START,)


@dataclass(frozen=True, slots=True)
class ImageCondition:
    """The `Latent` of the first frame of a video, or of the image that is concatenated; an upscaling model reads
    `ImagePixels`.

    noise_level  noise added to the image to upscale, 0 to 1000
    image_noise  standard deviation of the noise on the image, with pixels in [-1, 1]
    motion       motion strength of a video, 0 to 255
    elevation    camera elevation of an orbit video, in degrees
    ends         the latent also has the last frame
    frames       first frames of a video that are images; 0 for one
    """

    noise_level: int = 0
    image_noise: float = 0.0
    motion: int = 0
    elevation: float = 0.0
    ends: bool = False
    frames: int = 0

    def inputs(self, number: int) -> tuple[str, ...]:
        """Return the names of its inputs."""
        return (IMAGE,)


@dataclass(frozen=True, slots=True)
class MaskCondition:
    """Outside of a mask, the result is the start latent."""

    def inputs(self, number: int) -> tuple[str, ...]:
        """Return the names of its inputs."""
        return (MASK,)


@dataclass(frozen=True, slots=True)
class MaskedImageCondition:
    """The mask and the `Latent` of the masked image, inputs of an inpainting model."""

    def inputs(self, number: int) -> tuple[str, ...]:
        """Return the names of its inputs."""
        return (MASK, MASKED_IMAGE)


@dataclass(frozen=True, slots=True)
class ReferenceCondition:
    """The `Latent` of a reference image of this width and height."""

    width: int
    height: int

    def inputs(self, number: int) -> tuple[str, ...]:
        """Return the names of its inputs."""
        return (numbered(REFERENCE, number),)


@dataclass(frozen=True, slots=True)
class PriorCondition:
    """The prior's `Latent` of this height and width, for the second stage."""

    height: int
    width: int

    def inputs(self, number: int) -> tuple[str, ...]:
        """Return the names of its inputs."""
        return (PRIOR,)


@dataclass(frozen=True, slots=True)
class ControlVideoCondition:
    """The latents of a control video: the result of encoding a `ControlVideo`."""

    def inputs(self, number: int) -> tuple[str, ...]:
        """Return the names of its inputs."""
        return (CONTROL_VIDEO,)


@dataclass(frozen=True, slots=True)
class FaceCondition:
    """The `VideoFrames` of a face, as many as the video has."""

    def inputs(self, number: int) -> tuple[str, ...]:
        """Return the names of its inputs."""
        return (FACE_VIDEO,)


@dataclass(frozen=True, slots=True)
class ViewCondition:
    """The view from which a model shows the object of an image. Angles are in degrees.

    azimuth    from the camera of the image around the object
    elevation  of the camera: above the image's camera, or, with `image_elevation`, above the ground
    distance   of the camera, less the distance of the image's camera
    image_elevation  elevation of the camera of the image, for models that read it in place of the distance
    """

    azimuth: float = 0.0
    elevation: float = 0.0
    distance: float = 0.0
    image_elevation: float | None = None

    def inputs(self, number: int) -> tuple[str, ...]:
        """Return the names of its inputs: none."""
        return ()


#: motions of a camera, by the names of ComfyUI
CAMERA_MOTIONS = (
    *("Static", "Pan Up", "Pan Down", "Pan Left", "Pan Right", "Zoom In", "Zoom Out"),
    *("Anti Clockwise (ACW)", "ClockWise (CW)"),
)


@dataclass(frozen=True, slots=True)
class CameraCondition:
    """The path of the camera of a video (`pool.inference.conditioning.camera_path`): one of `CAMERA_MOTIONS`, its
    speed, and focal lengths and centre as shares of the sides of a video of 1280x720 pixels."""

    motion: str
    speed: float = 1.0
    fx: float = 0.5
    fy: float = 0.5
    cx: float = 0.5
    cy: float = 0.5

    def inputs(self, number: int) -> tuple[str, ...]:
        """Return the names of its inputs: none."""
        return ()


@dataclass(frozen=True, slots=True)
class TracksCondition:
    """Tracks of points through a video (`pool.inference.conditioning.motion_tracks`).

    method   of the model: "ati" blends the features where tracks begin, "move" copies them
    points   of each track, from the first frame on: x and y in pixels, and 1 where it is seen, 0 where it is not
    temperature, nearest  of "ati": how fast weights fall with the distance, and how many tracks count at each place
    """

    method: str
    points: tuple[tuple[tuple[float, float, float], ...], ...]
    temperature: float = 220.0
    nearest: int = 2

    def inputs(self, number: int) -> tuple[str, ...]:
        """Return the names of its inputs: none."""
        return ()


@dataclass(frozen=True, slots=True)
class SeenImages:
    """How a model reads the embeddings of images that it varies, where it is not one image as it is: for each its
    strength, and its noise as a share of the levels."""

    strengths: tuple[float, ...]
    noises: tuple[float, ...]

    def inputs(self, number: int) -> tuple[str, ...]:
        """Return the names of its inputs: none, the embeddings follow from the model."""
        return ()


@dataclass(frozen=True, slots=True)
class RegionParams:
    """A region of an image with its own prompt, and its strength relative to the main prompt. `box` is left, top, width
    and height as fractions of the image; None if a `Mask` defines the region."""

    strength: float
    box: tuple[float, float, float, float] | None = None

    def inputs(self, number: int) -> tuple[str, ...]:
        """Return the names of its inputs."""
        return (numbered(REGION, number), *((numbered(REGION_MASK, number),) if self.box is None else ()))


@dataclass(frozen=True, slots=True)
class GuideCondition:
    """The `Latent` of an image that guides a video at a frame, from 0, and its strength: 1 keeps it.

    cells   latent cells of the guide that are added to the video: of frames, or of an image at any frame. 0: an image
            at frame 0 takes the place of the first cell, another one has a cell
    factor  with `cells`: a cell of the guide is as wide and as high as so many of the video (IC-LoRA); 0 for one
    """

    frame: int
    strength: float
    cells: int = 0
    factor: int = 0

    @property
    def leading(self) -> int:
        """The cells that lead the latent of the video."""
        return self.cells or int(self.frame > 0)

    def inputs(self, number: int) -> tuple[str, ...]:
        """Return the names of its inputs."""
        return (numbered(GUIDE, number),)


@dataclass(frozen=True, slots=True)
class KeptSoundCondition:
    """The audio track of the video comes from a `Latent`: it is kept, and the frames follow it."""

    def inputs(self, number: int) -> tuple[str, ...]:
        """Return the names of its inputs."""
        return (SOUND,)


@dataclass(frozen=True, slots=True)
class VoiceCondition:
    """The audio track of the video has the voice of a `Latent` with an audio track of `length` positions. `scale`: of
    the guidance away from a prediction without it; 0 for none."""

    length: int
    scale: float = 0.0

    def inputs(self, number: int) -> tuple[str, ...]:
        """Return the names of its inputs."""
        return (VOICE,)


SampleCondition: TypeAlias = (
    StartCondition
    | ImageCondition
    | MaskCondition
    | MaskedImageCondition
    | ReferenceCondition
    | PriorCondition
    | ControlVideoCondition
    | FaceCondition
    | ViewCondition
    | SeenImages
    | RegionParams
    | GuideCondition
    | ControlRef
    | ImagePromptRef
    | GligenRef
    | CameraCondition
    | TracksCondition
    | KeptSoundCondition
    | VoiceCondition
)


def condition_inputs(conditions: Sequence[SampleCondition]) -> Iterator[str]:
    """Yield the names of all inputs that `conditions` read."""
    counted: Counter[type[SampleCondition]] = Counter()
    for condition in conditions:
        number = counted[type(condition)]
        counted[type(condition)] += 1
        if isinstance(condition, ControlRef):
            yield from controlnet_inputs(condition, number)
        elif isinstance(condition, ImagePromptRef):
            yield from image_prompt_inputs(condition, number)
        elif isinstance(condition, GligenRef):
            yield from (numbered(BOX, place) for place, _ in enumerate(condition.boxes))
        else:
            yield from condition.inputs(number)


def controlnet_inputs(control: ControlRef, number: int) -> tuple[str, ...]:
    """Return the names of the inputs of a ControlNet: its image as `ImagePixels` of any size, or as their `Latent`;
    with a mask also that, and the `Latent` of the image under it."""
    names = [numbered(CONTROL, number)]
    if control.mask_mode is not None:
        names.append(numbered(CONTROL_MASK, number))
    if control.reads_latent and control.mask_mode is ControlMaskMode.SEPARATE:
        names.append(numbered(CONTROL_MASKED_IMAGE, number))
    return tuple(names)


def image_prompt_inputs(prompt: ImagePromptRef, number: int) -> tuple[str, ...]:
    """Return the names of the inputs of an image prompt: the states of its images, of no image, and of faces, and its
    masks."""
    names = [numbered(IMAGE_PROMPT, number)] if prompt.images else []
    names += [numbered(IMAGE_PROMPT_BLANK, number)] if prompt.blank else []
    names += [numbered(IMAGE_PROMPT_FACE, number)] if prompt.face_version else []
    names += [numbered(numbered(IMAGE_PROMPT_MASK, number), place) for place in range(prompt.masks)]
    return tuple(names)
