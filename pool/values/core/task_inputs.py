"""`TaskInputs`: the results that a task reads, by name.

Names, with the values read under them. `N` counts from 0.

encode a text      image.N: `ImageEmbeds` of a reference image
encode an image    image, last_image: `ImagePixels`; mask: `Mask`
encode a video,    video: `VideoFrames`; audio: `AudioSamples`
or audio
encode a control   video: `VideoFrames`; video_mask: `VideoMask`; reference.N: `ImagePixels`
video
embed images       image.N: `ImagePixels`
sample             positive, negative, without_images, lyrics, region.N: `Encoded`; image_embeds: `ImageEmbeds`;
                   start: `Latent` that noise is added to; image: `Latent` of the first frame, or of the concatenated
                   image, or the `ImagePixels` to upscale; mask: `Mask`; masked_image, control_video, reference.N,
                   prior: `Latent`; region_mask.N: `Mask`; control.N: `ImagePixels` or `Latent`;
                   control_mask.N: `Mask`; control_masked_image.N: `Latent`; face_video: `VideoFrames`;
                   image_prompt.N: `ImageEmbeds` of the images of an image prompt,
                   image_prompt_blank.N of no image, image_prompt_face.N of faces; image_prompt_mask.N.N: `Mask`;
                   guide.N: `Latent` of an image that guides a video; sound: `Latent` with the audio of a video to keep;
                   voice: `Latent` with the audio of a voice;
                   box.N: `Encoded` text of a box, with its pooled state;
                   sampler_state: `SamplerState` of the other expert
decode             latent: `Latent`, or tiles.N: `DecodedTiles` of each part; image: `ImagePixels` to keep outside of
                   mask: `Mask`
upscale            image: `ImagePixels` or `VideoFrames`; latent: `Latent`

Models read colours: an alpha channel is left out as in ComfyUI (`TaskInputs.of_model`). Control images keep it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from modelpool.pool.values.core.results import COLOURS, ImagePixels, Result, VideoFrames

POSITIVE, NEGATIVE, REGION, IMAGE_EMBEDS = "positive", "negative", "region", "image_embeds"
LYRICS = "lyrics"
#: the text of the prediction without images, if it is not the negative one
WITHOUT_IMAGES = "without_images"
START, IMAGE, LAST_IMAGE, MASK, MASKED_IMAGE = "start", "image", "last_image", "mask", "masked_image"
VIDEO, VIDEO_MASK, CONTROL_VIDEO, REFERENCE = "video", "video_mask", "control_video", "reference"
FACE_VIDEO = "face_video"
REGION_MASK, CONTROL, CONTROL_MASK = "region_mask", "control", "control_mask"
IMAGE_PROMPT, IMAGE_PROMPT_BLANK, IMAGE_PROMPT_FACE = "image_prompt", "image_prompt_blank", "image_prompt_face"
IMAGE_PROMPT_MASK = "image_prompt_mask"
CONTROL_MASKED_IMAGE, PRIOR, SAMPLER_STATE, LATENT = "control_masked_image", "prior", "sampler_state", "latent"
TILES, AUDIO, GUIDE, BOX = "tiles", "audio", "guide", "box"
#: the audio of a video that a run keeps, and the audio of the voice that it follows
SOUND, VOICE = "sound", "voice"

_Kind = TypeVar("_Kind", bound=Result)


class WrongInputs(Exception):
    """A task does not read what it was sent. An internal error: no request causes it."""


def numbered(name: str, number: int) -> str:
    """Return the name of one of several inputs of a kind: "control.0"."""
    return f"{name}.{number}"


def enumerated(name: str, count: Iterable[object]) -> Iterator[str]:
    """Yield the names of several inputs of a kind, one for each of `count`."""
    return (numbered(name, number) for number, _ in enumerate(count))


class TaskInputs(Mapping[str, Result]):
    """The results that a task reads, by name."""

    __slots__ = ("_results",)

    def __init__(self, results: Mapping[str, Result] | None = None) -> None:
        self._results: dict[str, Result] = dict(results or {})

    @classmethod
    def named(cls, names: Sequence[str], results: Sequence[Result]) -> TaskInputs:
        """Return `results` under `names`, in the same order. Raises WrongInputs for another number of names, or for a
        name that occurs twice."""
        if len(names) != len(results) or len(set(names)) < len(names):
            found = ", ".join(type(one).__name__ for one in results) or "none"
            raise WrongInputs(f"inputs: found {found}, expected {', '.join(names) or 'none'}, each once")
        return cls(dict(zip(names, results, strict=True)))

    @classmethod
    def of_model(cls, results: Mapping[str, Result]) -> TaskInputs:
        """Return the results that a task with a model reads: images and videos without alpha channels. Control images
        keep theirs: to some ControlNets it is the inpaint mask, and others refuse it."""
        prefix = f"{CONTROL}."
        return cls({name: one if name.startswith(prefix) else _opaque(one) for name, one in results.items()})

    def __getitem__(self, name: str) -> Result:
        return self._results[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    def __repr__(self) -> str:
        return f"TaskInputs({', '.join(f'{name}: {type(one).__name__}' for name, one in self._results.items())})"

    def read(self, name: str, kind: type[_Kind]) -> _Kind:
        """Return the input of this name. Raises WrongInputs if it is missing or of another kind."""
        found = self._results.get(name)
        if not isinstance(found, kind):
            raise WrongInputs(f"input {name!r}: found {self!r}, expected {kind.__name__}")
        return found

    def read_all(self, name: str, kind: type[_Kind]) -> tuple[_Kind, ...]:
        """Return the numbered inputs of this name, in order; none if there are none. Raises WrongInputs."""
        found: list[_Kind] = []
        while (place := numbered(name, len(found))) in self._results:
            found.append(self.read(place, kind))
        return tuple(found)


def _opaque(result: Result) -> Result:
    match result:
        case ImagePixels(pixels_HWC) if pixels_HWC.shape[-1] > COLOURS:
            return ImagePixels(pixels_HWC[..., :COLOURS])
        case VideoFrames(frames_THWC) if frames_THWC.shape[-1] > COLOURS:
            return replace(result, frames_THWC=frames_THWC[..., :COLOURS])
        case _:
            return result
