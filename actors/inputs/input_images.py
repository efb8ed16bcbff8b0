"""Brings the images that requests name to the pool: read, at the size that they are used in, hashed, in the object
store. In the driver's process; what travels with a request is a hash and a reference.

Rules
1. Left out sizes are the image's own, in whole steps of `SIZE_STEP`; of one left out, in proportion to the other.
   They stay left out of the request: in which steps its model has them is known where it is cut.
2. The image is scaled to cover that size and cropped about its centre (`pool.pixels.image_ops.covering`); the mask
likewise,
   so it must have the image's own size.
3. An image that several requests of a submission use in the same size is read and brought once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from modelpool.actors.graph.orders import given_id
from modelpool.actors.inputs.input_sizes import times_of, wanted_size
from modelpool.actors.inputs.input_videos import GivenVideos
from modelpool.actors.request.control_fields import Control
from modelpool.actors.request.image_fields import (
    ImageSource,
    InputImage,
    Pixels,
    Region,
    open_image,
    pixels_digest,
    plain_pixels,
)
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.wire.messages import ResultRef
from modelpool.pool.core.errors import UserError, unusable_field
from modelpool.pool.core.lru_cache import Recent
from modelpool.pool.core.stage_params import ImagePixels, Mask, PixelArray, Result
from modelpool.pool.pixels.image_ops import HALF, covering
from modelpool.pool.specs.spec import TaskId

#: images that are remembered for requests that use them again; what is remembered is a reference
REMEMBERED = 256
#: what is said to whoever gives masks that are as good as black
_BOOL = "; arrays of 0 and 1 are read as bool alone"

Brought: TypeAlias = tuple[InputImage, ResultRef]


@dataclass(frozen=True, slots=True)
class _Read:
    """An image in memory, at its own size."""

    pixels: PixelArray
    file: str

    @property
    def size(self) -> tuple[int, int]:
        return self.pixels.shape[1], self.pixels.shape[0]


class InputImages:
    """The images of one submission."""

    def __init__(self, give: Callable[[Result], ResultRef]) -> None:
        """`give` puts an image where workers find it."""
        self._give = give
        self._brought: Recent[Hashable, tuple[Brought, ...]] = Recent(REMEMBERED)
        #: the last one alone: it is as large as an image can be
        self._read: Recent[Hashable, _Read] = Recent(2)
        self._videos = GivenVideos(give)

    def bring(self, request: GenerateRequest) -> tuple[GenerateRequest, dict[TaskId, ResultRef]]:
        """`request` with its images given, and their references. Raises UserError naming the field for what cannot be
        read, or does not go together."""
        changed: dict[str, Any] = {}
        refs: dict[TaskId, ResultRef] = {}
        if request.image is not None and not isinstance(request.image, InputImage):
            key = (_identity(request.image), _identity(request.mask), request.width, request.height)
            (image, ref), *masks = self._brought.get(key, lambda: tuple(self._images_of(request)))
            changed["image"] = image
            refs[given_id(image)] = ref
            for mask, mask_ref in masks:
                changed["mask"] = mask
                refs[given_id(mask, is_mask=True)] = mask_ref
        if request.controls:
            changed["controls"] = tuple(self._bring_control(request, control, refs) for control in request.controls)
        if request.last_image is not None:
            changed["last_image"] = self._bring_whole("last_image", request.last_image, refs)
        changed |= self._videos.bring(request, refs)
        if request.references:
            brought = tuple(self._bring_whole("reference", each, refs) for each in request.references)
            changed["reference"] = brought if len(brought) > 1 else brought[0]
        if any(region.mask is not None for region in request.regions):
            changed["regions"] = tuple(self._bring_region(region, refs) for region in request.regions)
        return (request.model_copy(update=changed) if changed else request), refs

    def _bring_region(self, region: Region, refs: dict[TaskId, ResultRef]) -> Region:
        """`region` with its mask given, at its own size; its reference goes to `refs`."""
        if region.mask is None or isinstance(region.mask, InputImage):
            return region

        def bring() -> tuple[Brought, ...]:
            read = self._pixels("regions.mask", region.mask, is_mask=True)
            if (brightest := int(read.pixels.max())) <= 1:
                raise unusable_field("regions.mask", _brightest(brightest), f"white (255) where the text counts{_BOOL}")
            return (self._brought_as(read, read.pixels, Mask),)

        ((given, ref),) = self._brought.get(("region", _identity(region.mask)), bring)
        refs[given_id(given, is_mask=True)] = ref
        return region.model_copy(update={"mask": given})

    def _bring_control(self, request: GenerateRequest, control: Control, refs: dict[TaskId, ResultRef]) -> Control:
        """`control` of `request` with its own image and mask given, at their own size; their references go to
        `refs`."""
        given: dict[str, InputImage] = {}
        if control.mask is not None and not isinstance(control.mask, InputImage):
            name, source = ("image", request.image) if control.image is None else ("controls.image", control.image)
            image = self._pixels(name, source, is_mask=False)
            ((given["mask"], ref),) = self._brought.get(
                ("hole", _identity(control.mask), image.size),
                lambda: (self._mask_of("controls.mask", control.mask, image.size, image.size),),
            )
            refs[given_id(given["mask"], is_mask=True)] = ref
        if control.image is not None:
            given["image"] = self._bring_whole("controls.image", control.image, refs)
        return control.model_copy(update=given)

    def _bring_whole(self, name: str, source: ImageSource, refs: dict[TaskId, ResultRef]) -> InputImage:
        """The image in the field `name`, given at its own size; its reference goes to `refs`, unless it is given."""
        if isinstance(source, InputImage):
            return source

        def bring() -> tuple[Brought, ...]:
            read = self._pixels(name, source, is_mask=False)
            return (self._brought_as(read, read.pixels, ImagePixels),)

        ((given, ref),) = self._brought.get(("whole", _identity(source)), bring)
        refs[given_id(given)] = ref
        return given

    def bring_all(
        self, requests: Iterable[GenerateRequest]
    ) -> tuple[tuple[GenerateRequest, ...], dict[TaskId, ResultRef]]:
        """`bring` for each of `requests`; the references of all."""
        brought = [self.bring(request) for request in requests]
        return tuple(request for request, _ in brought), {key: ref for _, own in brought for key, ref in own.items()}

    def bring_each(self, requests: Iterable[GenerateRequest]) -> list[GenerateRequest | UserError]:
        """Each of `requests` as `bring` gives it, or what is wrong with its images."""
        found: list[GenerateRequest | UserError] = []
        for request in requests:
            try:
                found.append(self.bring(request)[0])
            except UserError as problem:
                found.append(problem)
        return found

    def _images_of(self, request: GenerateRequest) -> Iterable[Brought]:
        image = self._pixels("image", request.image, is_mask=False)
        size = wanted_size(request.width, request.height, image.size)
        yield self._brought_as(image, covering(image.pixels, *size), ImagePixels)
        if request.mask is None:
            return
        yield self._mask_of("mask", request.mask, image.size, size)

    def _mask_of(self, name: str, source: ImageSource, own: tuple[int, int], size: tuple[int, int]) -> Brought:
        """The mask in the field `name` of an image with its `own` size, which is used in `size`."""
        mask = self._pixels(name, source, is_mask=True)
        if mask.size != own:
            raise unusable_field(name, times_of(mask.size), f"{times_of(own)} pixels, the size of the image")
        values = covering(mask.pixels, *size)
        if (brightest := int(values.max())) < HALF:
            expected = f"white (255) where the image is to be made anew{_BOOL}"
            raise unusable_field(name, _brightest(brightest), expected)
        return self._brought_as(mask, values, Mask)

    def _brought_as(self, read: _Read, pixels: PixelArray, kind: Callable[[PixelArray], Result]) -> Brought:
        given = InputImage(pixels_digest(pixels), pixels.shape[1], pixels.shape[0], read.file)
        return given, self._give(kind(pixels))

    def _pixels(self, name: str, source: ImageSource, is_mask: bool) -> _Read:
        assert not isinstance(source, InputImage), f"{name}: an image is given, and its mask is not"
        if isinstance(source, Pixels):
            return _Read(source.pixels, "")
        return self._read.get((is_mask, _identity(source)), lambda: _read_file(name, source, is_mask))


def _brightest(value: int) -> str:
    return "a mask that is black all over" if value == 0 else f"a mask whose brightest pixel is {value} of 255"


def _read_file(name: str, path: str, is_mask: bool) -> _Read:
    with open_image(name, path) as image:
        return _Read(plain_pixels(name, image, is_mask), os.path.basename(path))


def _identity(source: ImageSource | None) -> Hashable:
    """What is the same for the same pixels, as far as can be told without reading them."""
    if not isinstance(source, str):
        return None if source is None else source.sha256
    try:
        found = os.stat(source)
    except OSError:
        return source  # reading it will say what is wrong
    return source, found.st_mtime_ns, found.st_size
