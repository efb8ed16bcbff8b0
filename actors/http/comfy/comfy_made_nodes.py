"""`MadeNodes`: the nodes of a workflow of the pool that the nodes of a ComfyUI workflow become, one after the other.

A node of ComfyUI has its id here too; where it becomes several nodes, the others have its id, a slash, and a word.
Images of the user are read when the workflow is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from modelpool.actors.http.comfy.comfy_cascade_nodes import check_stage, is_first_stage, is_second_stage, shift_of_stage
from modelpool.actors.http.comfy.comfy_node_types import (
    MAX_BATCH,
    NO_NEGATIVE_BOXES,
    NodeUnsupported,
    check_parts,
    file_stem,
)
from modelpool.actors.http.comfy.comfy_request_fields import (
    acting_options,
    as_edited,
    blank_for,
    check_guidance,
    check_seen,
    clip_skip,
    controls_of,
    given_sound_warnings,
    guidance_warning,
    guide_warnings,
    has_distilled_guidance,
    image_guidance,
    image_prompt_fields,
    image_prompts_of,
    is_guided,
    is_one_image,
    lora_fields,
    makes_videos,
    model_lora_fields,
    negative_warnings,
    option_warnings,
    padding_of,
    prompt_text,
    reads_guidance,
    reads_image_instead,
    region_fields,
    samples_sound,
    seen_fields,
    seen_warnings,
    shift_of,
    silent_warnings,
    sound_fields,
    text_lora_fields,
    unread_warnings,
    whole_cells,
)
from modelpool.actors.http.comfy.comfy_sampling_nodes import sampler_value, with_levels
from modelpool.actors.http.comfy.comfy_text_nodes import combined, with_whole
from modelpool.actors.http.comfy.comfy_values import (
    FRAMES,
    WITH_SOUND,
    WITH_WHOLE,
    AnyImage,
    AnyLatent,
    AnyMask,
    BatchPlaces,
    BlankLatent,
    BlankSound,
    ClipValue,
    GivenSound,
    ImageFile,
    ModelValue,
    NodeAudio,
    NodeImage,
    NodeLatent,
    NodeMask,
    NodeSound,
    NoiseLevels,
    TextValue,
    is_first_frame,
)
from modelpool.actors.request.audio_fields import AudioFile
from modelpool.actors.request.bounds import MAX_LORAS
from modelpool.actors.request.control_video_fields import VideoFile
from modelpool.actors.request.workflow_fields import MAX_NODES
from modelpool.pool.inference.operations.image_edits import Turn, frames_there_and_back
from modelpool.pool.inference.operations.latent_edits import DOWNSCALE, LatentBySides, LatentCrop, cells_of_side
from modelpool.pool.inference.operations.operate import OPERATIONS
from modelpool.pool.inference.operations.operation import Size
from modelpool.pool.values.core.errors import UnusableField, UserError, counted
from modelpool.pool.values.core.stage_params import UNGUIDED_SAMPLERS

#: operations that read all images of a batch; a batch of a sampler is as many workflows here, of one image each
_OF_ALL = ("image_batch", "image_repeat", "image_from_batch", "image_pick", "image_there_and_back", "video_of_images")
#: kinds of nodes that stand for another one at each place of a batch: one of several, one of a batch, one frame
ONE_OF, PICK, FRAME = "one_of", "pick", "frame"
#: the largest noise level of Stable Diffusion 2, of its last training step. A model that reads an image instead of
#: noise is called with that step at this level and above, and its result depends on nothing else of the level
_LARGEST_LEVEL = 14.614
#: the level of a flow from which on a run begins with noise alone
_ALL_NOISE = 0.999
#: the input of a run with the audio that it keeps
_SOUND = "sound"
#: frames that are images of their own
_MOST_FRAMES = 512
#: of ComfyUI's node that grows masks, and of the masks of this module
_GROWN = {"tapered": True}
#: pixels of a side of zeros next to other latents: ComfyUI scales latents to no less
_LEAST_ZEROS = 64
_Value = TypeVar("_Value", NodeImage, NodeLatent)


class MadeNodes:
    """The nodes of one workflow. `families` are the titles of the families of models, by their names."""

    def __init__(
        self,
        families: Mapping[str, str],
        videos: Callable[[str], VideoFile] | None = None,
        audios: Callable[[str], AudioFile] | None = None,
    ) -> None:
        self._families = families
        #: the facts of audio of the user, as of videos
        self._audios = audios
        #: the facts of a video of the user by its name; raises UserError. None: there are no such videos
        self._videos = videos
        #: fields of nodes, with `ImageFile` and `MaskFile` for images of the user
        self.fields: dict[str, dict[str, Any]] = {}
        #: images of a batch, by the node that makes them, where they are several; and their places, by their sampler
        self.counts: dict[str, int] = {}
        self.places: dict[str, BatchPlaces] = {}
        self.warnings: dict[str, None] = {}
        #: models that have their VAE in their file
        self.with_vae: set[str] = set()
        self._known: dict[Any, str] = {}

    def add(self, node_id: str, kind: str, inputs: Mapping[str, str], **fields: Any) -> str:
        """Add a node, and return its id: a free one, beginning with this. Raises NodeUnsupported for too many."""
        check_parts("workflow", "nodes", len(self.fields) + 1, MAX_NODES)
        while node_id in self.fields:
            node_id += "'"
        self.fields[node_id] = {"kind": kind, "inputs": dict(inputs), **fields}
        return node_id

    def image(self, value: AnyImage) -> str:
        """Return the node of an image, which is added for one of the user."""
        if isinstance(value, NodeImage):
            return value.node
        if value not in self._known:
            self._known[value] = self.add(f"image-{len(self._known)}", "image", {}, image=value)
        return self._known[value]

    def mask(self, value: AnyMask) -> str:
        """Return the node of a mask, which is added for one of the user."""
        if isinstance(value, NodeMask):
            return value.node
        if value not in self._known:
            self._known[value] = self.add(f"mask-{len(self._known)}", "mask", {}, mask=value)
        return self._known[value]

    def video_of_user(self, name: str) -> VideoFile:
        """Return the facts of a video of the user. Raises NodeUnsupported for one that is not there."""
        if self._videos is None:
            raise NodeUnsupported("the pool reads videos of users in its own requests alone, in the field `video`")
        try:
            return self._videos(name)
        except UserError as problem:
            raise NodeUnsupported(str(problem)) from None

    def frames_of_user(self, node_id: str, video: VideoFile) -> NodeImage:
        """Return the frames of a video of the user, which is added once."""
        if video not in self._known:
            self._known[video] = self.add(node_id, "video", {}, video=video)
        return NodeImage(self._known[video], frames=video.frames)

    def audio_of_user(self, node_id: str, name: str) -> NodeAudio:
        """Return audio of the user, which is added once. Raises NodeUnsupported for one that is not there."""
        if self._audios is None:
            raise NodeUnsupported("the pool reads audio of users in workflows over HTTP and in files alone")
        try:
            return self.audio_of_file(node_id, self._audios(name))
        except UserError as problem:
            raise NodeUnsupported(str(problem)) from None

    def audio_of_file(self, node_id: str, audio: AudioFile) -> NodeAudio:
        """Return the audio of a file, which is added once."""
        if audio not in self._known:
            self._known[audio] = self.add(node_id, "audio", {}, audio=audio)
        return NodeAudio(self._known[audio])

    def level_of(self, mask: AnyMask) -> float | None:
        """Return the level of a mask that is the same everywhere, as SolidMask makes it; None for others."""
        fields = self.fields[mask.node] if isinstance(mask, NodeMask) else {}
        return float(fields["settings"]["level"]) if fields.get("name") == "mask_solid" else None

    def encode_audio(self, node_id: str, audio: NodeAudio, model: str) -> NodeLatent:
        """Return the latents of audio."""
        made = self.add(node_id, "encode", {"audio": audio.node}, model=model)
        self._count(made, audio.count)
        return NodeLatent(made, model, count=audio.count, sampler=audio.sampler)

    def operate(
        self,
        node_id: str,
        operation: str,
        result: type[NodeImage | NodeMask | NodeLatent | NodeAudio],
        values: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> NodeImage | NodeMask | NodeLatent | NodeAudio | BlankLatent:
        """Return what an operation makes of values, by the names of its inputs: of empty latents alone, empty ones.
        Raises NodeUnsupported."""
        inputs: dict[str, str] = {}
        counts, samplers, models = {1}, [""], [""]
        try:
            blank = _blank_after(operation, settings, values)
        except UnusableField as problem:
            raise NodeUnsupported(str(problem)) from None
        if blank is not None:
            return blank
        values = self._without_blanks(node_id, values)
        if any(getattr(value, "track", "") == WITH_SOUND for value in values.values()):
            raise NodeUnsupported("samples: found frames with their audio, expected one of both: LTXVSeparateAVLatent")
        if any(getattr(value, "layers", "") for value in values.values()):
            raise NodeUnsupported(
                "samples: found the layers of an image, expected LatentCut and LatentCutToBatch alone"
            )
        if operation in _OF_ALL:
            values = {name: self.as_frames(f"{node_id}/{name}", value) for name, value in values.items()}
        for name, value in values.items():
            if isinstance(value, NodeLatent):
                inputs[name] = value.node
                models.append(value.model)
            elif isinstance(value, NodeAudio | NodeSound):
                inputs[name] = value.node
            elif isinstance(value, ImageFile | NodeImage):
                inputs[name] = self.image(value)
            else:
                inputs[name] = self.mask(value)
            counts.add(getattr(value, "count", 1))
            samplers.append(getattr(value, "sampler", ""))
        made = self.add(node_id, "operation", inputs, name=operation, settings=dict(settings))
        count, sampler = max(counts), next((each for each in samplers if each), "")
        if len(counts - {1}) > 1:
            raise NodeUnsupported(f"found batches of {', '.join(map(str, sorted(counts)))} images, expected equal ones")
        self._count(made, count)
        if result is NodeMask:
            return NodeMask(made, count, sampler, _frames_after(operation, settings, values))
        if result is NodeAudio:
            return NodeAudio(made, count, sampler)
        frames = [value.frames for value in values.values() if isinstance(value, NodeImage | NodeLatent)]
        if result is NodeImage:
            return NodeImage(made, count, sampler, frames=_frames_after(operation, settings, values))
        model = next((each for each in models if each), "")
        latents = [value for value in values.values() if isinstance(value, NodeLatent)]
        mask = next((value.mask for value in latents), None)
        size = _size_after(operation, settings, latents)
        places = next((value.places for value in latents), BatchPlaces())
        track = next((value.track for value in latents), "")
        made_latent = NodeLatent(made, model, mask, None, count, sampler, max(frames, default=0), size, places)
        guides = next((value.guides for value in latents), ())
        return replace(made_latent, track=track, guides=guides)

    def _without_blanks(self, node_id: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return values with zeros for empty latents: ComfyUI's are zeros in the scale of the VAE, and have the
        channels of the latents next to them. Raises NodeUnsupported."""
        like = next((value for value in values.values() if isinstance(value, NodeLatent)), None)
        found = dict(values)
        for name, blank in values.items():
            if not isinstance(blank, BlankLatent):
                continue
            if like is None or not _is_plain_blank(blank) or like.frames or blank.count != like.count:
                found_count = counted(blank.count, "empty latent")
                expected = "latents of an image or of a sampler, or as many empty ones as the others, of images"
                raise NodeUnsupported(f"{name}: expected {expected}; found {found_count}")
            size = {"width": blank.width, "height": blank.height}
            if min(size.values()) < _LEAST_ZEROS:
                raise NodeUnsupported(f"{name}: expected empty latents with sides of at least {_LEAST_ZEROS}")
            settings = {**size, "method": "nearest", "crop": False}
            sized = self.operate(
                f"{node_id}/{name}", "latent_upscale_to_pixels", NodeLatent, {"samples": like}, settings
            )
            zeros = self.operate(f"{node_id}/{name}", "latent_multiply", NodeLatent, {"samples": sized}, {"factor": 0})
            assert isinstance(zeros, NodeLatent), "the result of an operation on latents"
            found[name] = replace(zeros, places=blank.places, mask=None)
        return found

    def _count(self, node: str, count: int) -> None:
        if count > 1:
            self.counts[node] = count

    def one_of(self, node_id: str, values: Sequence[_Value]) -> _Value:
        """Return a batch of the images, or the latents, of several values, one behind the other."""
        counts = [value.count for value in values]
        check_parts("batch", "images", sum(counts), MAX_BATCH)
        inputs = {str(place): value.node for place, value in enumerate(values)}
        made = self.add(node_id, ONE_OF, inputs, counts=counts)
        self._count(made, sum(counts))
        return replace(values[0], node=made, count=sum(counts))

    def pick(self, node_id: str, value: _Value, start: int, length: int = 1) -> _Value:
        """Return some images, or latents, of a batch."""
        made = self.add(node_id, PICK, {"source": value.node}, start=start, length=length)
        self._count(made, length)
        return replace(value, node=made, count=length)

    def as_frames(self, node_id: str, value: Any) -> Any:
        """Return an image; a batch of a sampler as the frames of one value."""
        if not isinstance(value, NodeImage) or value.count == 1:
            return value
        made = self.pick(f"{node_id}/0", value, 0)
        for place in range(1, value.count):
            each = self.pick(f"{node_id}/{place}", value, place)
            joined = self.add(f"{node_id}/batch", "operation", {"first": made.node, "second": each.node},
                              name="image_batch", settings={})  # fmt: skip
            made = replace(made, node=joined)
        return replace(made, frames=value.count * max(1, value.frames))

    def as_images(self, node_id: str, image: AnyImage) -> AnyImage:
        """Return an image; the frames of one value as a batch of images. Raises NodeUnsupported for too many."""
        if not isinstance(image, NodeImage) or not image.frames:
            return image
        if image.frames == 1 and image.count > 1:  # videos of one frame each are images of a batch
            settings = {"start": 0, "length": 1}
            made = self.add(f"{node_id}/image", "operation", {"image": image.node}, name="image_from_batch",
                            settings=settings)  # fmt: skip
            self._count(made, image.count)
            return NodeImage(made, image.count, image.sampler)
        check_parts("images", "frames", image.frames * image.count, _MOST_FRAMES)
        if image.count > 1:
            raise NodeUnsupported(f"images: found {counted(image.count, 'video')}, expected the frames of one")
        made = self.add(f"{node_id}/frame", FRAME, {"image": image.node})
        self._count(made, image.frames)
        return NodeImage(made, image.frames, image.sampler)

    def resolved(self, node: str, place: int) -> tuple[str, int]:
        """Return the node that makes an image of a batch, and the place of the image in the batch of that node."""
        while True:
            place %= self.counts.get(node, 1)
            fields = self.fields[node]
            if fields["kind"] == PICK:
                node, place = fields["inputs"]["source"], fields["start"] + place
            elif fields["kind"] == ONE_OF:
                for number, count in enumerate(fields["counts"]):
                    if place < count:
                        node = fields["inputs"][str(number)]
                        break
                    place -= count
            else:
                return node, place

    def grown(self, node_id: str, mask: AnyMask, pixels: int) -> AnyMask:
        """Return a mask that is grown by so many pixels."""
        if not pixels:
            return mask
        made = self.operate(node_id, "mask_grow", NodeMask, {"mask": mask}, {"pixels": pixels, **_GROWN})
        assert isinstance(made, NodeMask), "the result of an operation on masks"
        return made

    def encode(self, node_id: str, image: AnyImage, model: str, hidden: AnyMask | None = None) -> NodeLatent:
        """Return the latents of an image; the part under `hidden` is grey before, and is regenerated."""
        video = image if isinstance(image, NodeImage) and image.frames and hidden is None else None
        image = self.as_images(node_id, image)
        inputs = {"image": self.image(image)} | ({} if hidden is None else {"mask": self.mask(hidden)})
        made = self.add(node_id, "encode", inputs, model=model)
        count, sampler = (image.count, image.sampler) if isinstance(image, NodeImage) else (1, "")
        self._count(made, count)
        shown = image if hidden is None else None
        return NodeLatent(made, model, hidden, shown, count, sampler, video=video)

    def _as_video(self, node_id: str, start: AnyLatent, model: ModelValue) -> AnyLatent:
        """Return the latents that a model starts from: images of a batch are the frames of one video for a model of
        videos. Raises NodeUnsupported for images that other nodes have changed since they were encoded."""
        family = self._families.get(model.name, "")
        if isinstance(start, BlankLatent):
            return blank_for(start, family)
        if not isinstance(start, NodeLatent) or start.frames or not makes_videos(family):
            return start
        if start.video is None:
            if start.count > 1:
                found = counted(start.count, "image")
                raise NodeUnsupported(f"latent_image: found latents of {found}, expected those of VAEEncode: a model "
                                      "of videos reads them as frames")  # fmt: skip
            if start.image is None:
                return start
        if start.mask is not None:
            raise NodeUnsupported("latent_image: found a mask, expected none with latents of a video")
        if start.video is not None:
            count, frames, video = start.video.count, start.video.frames, start.video.node
        else:
            assert start.image is not None, "an image that was encoded"
            repeated = {"image": self.image(start.image)}
            count, frames = 1, 1
            video = self.add(f"{node_id}/frame", "operation", repeated, name="image_repeat", settings={"amount": 1})
        made = self.add(f"{node_id}/latent", "encode", {"video": video}, model=start.model or model.name)
        return replace(start, node=made, count=count, frames=frames, video=None, image=None)

    def decode(
        self, node_id: str, latent: AnyLatent, model: str, tiles: Mapping[str, int] = MappingProxyType({})
    ) -> NodeImage:
        """Return the images of latents, by the VAE of a model, "" for their own, in tiles. Raises NodeUnsupported."""
        if isinstance(latent, BlankLatent):
            raise NodeUnsupported("samples: expected latents of an image or of a sampler, found empty ones")
        if not (model := model or latent.model):
            raise NodeUnsupported("vae: no model is known that the VAE is of; expected that of a checkpoint")
        if is_first_stage(self._families.get(latent.model, "")):
            raise NodeUnsupported(
                "samples: found a latent of stage C, expected one of the sampler of stage B, which decodes it"
            )
        if latent.layers == WITH_WHOLE:
            raise NodeUnsupported(
                "samples: the complete image is not decoded; expected its layers, by LatentCut from 1"
            )
        if latent.track == WITH_SOUND:
            raise NodeUnsupported("samples: found frames with their audio, expected one of both: LTXVSeparateAVLatent")
        if latent.uncropped:
            self.warnings["the frames of images of LTXVAddGuide are left out of the video, as by LTXVCropGuides"] = None
        self.settle(latent.node, model)
        track = {"track": "frames"} if latent.track == FRAMES else {}
        made = self.add(node_id, "decode", {"latent": latent.node}, model=model, **tiles, **track)
        self._count(made, latent.count)
        return NodeImage(made, latent.count, latent.sampler, frames=latent.frames)

    def decode_sound(self, node_id: str, sound: NodeSound, model: str) -> NodeAudio:
        """Return the audio of latents of a video, by the VAE of a model, "" for their own."""
        made = self.add(node_id, "decode", {"latent": sound.node}, model=model or sound.model, track="sound")
        self._count(made, sound.count)
        return NodeAudio(made, sound.count, sound.sampler)

    def upscale(self, node_id: str, image: AnyImage, upscaler: str) -> NodeImage:
        """Return images that an upscaler enlarges."""
        made = self.add(node_id, "upscale", {"image": self.image(image)}, upscale={"model": upscaler})
        if not isinstance(image, NodeImage):
            return NodeImage(made)
        self._count(made, image.count)
        return replace(image, node=made, saved=None)

    def upscale_latent(self, node_id: str, latent: NodeLatent, upscaler: str) -> NodeLatent:
        """Return latents that an upscaler enlarges; the size of the result is known when they are made."""
        made = self.add(node_id, "upscale", {"latent": latent.node}, upscale={"model": upscaler})
        self._count(made, latent.count)
        return replace(latent, node=made, mask=None, image=None, size=(0, 0), guides=())

    def settle(self, node: str, model: str) -> None:
        """Have the images that latents are encoded from encoded by the VAE of a model, where none is named."""
        waiting = [node]
        for each in waiting:
            fields = self.fields[each]
            if fields["kind"] == "encode" and not fields["model"]:
                fields["model"] = model
            if fields["kind"] in ("encode", "operation", ONE_OF, PICK):
                waiting += (source for source in fields["inputs"].values() if source not in waiting)

    def sample(
        self, given: Mapping[str, Any], seed: int, levels: NoiseLevels, start: AnyLatent, stops: Mapping[str, Any]
    ) -> NodeLatent:
        """Return the latents of a sampling run, as `_run`; of texts for parts of the steps, of a run for each part."""
        texts = given["positive"], given["negative"]
        if not any(text.is_timed for text in texts):
            return self._run(given, seed, levels, start, stops)
        if isinstance(start, NodeLatent) and start.mask is not None:
            raise NodeUnsupported("latent_image: found a mask, expected none with texts for parts of the steps")
        is_guided = given["cfg"] != 1
        end = levels.last_step or levels.steps
        found: list[tuple[int, TextValue, TextValue]] = []
        for step in range(levels.steps - levels.run_steps, end):
            acting = [_one_text(name, text.at_step(step, levels.steps), step)
                      for name, text in zip(("positive", "negative"), texts, strict=True)
                      if is_guided or name == "positive"]  # fmt: skip
            positive, negative = (*acting, acting[0])[:2]
            if not found or found[-1][1:] != (positive, negative):
                found.append((step, positive, negative))
        if len({text.image_prompts for _, text, _ in found}) > 1:
            raise NodeUnsupported("conditioning: expected the same image prompts in all steps")
        made: AnyLatent = start
        for number, (first, positive, negative) in enumerate(found):
            is_last = number == len(found) - 1
            part = dict(stops) if is_last else {**stops, "last_step": found[number + 1][0], "keeps_noise": True}
            if number:
                part["adds_noise"] = False
            node_id = given["node_id"] if is_last else f"{given['node_id']}/{number}"
            each = {**given, "positive": positive, "negative": negative, "node_id": node_id}
            made = replace(
                self._run(each, seed, replace(levels, run_steps=levels.steps - first), made, part),
                sampler=given["node_id"],
            )
        assert isinstance(made, NodeLatent), "a run has at least one step"
        return made

    def _run(
        self, given: Mapping[str, Any], seed: int, levels: NoiseLevels, start: AnyLatent, stops: Mapping[str, Any]
    ) -> NodeLatent:
        """Return the latents of a sampling run. `given` has model, positive, negative, cfg, sampler_name and node_id.
        Raises NodeUnsupported."""
        model = self._model_of(given["model"], levels)
        family, node_id = self._families.get(model.name, ""), given["node_id"]
        positive = as_edited(with_whole(given, given["positive"]), family)
        negative = as_edited(given["negative"], family)
        start = self._as_video(node_id, start, model)
        _check_texts(positive, negative, given["cfg"])
        check_stage(positive, start, family)
        if is_second_stage(family):  # it reads no embeddings of images
            positive, negative = replace(positive, seen=()), replace(negative, seen=())
        check_seen(positive, negative, model.name, family)
        check_parts("model", "LoRAs", len(model.loras), MAX_LORAS)
        if levels.first_sigma and not reads_image_instead(family):
            raise NodeUnsupported("sigmas: SetFirstSigma changes listed levels, and the schedule of Lotus, alone")
        fields, inputs = self._run_fields(model, positive, given["cfg"], levels, seed), dict[str, str]()
        if positive.guidance is not None and not reads_guidance(family):
            self.warnings[guidance_warning(node_id, positive.guidance, model.name)] = None
        chosen = sampler_value(given["sampler_name"])
        fields |= {"sampler": chosen.name, "eta": chosen.eta, "s_noise": chosen.s_noise}
        size = (start.width, start.height) if isinstance(start, BlankLatent) else start.size
        read = (positive, negative) if given["cfg"] != 1 else (positive,)
        told = unread_warnings(read, model.name, family, size, getattr(start, "seconds", 0.0))
        unread = (*told, *seen_warnings(positive, family))
        self.warnings |= dict.fromkeys((*unread, *option_warnings(node_id, model, given["cfg"], family)))
        if given["cfg"] != 1:
            self.warnings |= dict.fromkeys(negative_warnings(node_id, positive, negative, family))
        if isinstance(start, BlankLatent):
            fields |= whole_cells(start.width, start.height) if start.width else {}
            fields |= {"frames": start.frames} if start.frames else {}
            fields |= {"seconds": start.seconds} if start.seconds else {}
            inputs |= {} if start.image is None else {"image": self.image(start.image)}
            inputs |= {} if start.sized_as is None else {"size": self.image(start.sized_as)}
        elif start.layers:
            raise NodeUnsupported("latent_image: found the layers of an image, expected empty latents")
        elif reads_image_instead(family):
            inputs["image"], stops = self.image(_image_alone(start, levels, stops)), {}
        else:
            self.settle(start.node, model.name)
            inputs["latent"] = start.node
            if start.mask is not None:
                inputs["mask"] = self.mask(start.mask)
        if positive.followed is not None:
            inputs["prior"] = positive.followed.node
        is_guided = given["cfg"] != 1 or chosen.name.endswith(UNGUIDED_SAMPLERS)
        self._add_texts(node_id, fields, inputs, (positive, negative), model, is_guided)
        controls, prompts = controls_of(model, positive, family), image_prompts_of(model, positive, family)
        self._add_images(fields, inputs, replace(positive, controls=controls, image_prompts=prompts), size)
        fields |= image_guidance(positive, negative, given["cfg"], family)
        if positive.video is not None and positive.video.video_stops:
            stops = {**stops, "video_stops": True}
        if positive.video is not None and positive.video.nested:
            stops = {**stops, "nested": True}
        if positive.video is not None and positive.video.prompt_without_image:
            stops = {**stops, "prompt_without_image": True}
        if positive.video is not None and positive.video.camera is not None:
            stops = {**stops, "camera": positive.video.camera.path}
        if positive.video is not None and positive.video.tracks is not None:
            stops = {**stops, "tracks": positive.video.tracks}
        stops = {**stops, **self._add_voice(node_id, inputs, positive, negative, model, given["cfg"])}
        stops = {**stops, **self._add_boxes(node_id, inputs, positive, model.name)}
        first = levels.steps - levels.run_steps
        has_all_noise = not first and stops.get("adds_noise", True) and _begins_with_noise(levels)
        track = self._add_sound(given, (fields, inputs), model, start, has_all_noise)
        guides = self._add_guides(node_id, inputs, model, start)
        made = self.add(node_id, "sample", inputs, request=fields, first_step=first, **stops, **guides)
        self._count(made, start.count)
        self.places[made] = start.places
        found = NodeLatent(made, model.name, count=start.count, sampler=node_id, places=start.places, track=track)
        if _SOUND in inputs:
            found = replace(found, sound=NodeSound(made, model.name, start.count, node_id, is_kept=True))
        size = (start.width, start.height) if isinstance(start, BlankLatent) else start.size
        layers = WITH_WHOLE if isinstance(start, BlankLatent) and start.layers else ""
        kept = tuple(replace(each, is_kept=True) for each in start.guides if not each.is_added)
        uncropped = any(each.is_added for each in start.guides)
        found = replace(found, guides=kept, uncropped=uncropped)
        return replace(found, frames=start.frames, size=size, layers=layers)

    def _add_voice(
        self,
        node_id: str,
        inputs: dict[str, str],
        positive: TextValue,
        negative: TextValue,
        model: ModelValue,
        cfg: float,
    ) -> dict[str, Any]:
        """Add the audio with the voice that a run has, and return the field of its node for the guidance towards it.
        Raises NodeUnsupported for a voice of one of two texts."""
        voice, other = (None if text.video is None else text.video.voice for text in (positive, negative))
        if cfg != 1 and voice != other:
            raise NodeUnsupported("positive, negative: expected the reference audio of LTXVReferenceAudio for both")
        if voice is None:
            if model.voice_scale:
                found = f"node {node_id}: identity_guidance_scale: found {model.voice_scale:g}"
                self.warnings[f"{found}, which does not act without reference audio in positive"] = None
            return {}
        inputs["voice"] = voice.node
        return {"voice_scale": model.voice_scale} if model.voice_scale else {}

    def _add_boxes(self, node_id: str, inputs: dict[str, str], text: TextValue, model: str) -> dict[str, Any]:
        """Add the texts in boxes of a run, and return the field of its node for them."""
        if text.gligen is None:
            return {}
        for number, box in enumerate(text.gligen.boxes):
            in_box = TextValue(box.text, box.clip)
            inputs[f"boxes.{number}"] = self._plain_text(
                f"{node_id}/box_{number}", in_box, model, False, is_pooled=True
            )
        boxes = [{name: getattr(box, name) for name in ("x", "y", "width", "height")} for box in text.gligen.boxes]
        return {"gligen": {"model": text.gligen.model, "boxes": boxes}}

    def _add_guides(self, node_id: str, inputs: dict[str, str], model: ModelValue, start: AnyLatent) -> dict[str, Any]:
        """Add the images that guide a run, and return the field of its node for them. The image that a video begins
        with guides it, too, next to others, and next to latents. Raises NodeUnsupported."""
        guides = start.guides
        if guides and not is_guided(self._families.get(model.name, "")):
            raise NodeUnsupported("latent_image: found images that guide a video, which models of LTX read alone")
        if any(guide.is_kept and guide.strength < 1 for guide in guides):
            raise NodeUnsupported("latent_image: found a first frame with a strength below 1 of the run before, "
                                  "expected a new one: LTXVImgToVideoInplace sets it again")  # fmt: skip
        self.warnings |= dict.fromkeys(guide_warnings(node_id, guides, model.name))
        if isinstance(start, BlankLatent) and is_first_frame(guides) and "image" not in inputs:
            inputs["image"] = self.image(guides[0].image)
            return {}
        found = [(self.image(each.image), each.place) for each in guides]
        is_mixed = bool(found) or isinstance(start, NodeLatent)
        if is_mixed and "image" in inputs and is_guided(self._families.get(model.name, "")):
            found.insert(0, (inputs.pop("image"), {"frame": 0, "strength": 1.0}))
        inputs |= {f"guides.{number}": image for number, (image, _) in enumerate(found)}
        return {"guides": [place for _, place in found]} if found else {}

    def _add_sound(
        self,
        given: Mapping[str, Any],
        made: tuple[dict[str, Any], dict[str, str]],
        model: ModelValue,
        start: AnyLatent,
        has_all_noise: bool,
    ) -> str:
        """Add what a run of frames with audio has besides to its fields and inputs; return the track of its latents.
        `has_all_noise`: nothing of its start is left. Raises NodeUnsupported."""
        fields, inputs = made
        family, sound = self._families.get(model.name, ""), start.sound
        blank = sound if isinstance(sound, BlankSound) else None
        if sound is None and getattr(start, "track", "") != WITH_SOUND:
            if isinstance(start, NodeLatent) and samples_sound(family):
                raise NodeUnsupported("latent_image: found frames without audio, which the model samples with them: "
                                      "expected both, by LTXVConcatAVLatent")  # fmt: skip
            self.warnings |= dict.fromkeys(silent_warnings(given["node_id"], model.name, family))
            return ""
        if isinstance(start, NodeLatent) and start.mask is not None:
            raise NodeUnsupported("latent_image: found frames with audio and a noise mask, expected no mask")
        if isinstance(sound, GivenSound | NodeSound):
            self.warnings |= dict.fromkeys(given_sound_warnings(given["node_id"], sound, model, has_all_noise))
            inputs |= {_SOUND: sound.node} if sound.is_kept else {}
        more, options = sound_fields(given["positive"], given["cfg"], given.get("sound_cfg"), family, blank)
        fields |= more
        if options:
            fields["options"] = {**fields.get("options", {}), **options}
        return WITH_SOUND

    def _model_of(self, model: ModelValue, levels: NoiseLevels) -> ModelValue:
        """Return a model with the noise levels of a run. Raises NodeUnsupported for levels of another family."""
        if model.has_vae:
            self.with_vae.add(model.name)
        found = levels.model
        if found is not None and self._families.get(found.name) != self._families.get(model.name):
            raise NodeUnsupported(f"sigmas: they are of {found.name}, expected those of a model of one family with "
                                  f"{model.name}")  # fmt: skip
        return with_levels(model, levels)

    def _run_fields(
        self, model: ModelValue, positive: TextValue, cfg: float, levels: NoiseLevels, seed: int
    ) -> dict[str, Any]:
        """Return the fields of model, noise levels, guidance and seed."""
        family = self._families.get(model.name, "")
        fields: dict[str, Any] = {"model": model.name, "seed": seed, "cfg": cfg}
        if levels.sigmas:
            fields["sigmas"] = levels.sigmas
        else:
            fields |= {"steps": levels.steps, "schedule": levels.schedule}
        if levels.beta is not None:
            fields |= dict(zip(("beta_alpha", "beta_beta"), levels.beta, strict=True))
        check_guidance(positive, cfg, family)
        if positive.guidance is not None and reads_guidance(family):
            fields["cfg"] = positive.guidance
        elif has_distilled_guidance(family):
            if cfg != 1:
                raise NodeUnsupported(f"cfg: found {cfg:g}, expected 1: the model reads its guidance scale")
            del fields["cfg"]  # the scale that the model was made for
        if options := acting_options(model, cfg, family):
            fields["options"] = options
        fields |= shift_of_stage(family)
        if model.sampling is not None and (shift := shift_of(model.sampling, family, (None, None))):
            fields["shift"] = shift
        return fields

    def _add_texts(
        self,
        node_id: str,
        fields: dict[str, Any],
        inputs: dict[str, str],
        texts: tuple[TextValue, TextValue],
        model: ModelValue,
        is_guided: bool,
    ) -> None:
        """Add the texts of a run: as fields where they are encoded by its model with its LoRAs, else as nodes."""
        positive, negative = texts
        read = texts if is_guided else (positive,)
        family = self._families.get(model.name, "")
        plain = all(
            _is_plain(text, model) and not padding_of(text, family)
            for text in read
            if not text.is_zero or text is positive
        )
        same = negative.is_zero or not is_guided or _same_encoders(positive.clip, negative.clip)
        if plain and same and not (is_guided and negative.is_zero) and not positive.is_zero:
            fields["prompt"] = prompt_text(positive, family)
            fields["negative"] = prompt_text(negative, family) if is_guided else ""
            fields["loras"] = tuple(lora_fields(lora, positive.clip) for lora in model.loras)
            fields["clip_skip"] = clip_skip(positive, family)
            return
        if positive.references or positive.regions or positive.image_prompts:
            problem = "texts with images or for parts of the image, next to one of another encoder, or set to zero"
            raise NodeUnsupported(f"positive, negative: found {problem}; expected texts of one encoder")
        fields["loras"] = tuple(map(model_lora_fields, model.loras))
        inputs["positive"] = self._text(f"{node_id}/positive", positive, model.name, is_negative=False)
        if is_guided:
            inputs["negative"] = self._text(f"{node_id}/negative", negative, model.name, is_negative=True)

    def _text(self, node_id: str, text: TextValue, model: str, is_negative: bool) -> str:
        """Return the node of an encoded text; it is added once for equal texts."""
        key = "text", text.text, text.appended, text.clip, text.changed, text.is_zero, model, is_negative
        if key in self._known:
            return self._known[key]
        if text.changed is not None:
            inputs = {
                name: self._text(f"{node_id}/{name}", each, model, is_negative) for name, each in text.changed.texts
            }
            settings = dict(text.changed.settings)
            made = self.add(node_id, "operation", inputs, name=text.changed.operation, settings=settings)
        else:
            made = self._plain_text(node_id, text, model, is_negative and not text.is_zero)
        if text.changed is None and (padding := padding_of(text, self._families.get(text.clip.name or model, ""))):
            settings = dict(zip(("least_padding", "least_tokens"), padding, strict=True))
            made = self.add(
                f"{node_id}/padding", "operation", {"text": made}, name="encoded_padding", settings=settings
            )
        if text.is_zero:
            made = self.add(f"{node_id}/zero", "operation", {"text": made}, name="encoded_zero", settings={})
        self._known[key] = made
        return made

    def _plain_text(self, node_id: str, text: TextValue, model: str, is_negative: bool, is_pooled: bool = False) -> str:
        name = text.clip.name or model
        family = self._families.get(name, "")
        key = "plain", text.text, text.appended, text.clip, name, is_negative, is_pooled
        if key not in self._known:
            loras = list(map(text_lora_fields, text.clip.loras))
            fields = {"prompt": prompt_text(text, family), "clip_skip": clip_skip(text, family)}
            kept = [lora for lora in loras if lora["strength"]]
            fields |= {"is_negative": is_negative, **({"pooled": True} if is_pooled else {})}
            self._known[key] = self.add(node_id, "text", {}, model=name, **fields, loras=kept)
        return self._known[key]

    def _add_images(
        self, fields: dict[str, Any], inputs: dict[str, str], text: TextValue, size: tuple[int, int] | None
    ) -> None:
        """Add the images that condition a run."""
        if text.video is not None:
            fields |= text.video.fields()
            inputs |= {name: self.image(image) for name, image in text.video.images().items()}
            inputs |= {} if text.video.video_mask is None else {"video_mask": self.mask(text.video.video_mask)}
        for number, use in enumerate(text.controls):
            inputs[f"controls.{number}"] = self.image(use.image)
            if use.mask is not None:
                inputs[f"controls.{number}.mask"] = self.mask(use.mask)
        if text.controls:
            fields["controls"] = [
                {
                    "model": file_stem(use.net.name),
                    "mode": use.net.mode or None,
                    "strength": use.strength,
                    "start": use.start,
                    "end": use.end,
                    **use.shares_of,
                }
                for use in text.controls
            ]
        for number, prompt in enumerate(text.image_prompts):
            inputs[f"image_prompts.{number}"] = self.image(prompt.image)
            if prompt.mask is not None:
                inputs[f"image_prompts.{number}.mask"] = self.mask(prompt.mask)
        if text.image_prompts:
            fields["image_prompts"] = list(map(image_prompt_fields, text.image_prompts))
        family = self._families.get(fields["model"], "")
        if is_one_image(text, family):
            inputs["image"] = self.image(text.seen[0].image)
        elif text.seen:
            fields["image_prompts"] = [seen_fields(use, fields["model"], family) for use in text.seen]
            inputs |= {f"image_prompts.{number}": self.image(use.image) for number, use in enumerate(text.seen)}
        for number, image in enumerate(text.references):
            inputs[f"reference.{number}"] = self.image(image)
        if text.inpainted is not None:
            inputs["inpaint_image"] = self.image(text.inpainted.image)
            inputs["inpaint_mask"] = self.mask(text.inpainted.mask)
        if text.regions:
            if size is None or not any(size):
                raise NodeUnsupported("texts for parts of the image: expected latents of a known size")
            fields["regions"] = [region_fields(region, size) for region in text.regions]
            for number, region in enumerate(fields["regions"]):
                if isinstance(region.get("mask"), NodeMask):
                    inputs[f"regions.{number}.mask"] = self.mask(region.pop("mask"))


def _begins_with_noise(levels: NoiseLevels) -> bool:
    """Whether the first listed level of a flow, if levels are listed, is noise alone."""
    return not levels.sigmas or levels.sigmas[0] >= _ALL_NOISE


def _image_alone(start: NodeLatent, levels: NoiseLevels, stops: Mapping[str, Any]) -> AnyImage:
    """Return the image that a model reads which estimates what it shows, in one step and without noise. Raises
    NodeUnsupported for another run."""
    has_noise = stops.get("adds_noise", True)
    if start.image is None or start.mask is not None or (levels.steps, levels.run_steps) != (1, 1) or has_noise:
        raise NodeUnsupported("latent_image: expected the latents of an image, one step, and DisableNoise")
    if levels.sigmas or levels.first_sigma < _LARGEST_LEVEL:
        raise NodeUnsupported(f"sigmas: expected a schedule, with a first level of at least {_LARGEST_LEVEL:g}")
    return start.image


def _one_text(name: str, acting: Sequence[TextValue], step: int) -> TextValue:
    """Return the text of a step of which several act. Raises NodeUnsupported for none."""
    if not acting:
        raise NodeUnsupported(f"{name}: found no text that acts in step {step}, expected one")
    found = acting[0]
    for each in acting[1:]:
        found = combined(found, each)
    return found


def _frames_after(operation: str, settings: Mapping[str, Any], values: Mapping[str, Any]) -> int:
    """Return the frames of the image, or of the mask, that an operation makes."""
    frames = [value.frames if isinstance(value, NodeImage | NodeMask) else 0 for value in values.values()]
    match operation:
        case "image_batch":
            return sum(max(1, each) for each in frames)
        case "image_repeat":
            return max([1, *frames]) * int(settings["amount"])
        case "image_there_and_back":
            return frames_there_and_back(max([1, *frames]))
        case "image_from_batch":
            start = min(settings["start"], max([1, *frames]) - 1)
            length = min(settings["length"], max([1, *frames]) - start)
            return 0 if length == 1 else length
        case "image_pick":
            count = len(settings["indices"])
            return 0 if count == 1 else count
        case "video_of_images":
            return max([1, *frames])
        case "image_solid":
            return settings["count"] if settings.get("count", 1) > 1 else 0
    return max(frames, default=0)


def _is_plain_blank(latent: BlankLatent) -> bool:
    """Whether empty latents are images, and nothing but zeros."""
    return bool(latent.width) and not (latent.frames or latent.seconds or latent.image)


def _blank_after(operation: str, settings: Mapping[str, Any], values: Mapping[str, Any]) -> BlankLatent | None:
    """Return the empty latents that an operation makes of empty latents alone; None for others."""
    latents = [value for value in values.values() if isinstance(value, BlankLatent)]
    others = any(isinstance(value, NodeLatent) for value in values.values())
    if not latents or others or not all(map(_is_plain_blank, latents)):
        return None
    found = latents[0]
    cells = Size(found.width // DOWNSCALE, found.height // DOWNSCALE)
    match operation:
        case "latent_crop":
            sides = {name: settings[name] for name in ("x", "y", "width", "height")}
            cells = OPERATIONS[operation].size_of(LatentCrop(**sides), {"samples": cells})
        case "latent_rotate":
            cells = OPERATIONS[operation].size_of(Turn(settings["rotation"]), {"samples": cells})
        case "latent_upscale_by_sides":
            cells = OPERATIONS[operation].size_of(LatentBySides(**settings), {"samples": cells})
        case "latent_composite" | "latent_flip" | "latent_multiply" | "latent_add" | "latent_subtract":
            return found
        case "latent_interpolate" | "latent_blend":
            return found
        case _:
            return None
    return replace(found, width=cells.width * DOWNSCALE, height=cells.height * DOWNSCALE)


def _size_after(operation: str, settings: Mapping[str, Any], latents: Sequence[NodeLatent]) -> tuple[int, int]:
    """Return the size of the latents that an operation makes, in pixels; (0, 0) if it is not known."""
    size = next((each.size for each in latents), (0, 0))
    match operation:
        case "latent_upscale_to_pixels" if settings["width"] and settings["height"]:
            return settings["width"], settings["height"]
        case "latent_upscale_by":
            return round(size[0] * settings["factor"]), round(size[1] * settings["factor"])
        case "latent_upscale_by_sides":
            multiple = settings["multiple"]
            width, height = (
                cells_of_side(side // DOWNSCALE, settings[f"{name}_factor"], multiple) * DOWNSCALE
                for name, side in zip(("width", "height"), size, strict=True)
            )
            return width, height
        case "latent_upscale_to_pixels" | "latent_crop" | "latent_rotate":
            return 0, 0
    return size


def _same_encoders(one: ClipValue, other: ClipValue) -> bool:
    return one.loras == other.loras and one.last_layer == other.last_layer and one.padding == other.padding


def _is_plain(text: TextValue, model: ModelValue) -> bool:
    """Whether a text is encoded by a model with its LoRAs, and changed by nothing."""
    if text.is_zero or text.changed is not None:
        return False
    clips = (text.clip, *(region.clip for region in text.regions))
    loras = frozenset(model.loras)
    return all(clip.name in ("", model.name) and loras.issuperset(clip.loras) for clip in clips)


def _check_texts(positive: TextValue, negative: TextValue, cfg: float) -> None:
    """Raise NodeUnsupported for texts that a sampling run cannot have."""
    if negative.is_partial and cfg != 1:
        raise NodeUnsupported("positive, negative: expected a text without an area besides those with one")
    if negative.regions and cfg != 1:
        raise NodeUnsupported("negative: expected one text; areas are only supported in positive")
    if negative.followed is not None and cfg != 1:
        found = "found latents of stage C, expected them on positive alone"
        raise NodeUnsupported(f"negative: {found}: the prediction for the negative text reads zeros")
    if negative.gligen is not None and cfg != 1:
        raise NodeUnsupported(NO_NEGATIVE_BOXES)
    for name in ("controls", "references", "image_prompts"):
        if getattr(negative, name) and getattr(negative, name) != getattr(positive, name):
            raise NodeUnsupported(f"negative: its {name} must be those of positive")
