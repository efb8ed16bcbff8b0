"""Reads the images of requests, scales them to their size, hashes them and puts them in the object store.

Runs in the driver's process; a request carries a hash and a reference.

Rules
1. Missing sizes are the image's, in multiples of `SIZE_STEP`; a single missing side is proportional to the other.
   The request keeps them unset: the model's step is known only where the task graph is built.
2. The image is scaled to cover that size and cropped at the centre (`pool.inference.pixels.image_ops.covering`), and so
   is the mask, which must have the size of the original image.
3. An image that several requests of a submission use at the same size is read and stored once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from modelpool.actors.control.inputs.input_audio import InputAudios
from modelpool.actors.control.inputs.input_sizes import times_of, wanted_size
from modelpool.actors.control.inputs.input_videos import InputVideos
from modelpool.actors.graph.common.input_ids import input_faces_id, input_image_id
from modelpool.actors.request.control_fields import Control
from modelpool.actors.request.face_fields import Faces, InputFaces
from modelpool.actors.request.image_decoding import open_image, plain_pixels
from modelpool.actors.request.image_fields import ImageSource, InputImage, Pixels, Region, TaskImage, pixels_digest
from modelpool.actors.request.image_prompt_fields import ImagePrompt
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.workflow_fields import AudioNode, ImageNode, SampleNode, VideoNode, Workflow
from modelpool.actors.worker.wire.messages import ResultRef
from modelpool.pool.inference.pixels.image_ops import HALF, covering
from modelpool.pool.values.core.errors import UserError, unusable_field
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.core.stage_params import ImageEmbeds, ImagePixels, Mask, PixelArray, Result
from modelpool.pool.values.specs.spec import TaskId

#: number of stored images that are remembered for later requests; an entry is only a reference
REMEMBERED = 256
#: hint for masks that are (almost) black
_BOOL = "; arrays of 0 and 1 are read as bool alone"

Brought: TypeAlias = tuple[InputImage, ResultRef]


@dataclass(frozen=True, slots=True)
class _Read:
    """An image in memory, at its original size."""

    pixels: PixelArray
    file: str

    @property
    def size(self) -> tuple[int, int]:
        return self.pixels.shape[1], self.pixels.shape[0]


class InputImages:
    """The input images of one submission."""

    def __init__(self, put: Callable[[Result], ResultRef]) -> None:
        """`put` stores an image where workers find it."""
        self._put = put
        self._brought: LruCache[Hashable, tuple[Brought, ...]] = LruCache(REMEMBERED)
        self._faces: LruCache[str, ResultRef] = LruCache(REMEMBERED)
        #: an image and a mask only: entries are large
        self._read: LruCache[Hashable, _Read] = LruCache(2)
        self._videos, self._audios = InputVideos(put), InputAudios(put)

    def bring(self, request: GenerateRequest) -> tuple[GenerateRequest, dict[TaskId, ResultRef]]:
        """Return `request` with its images stored and without labels, which the pool does not need, and the references
        to its images. Raises UserError naming the field for images that cannot be read or do not fit together."""
        request = request.without_labels()
        changed: dict[str, Any] = {}
        refs: dict[TaskId, ResultRef] = {}
        if request.image is not None and not isinstance(request.image, InputImage | TaskImage):
            key = (_identity(request.image), _identity(request.mask), request.width, request.height)
            (image, ref), *masks = self._brought.get(key, lambda: tuple(self._images_of(request)))
            changed["image"] = image
            refs[input_image_id(image)] = ref
            for mask, mask_ref in masks:
                changed["mask"] = mask
                refs[input_image_id(mask, is_mask=True)] = mask_ref
        if request.controls:
            changed["controls"] = tuple(self._bring_control(request, control, refs) for control in request.controls)
        if request.image_prompts:
            changed["image_prompts"] = tuple(self._bring_image_prompt(each, refs) for each in request.image_prompts)
        if request.last_image is not None:
            changed["last_image"] = self._bring_whole("last_image", request.last_image, refs)
        changed |= self._videos.bring(request, refs)
        if request.references:
            brought = tuple(self._bring_whole("reference", each, refs) for each in request.references)
            changed["reference"] = brought if len(brought) > 1 else brought[0]
        if any(region.mask is not None for region in request.regions):
            changed["regions"] = tuple(self._bring_region(region, refs) for region in request.regions)
        if request.workflow is not None:
            changed["workflow"] = self._bring_workflow(request.workflow, refs)
        return (request.model_copy(update=changed) if changed else request), refs

    def _bring_workflow(self, workflow: Workflow, refs: dict[TaskId, ResultRef]) -> Workflow:
        """Return `workflow` with the images of its nodes stored; the references are added to `refs`."""
        changed: dict[str, Any] = {}
        for node_id, node in workflow.nodes.items():
            if isinstance(node, ImageNode):
                place = f"workflow node {node_id}"
                bring = self._bring_workflow_mask if node.kind == "mask" else self._bring_whole
                changed[node_id] = node.model_copy(update={node.kind: bring(place, node.source, refs)})
            elif isinstance(node, VideoNode):
                brought_video = self._videos.bring_frames(f"workflow node {node_id}", node.video, refs)
                changed[node_id] = node.model_copy(update={"video": brought_video})
            elif isinstance(node, AudioNode):
                brought_audio = self._audios.bring(f"workflow node {node_id}", node.audio, refs)
                changed[node_id] = node.model_copy(update={"audio": brought_audio})
            elif isinstance(node, SampleNode):
                brought, own_refs = self.bring(node.request)
                refs |= own_refs
                if brought is not node.request:
                    changed[node_id] = node.model_copy(update={"request": brought})
        return workflow.changed_at(changed)

    def bring_image(self, name: str, source: ImageSource) -> tuple[InputImage, dict[TaskId, ResultRef]]:
        """Return the image in the field `name`, stored at its original size, and its reference. Raises UserError."""
        refs: dict[TaskId, ResultRef] = {}
        stored = self._bring_whole(name, source, refs)
        assert isinstance(stored, InputImage), "an image of a driver"
        return stored, refs

    def _bring_region(self, region: Region, refs: dict[TaskId, ResultRef]) -> Region:
        """Return `region` with its mask stored at its original size; the reference is added to `refs`."""
        if region.mask is None:
            return region
        return region.model_copy(update={"mask": self._bring_area("regions.mask", region.mask, refs)})

    def _bring_workflow_mask(
        self, name: str, source: ImageSource, refs: dict[TaskId, ResultRef]
    ) -> InputImage | TaskImage:
        """Return the mask of a node of a workflow, as `_bring_area`; it may be black: other nodes may invert it."""
        return self._bring_area(name, source, refs, may_be_black=True)

    def _bring_area(
        self, name: str, source: ImageSource, refs: dict[TaskId, ResultRef], may_be_black: bool = False
    ) -> InputImage | TaskImage:
        """Return the mask in the field `name`, where a prompt applies, stored at its original size; a new reference is
        added to `refs`."""
        if isinstance(source, InputImage | TaskImage):
            return source

        def bring() -> tuple[Brought, ...]:
            read = self._pixels(name, source, is_mask=True)
            if (brightest := int(read.pixels.max())) <= 1 and not (may_be_black and brightest == 0):
                raise unusable_field(name, _brightest(brightest), f"white (255) where the prompt applies{_BOOL}")
            return (self._brought_as(read, read.pixels, Mask),)

        ((stored, ref),) = self._brought.get(("area", may_be_black, _identity(source)), bring)
        refs[input_image_id(stored, is_mask=True)] = ref
        return stored

    def _bring_control(self, request: GenerateRequest, control: Control, refs: dict[TaskId, ResultRef]) -> Control:
        """Return `control` of `request` with its image and mask stored at their original size; the references are added
        to `refs`."""
        stored: dict[str, InputImage | TaskImage] = {}
        if control.mask is not None and not isinstance(control.mask, InputImage):
            name, source = ("image", request.image) if control.image is None else ("controls.image", control.image)
            image = self._pixels(name, source, is_mask=False)
            ((stored["mask"], ref),) = self._brought.get(
                ("mask", _identity(control.mask), image.size),
                lambda: (self._mask_of("controls.mask", control.mask, image.size, image.size),),
            )
            refs[input_image_id(stored["mask"], is_mask=True)] = ref
        if control.image is not None:
            stored["image"] = self._bring_whole("controls.image", control.image, refs)
        return control.model_copy(update=stored)

    def _bring_image_prompt(self, prompt: ImagePrompt, refs: dict[TaskId, ResultRef]) -> ImagePrompt:
        """Return `prompt` with its images and masks, at their original size, and faces stored; the references are added
        to `refs`."""
        stored: dict[str, Any] = {}
        if prompt.images:
            images = tuple(self._bring_whole("image_prompts.image", image, refs) for image in prompt.images)
            stored["image"] = images if len(images) > 1 else images[0]
        if prompt.masks:
            masks = tuple(self._bring_area("image_prompts.mask", mask, refs) for mask in prompt.masks)
            stored["mask"] = masks if len(masks) > 1 else masks[0]
        faces = prompt.faces
        if isinstance(faces, Faces):
            rows, count, width = faces.rows, *faces.rows.shape
            inputs = InputFaces(faces.sha256, count, width, faces.file)
            ref = self._faces.get(faces.sha256, lambda: self._put(ImageEmbeds(rows)))
            refs[input_faces_id(inputs)] = ref
            stored["faces"] = inputs
        return prompt.model_copy(update=stored)

    def _bring_whole(self, name: str, source: ImageSource, refs: dict[TaskId, ResultRef]) -> InputImage | TaskImage:
        """Return the image in the field `name`, stored at its original size; a new reference is added to `refs`."""
        if isinstance(source, InputImage | TaskImage):
            return source

        def bring() -> tuple[Brought, ...]:
            read = self._pixels(name, source, is_mask=False)
            return (self._brought_as(read, read.pixels, ImagePixels),)

        ((stored, ref),) = self._brought.get(("whole", _identity(source)), bring)
        refs[input_image_id(stored)] = ref
        return stored

    def bring_all(
        self, requests: Iterable[GenerateRequest]
    ) -> tuple[tuple[GenerateRequest, ...], dict[TaskId, ResultRef]]:
        """Call `bring` for each of `requests`; return them, and all references."""
        brought = [self.bring(request) for request in requests]
        return tuple(request for request, _ in brought), {key: ref for _, refs in brought for key, ref in refs.items()}

    def bring_each(self, requests: Iterable[GenerateRequest]) -> list[GenerateRequest | UserError]:
        """Return each of `requests` as `bring` returns it, or the error of its images."""
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

    def _mask_of(self, name: str, source: ImageSource, image_size: tuple[int, int], size: tuple[int, int]) -> Brought:
        """Store the mask in the field `name` of an image of `image_size`, which is used at `size`."""
        mask = self._pixels(name, source, is_mask=True)
        if mask.size != image_size:
            raise unusable_field(name, times_of(mask.size), f"{times_of(image_size)} pixels, the size of the image")
        values = covering(mask.pixels, *size)
        if (brightest := int(values.max())) < HALF:
            expected = f"white (255) where the image is to be regenerated{_BOOL}"
            raise unusable_field(name, _brightest(brightest), expected)
        return self._brought_as(mask, values, Mask)

    def _brought_as(self, read: _Read, pixels: PixelArray, kind: Callable[[PixelArray], Result]) -> Brought:
        stored = InputImage(pixels_digest(pixels), pixels.shape[1], pixels.shape[0], read.file)
        return stored, self._put(kind(pixels))

    def _pixels(self, name: str, source: ImageSource, is_mask: bool) -> _Read:
        assert not isinstance(source, InputImage), f"{name}: the image is stored, and its mask is not"
        assert not isinstance(source, TaskImage), f"{name}: a task computes the image"
        if isinstance(source, Pixels):
            return _Read(source.pixels, "")
        return self._read.get((is_mask, _identity(source)), lambda: _read_file(name, source, is_mask))


def _brightest(value: int) -> str:
    return "a black mask" if value == 0 else f"a mask whose brightest pixel is {value} of 255"


def _read_file(name: str, path: str, is_mask: bool) -> _Read:
    with open_image(name, path) as image:
        return _Read(plain_pixels(name, image, is_mask), os.path.basename(path))


def _identity(source: ImageSource | None) -> Hashable:
    """Return a key that is equal for equal pixels, as far as known without reading them."""
    if not isinstance(source, str):
        return None if source is None else source.sha256
    try:
        found = os.stat(source)
    except OSError:
        return source  # reading the file raises the error
    return source, found.st_mtime_ns, found.st_size
