"""`Workflow`: a graph of nodes that a request computes instead of a single image: texts, images, samplings, decodings,
upscalings and operations, each with the nodes that it reads. Parsed and validated once.

A node has one result. Its `inputs` name the nodes that it reads, by what they are for it. What each kind of node
computes is in `actors.graph.workflow_graph`. Torch-free, ray-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, field_validator, model_validator

from modelpool.actors.request.audio_fields import checked_audio
from modelpool.actors.request.bounds import (
    MAX_NAME_CHARACTERS,
    MAX_PROMPT_CHARACTERS,
    check_characters,
    over_bound,
    reworded,
)
from modelpool.actors.request.control_video_fields import checked_video
from modelpool.actors.request.field_table import OUTER_FIELDS, REQUEST_FIELDS, SIZE_STEP
from modelpool.actors.request.image_decoding import MAX_SIDE
from modelpool.actors.request.image_fields import MAX_PARTS, TaskImage, checked_image
from modelpool.actors.request.lora_fields import LoraChoice, parse_loras
from modelpool.actors.request.number_fields import STEPS
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.strict import Strict
from modelpool.actors.request.upscale_fields import Upscale
from modelpool.pool.inference.sampling.sampler_names import MAX_STEPS
from modelpool.pool.values.core.errors import UnknownName, UnusableField, UserError, counted, unusable_field
from modelpool.pool.values.core.refs import MOST_BOXES
from modelpool.pool.values.core.sample_conditions import CAMERA_MOTIONS

#: nodes of a workflow, and nodes behind one another
MAX_NODES, MAX_DEPTH = 1000, 250
#: inputs and settings of one node; characters of an id of a node
MAX_NODE_INPUTS, MAX_NODE_ID = 64, 200
#: numbers of settings of operations, whatever their own bounds
MAX_SETTING = 1e12
#: sampling steps of all nodes together
MAX_WORKFLOW_STEPS = 20_000
#: name of the model of a workflow of operations on images alone
NO_MODEL = "none"
#: tracks of a video, and points of a track: each point costs an operation on all cells of a latent frame
MAX_TRACKS, MAX_TRACK_FRAMES = 256, 1024
_Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
_Inputs: TypeAlias = dict[str, Annotated[str, Field(min_length=1, max_length=MAX_NODE_ID)]]


class _Node(Strict):
    """A node. `inputs` are the ids of the nodes that it reads, by name."""

    inputs: _Inputs = Field(default_factory=dict, max_length=MAX_NODE_INPUTS)

    def names(self) -> Iterator[tuple[str, str]]:
        """Yield the kind and the name of each file that it names."""
        return iter(())


class TextNode(_Node):
    """A text, encoded by the text encoders of a model. `is_negative`: as a negative prompt, which some families encode
    in another way. `loras` are those that act on the text encoders. `pooled`: also its pooled state, which texts in
    boxes of an image have."""

    kind: Literal["text"]
    model: _Name
    prompt: str = ""
    loras: tuple[LoraChoice, ...] = ()
    clip_skip: Annotated[int, Field(ge=0, le=30)] = 0
    is_negative: bool = False
    pooled: bool = False

    @field_validator("prompt")
    @classmethod
    def _prompt(cls, value: str) -> str:
        check_characters("prompt", value, MAX_PROMPT_CHARACTERS)
        return value

    @field_validator("loras", mode="before")
    @classmethod
    def _loras(cls, value: Any) -> Any:
        return parse_loras(value)

    def names(self) -> Iterator[tuple[str, str]]:
        """Yield the kind and the name of each file that it names."""
        yield "model", self.model
        yield from ((lora.file_kind, lora.name) for lora in self.loras)


class ImageNode(_Node):
    """An image, or a mask, of the user."""

    kind: Literal["image", "mask"]
    #: an `ImageSource` of `actors.request.image_fields` after validation; the other one is None
    image: Any = None
    mask: Any = None

    @field_validator("image", "mask", mode="before")
    @classmethod
    def _image(cls, value: Any, info: Any) -> Any:
        return checked_image(info.field_name, value, is_mask=info.field_name == "mask")

    @model_validator(mode="after")
    def _one(self) -> ImageNode:
        other = self.mask if self.kind == "image" else self.image
        if self.source is None or other is not None:
            raise UnusableField(f"{self.kind}: expected this field alone in a node of kind {self.kind}")
        return self

    @property
    def source(self) -> Any:
        """The image or the mask."""
        return self.image if self.kind == "image" else self.mask


class VideoNode(_Node):
    """The frames of a video of the user: an image of the workflow with as many frames. Its frame rate is not read."""

    kind: Literal["video"]
    #: a `VideoSource` of `actors.request.control_video_fields` after validation
    video: Any

    @field_validator("video", mode="before")
    @classmethod
    def _video(cls, value: Any) -> Any:
        if value is None:
            raise unusable_field("video", None, "the path of a video, a list of paths or images, or a numpy array")
        return checked_video("video", value)


class AudioNode(_Node):
    """The audio of a file of the user, or its samples."""

    kind: Literal["audio"]
    #: an `AudioSource` of `actors.request.audio_fields` after validation
    audio: Any

    @field_validator("audio", mode="before")
    @classmethod
    def _audio(cls, value: Any) -> Any:
        return checked_audio("audio", value)


class EncodeNode(_Node):
    """The latent of "image" with the VAE of a model, in its size; "mask": where pixels become grey before. Of "video",
    of all its frames that fill cells; of "audio", of as many samples."""

    kind: Literal["encode"]
    model: _Name

    def names(self) -> Iterator[tuple[str, str]]:
        """Yield the kind and the name of each file that it names."""
        yield "model", self.model


class Guide(Strict):
    """Where an image, or frames, guide a video: at a frame of it, from 0, and the strength: 1 keeps them.

    appended  an image at frame 0 guides it next to its first frame, instead of in the place of it, as frames do
    lora      the IC-LoRA that was trained for the guide, which is appended: its file says how much smaller than the
              video the guide is
    """

    frame: Annotated[int, Field(ge=0)] = 0
    strength: Annotated[float, Field(gt=0, le=1)] = 1.0
    appended: bool = False
    lora: _Name | None = None


class CameraPath(Strict):
    """The path of the camera of a video: a motion in all its frames, its speed, and focal lengths and centre as shares
    of the sides of a video of 1280x720 pixels."""

    motion: Literal[CAMERA_MOTIONS]  # type: ignore[valid-type]
    speed: Annotated[float, Field(ge=0, le=10)] = 1.0
    fx: Annotated[float, Field(gt=0, le=1)] = 0.5
    fy: Annotated[float, Field(gt=0, le=1)] = 0.5
    cx: Annotated[float, Field(ge=0, le=1)] = 0.5
    cy: Annotated[float, Field(ge=0, le=1)] = 0.5


def _track_point(value: Any) -> Any:
    """Return a point with whether it is seen, which it is if nothing says so."""
    return (*value, 1.0) if isinstance(value, list | tuple) and len(value) == 2 else value


#: a coordinate of a track, which may leave the video
_Coordinate: TypeAlias = Annotated[float, Field(ge=-MAX_SIDE, le=2 * MAX_SIDE, allow_inf_nan=False)]
_TrackPoint: TypeAlias = Annotated[
    tuple[_Coordinate, _Coordinate, Annotated[float, Field(ge=0, le=1)]], BeforeValidator(_track_point)
]
_Track: TypeAlias = Annotated[tuple[_TrackPoint, ...], Field(min_length=1, max_length=MAX_TRACK_FRAMES)]


class MotionTracks(Strict):
    """Tracks of points through a video: for each frame x and y in pixels, and 1 where the point is seen, which is the
    default, or 0. Behind its end a track is not seen. `temperature` and `nearest` are of the method "ati"."""

    method: Literal["ati", "move"]
    points: Annotated[tuple[_Track, ...], Field(min_length=1, max_length=MAX_TRACKS)]
    temperature: Annotated[float, Field(ge=1, le=1000)] = 220.0
    nearest: Annotated[int, Field(ge=1, le=10)] = 2


class GligenBox(Strict):
    """A box of an image, in pixels: its left upper corner, and its size."""

    x: Annotated[int, Field(ge=0, le=MAX_SIDE)]
    y: Annotated[int, Field(ge=0, le=MAX_SIDE)]
    width: Annotated[int, Field(ge=1, le=MAX_SIDE)]
    height: Annotated[int, Field(ge=1, le=MAX_SIDE)]


class GligenBoxes(Strict):
    """A GLIGEN model, the boxes that it fills, and the share of the steps in which it acts."""

    model: _Name
    boxes: Annotated[tuple[GligenBox, ...], Field(min_length=1, max_length=MOST_BOXES)]
    end: Annotated[float, Field(gt=0, le=1)] = 1.0


class SampleNode(_Node):
    """A sampling run.

    request      model, LoRAs, texts, sampler, size and everything else as in a request; its seed, if it sets none, is
                 that of the request around the workflow
    inputs       positive, negative: encoded texts instead of the prompts of `request`; latent: the start latent, of
                 which the size follows; mask: where the latent is regenerated; image, last_image, reference.N,
                 controls.N, controls.N.mask, regions.N.mask, image_prompts.N: images for these fields of `request`;
                 video, video_mask, face_video: images and masks with frames for these fields; first_frames: the frames
                 that a video begins with, if they are several, of which image is the first one;
                 inpaint_image, inpaint_mask: what a model reads that was trained for inpainting, and no other one;
                 guides.N: the image of each of `guides`, or its frames, as many as fill cells of the latent;
                 boxes.N: the text of each box of `gligen`, pooled; prior: the latent of the first model of two, for
                 the second one; size: an image as large as the output, of which a run without a start latent reads
                 nothing else; sound: audio, or a latent with an audio track, that a model keeps which samples audio
                 with its frames: the frames follow it; voice: audio with the voice that its audio has (ID-LoRA)
    first_step   steps at the start of the schedule that are left out
    last_step    the run ends when so many steps are done; 0: all
    adds_noise   whether noise is added to the start latent
    keeps_noise  whether the noise that is left at `last_step` stays
    strength     fraction of the schedule that is run, instead of `first_step`
    video_stops  a model that follows a shorter video follows nothing behind its last frame; false: the video goes back
                 and forth
    guides       images and frames that guide a video, for models that read them (LTX)
    camera       its path, for a model that reads one
    tracks       of points through a video, for models that follow them (ATI and Wan-Move)
    prompt_without_image  the prediction without the image that guides (`image_cfg`) is for the prompt, instead of the
                 negative prompt
    nested       guidance by an image (`image_cfg`) scales what guidance by text and its options make, instead of the
                 prediction for the negative prompt
    voice_scale  guidance away from a prediction without the voice; 0 for none
    gligen       texts in boxes of the image, for UNets with one text encoder (Stable Diffusion 1)
    """

    kind: Literal["sample"]
    request: GenerateRequest
    first_step: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    last_step: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    adds_noise: bool = True
    keeps_noise: bool = False
    strength: Annotated[float | None, Field(gt=0, le=1)] = None
    video_stops: bool = False
    guides: tuple[Guide, ...] = Field(default=(), max_length=MAX_PARTS)
    camera: CameraPath | None = None
    tracks: MotionTracks | None = None
    gligen: GligenBoxes | None = None
    prompt_without_image: bool = False
    nested: bool = False
    voice_scale: Annotated[float, Field(ge=0, le=100)] = 0.0

    @field_validator("request", mode="before")
    @classmethod
    def _with_nodes(cls, value: Any, info: Any) -> Any:
        """Add what other nodes provide to the fields: an empty prompt, and images."""
        if not isinstance(value, Mapping):
            return value
        found: dict[str, Any] = {"prompt": "", **value}
        for name, source in info.data.get("inputs", {}).items():
            field, _, place = name.partition(".")
            image = TaskImage(f"node {source}", SIZE_STEP, SIZE_STEP)
            if name == "image":
                found.setdefault(name, image)
            elif field in ("controls", "image_prompts") and place.isdecimal():
                found[field] = _with_image(found.get(field), int(place), image)
            elif field == "regions" and (number := place.removesuffix(".mask")).isdecimal():
                found[field] = _with_image(found.get(field), int(number), image, "mask")
        return found

    @model_validator(mode="after")
    def _own_fields(self) -> SampleNode:
        if found := sorted(self.request.model_fields_set.intersection(OUTER_FIELDS)):
            raise unusable_field("request", ", ".join(found), "fields of one sampling run")
        if self.request.mask is not None and "image" in self.inputs:
            raise UnusableField("mask: expected an input of the node, as its image is one")
        if self.strength is not None and self.first_step:
            raise unusable_field("first_step", self.first_step, "it or strength, not both")
        if self.last_step and self.last_step <= self.first_step:
            raise unusable_field("last_step", self.last_step, f"more than first_step, {self.first_step}")
        return self

    def names(self) -> Iterator[tuple[str, str]]:
        """Yield the kind and the name of each file that it names."""
        yield "model", self.request.model
        yield from ((lora.file_kind, lora.name) for lora in self.request.loras)
        yield from (("controlnet", control.model) for control in self.request.controls)
        yield from [("gligen", self.gligen.model)] if self.gligen is not None else ()
        yield from (("lora", guide.lora) for guide in self.guides if guide.lora is not None)
        prompts = self.request.image_prompts
        # the model itself may vary images
        yield from (("image_prompt", prompt.model) for prompt in prompts if prompt.model != self.request.model)


def _with_image(parts: Any, number: int, image: TaskImage, name: str = "image") -> Any:
    """Return the parts of a field with the image of one of them; as they are if there is no such part."""
    if not isinstance(parts, list | tuple) or number >= len(parts) or not isinstance(parts[number], Mapping):
        return parts
    return [{name: image, **part} if place == number else part for place, part in enumerate(parts)]


class DecodeNode(_Node):
    """The pixels of "latent", with the VAE of a model, in tiles as in a request. `track`: of a video with audio, the
    frames alone, or the audio alone; "" for both."""

    kind: Literal["decode"]
    model: _Name
    track: Literal["", "frames", "sound"] = ""
    vae_tile: int | None = None
    vae_frames: int | None = None

    @field_validator("vae_tile", "vae_frames", mode="before")
    @classmethod
    def _tile(cls, value: Any, info: Any) -> Any:
        return REQUEST_FIELDS[info.field_name].checked(value)

    def names(self) -> Iterator[tuple[str, str]]:
        """Yield the kind and the name of each file that it names."""
        yield "model", self.model


class UpscaleNode(_Node):
    """An "image", or the "latent" of a video, enlarged by an upscaler for it."""

    kind: Literal["upscale"]
    upscale: Upscale

    def names(self) -> Iterator[tuple[str, str]]:
        """Yield the kind and the name of each file that it names."""
        yield "upscaler", self.upscale.model


class OperationNode(_Node):
    """An operation of `pool.inference.operations`, or a node of a user that the operator permits: a change without a
    model, with its settings. `version`: the version that a node of a user must have; "" for any."""

    kind: Literal["operation"]
    name: _Name
    version: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] = ""
    settings: dict[str, Any] = Field(default_factory=dict, max_length=MAX_NODE_INPUTS)

    @field_validator("settings")
    @classmethod
    def _plain(cls, value: dict[str, Any]) -> dict[str, Any]:
        return {name: _plain_setting(name, each) for name, each in value.items()}


def _plain_setting(name: str, value: Any) -> Any:
    """Return a setting that ids are made of: a number, a text, or a tuple of numbers. Raises UnusableField."""
    if isinstance(value, list | tuple):
        if len(value) > MAX_PROMPT_CHARACTERS or not all(type(each) in (int, float) for each in value):
            raise unusable_field(f"settings.{name}", type(value).__name__, "a list of numbers")
        return tuple(_bounded(name, each) for each in value)
    if isinstance(value, str):
        check_characters(f"settings.{name}", value, MAX_NAME_CHARACTERS)
    if not isinstance(value, bool | int | float | str):
        raise unusable_field(f"settings.{name}", type(value).__name__, "a number, a text, or a list of numbers")
    return value if isinstance(value, str) else _bounded(name, value)


def _bounded(name: str, number: float) -> float:
    """Return a number that every operation can compute with. Raises UnusableField."""
    if not abs(number) <= MAX_SETTING:
        found = f"{number:g}" if isinstance(number, float) else "a larger whole number"
        raise unusable_field(f"settings.{name}", found, f"a number from {-MAX_SETTING:g} to {MAX_SETTING:g}")
    return number


WorkflowNode: TypeAlias = Annotated[
    TextNode | ImageNode | VideoNode | AudioNode | EncodeNode | SampleNode | DecodeNode | UpscaleNode | OperationNode,
    Field(discriminator="kind"),
]


#: the classes of nodes, by kind
_CLASSES: Mapping[str, type[_Node]] = MappingProxyType(
    {
        "text": TextNode,
        "image": ImageNode,
        "mask": ImageNode,
        "video": VideoNode,
        "audio": AudioNode,
        "encode": EncodeNode,
        "sample": SampleNode,
        "decode": DecodeNode,
        "upscale": UpscaleNode,
        "operation": OperationNode,
    }
)


def _parsed(node_id: Any, fields: Any) -> Any:
    """Return a node of a known kind; other values as they are. Raises UserError that names the node."""
    kind = fields.get("kind") if isinstance(fields, Mapping) else None
    if not isinstance(kind, str) or kind not in _CLASSES or not all(isinstance(name, str) for name in fields):
        return fields
    try:
        return _CLASSES[kind](**fields)
    except UserError as problem:
        message = f"node {str(node_id)[:MAX_NODE_ID]}: {problem}"
        raise UnknownName(message) if isinstance(problem, UnknownName) else reworded(problem, message) from None


class Workflow(Strict):
    """A graph of nodes, by their ids, and the node with the result, `output`."""

    nodes: dict[Annotated[str, Field(min_length=1, max_length=MAX_NODE_ID)], WorkflowNode]
    output: str

    @field_validator("nodes", mode="before")
    @classmethod
    def _not_too_many(cls, value: Any) -> Any:
        """Refuse too many nodes before any is read."""
        if isinstance(value, Mapping) and len(value) > MAX_NODES:
            raise over_bound("workflow.nodes", counted(len(value), "node"), f"up to {MAX_NODES}")
        if not isinstance(value, Mapping):
            return value
        return {node_id: _parsed(node_id, fields) for node_id, fields in value.items()}

    @model_validator(mode="after")
    def _connected(self) -> Workflow:
        if self.output not in self.nodes:
            raise unusable_field("workflow.output", self.output[:MAX_NODE_ID], "the id of a node")
        for node_id, node in self.nodes.items():
            for name, source in node.inputs.items():
                if source not in self.nodes:
                    raise unusable_field(f"node {node_id}: {name}", source[:MAX_NODE_ID], "the id of a node")
        steps = sum(STEPS.parse("steps", node.request.steps) for node in self.samplings)
        if steps > MAX_WORKFLOW_STEPS:
            raise over_bound("workflow", counted(steps, "step"), f"up to {MAX_WORKFLOW_STEPS} in all nodes together")
        if not any(node.kind not in ("image", "mask", "video", "audio") for _, node in self.in_order):
            raise unusable_field("workflow.output", self.output[:MAX_NODE_ID], "a node that computes something")
        return self

    @property
    def in_order(self) -> tuple[tuple[str, Any], ...]:
        """The nodes that the output depends on, each after the nodes that it reads. Raises UnusableField for a node
        that depends on itself, and OverBound for too many behind one another."""
        return tuple((node_id, self.nodes[node_id]) for node_id in self._order)

    @cached_property
    def _order(self) -> tuple[str, ...]:
        """The ids of these nodes: a copy with other nodes has the same."""
        depths: dict[str, int] = {}
        visiting: set[str] = set()
        stack = [self.output]
        while stack:
            node_id = stack[-1]
            sources = self.nodes[node_id].inputs.values()
            waiting = [source for source in sources if source not in depths]
            if node_id in depths:
                stack.pop()
            elif waiting:
                visiting.add(node_id)
                if found := visiting.intersection(waiting):
                    raise UnusableField(f"node {min(found)}: it depends on itself")
                stack.extend(waiting)
            else:
                depths[node_id] = 1 + max((depths[source] for source in sources), default=0)
                visiting.discard(stack.pop())
                if depths[node_id] > MAX_DEPTH:
                    raise over_bound("workflow", f"more than {MAX_DEPTH} nodes behind one another", f"{MAX_DEPTH}")
        return tuple(depths)

    @property
    def samplings(self) -> Iterator[SampleNode]:
        """The nodes that sample and that the output depends on, in order."""
        return (node for _, node in self.in_order if isinstance(node, SampleNode))

    def names(self) -> Iterator[tuple[str, str]]:
        """Yield the kind and the name of each file that a node names."""
        for node in self.nodes.values():
            yield from node.names()

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield the place and the text of each text of its nodes."""
        for node_id, node in self.nodes.items():
            if isinstance(node, TextNode):
                yield f"node {node_id}: prompt", node.prompt
            elif isinstance(node, SampleNode):
                yield from ((f"node {node_id}: {name}", text) for name, text in node.request.texts())

    @property
    def shown_fields(self) -> dict[str, Any]:
        """The fields of a request that describe the output for users: model, texts and schedule of the last sampling
        run, else its first model alone, or `NO_MODEL`."""
        samplings = tuple(self.samplings)
        if not samplings:
            name = next((name for _, node in self.in_order for _, name in node.names()), NO_MODEL)
            return {"model": name, "prompt": ""}
        last, prompts = samplings[-1], dict[str, str]()
        for name in ("positive", "negative"):
            text = self.nodes.get(last.inputs.get(name, ""))
            if isinstance(text, TextNode):
                prompts[name] = text.prompt
        request = last.request
        names = ("steps", "cfg", "sampler", "schedule", "sigmas")
        shown = {name: getattr(request, name) for name in names if name in request.model_fields_set}
        return {
            "model": request.model,
            "prompt": prompts.get("positive", request.prompt),
            "negative": prompts.get("negative", request.negative),
            **shown,
        }

    def changed_at(self, changes: Mapping[str, Any]) -> Workflow:
        """Return the workflow with other nodes under some ids; they are valid."""
        return self.model_copy(update={"nodes": {**self.nodes, **changes}}) if changes else self

    @property
    def own_seed(self) -> int | None:
        """The seed of the last sampling run, 0 without one; None if a run takes the seed of the request."""
        seeds = [node.request.seed for node in self.samplings]
        return None if None in seeds else (0, *seeds)[-1]


def checked_workflow(value: Any) -> Workflow:
    """Return a workflow that is one, or a mapping of its fields. Raises UserError."""
    if isinstance(value, Workflow):
        return value
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise unusable_field("workflow", type(value).__name__, 'a mapping, {"nodes": {ID: NODE}, "output": ID}')
    return Workflow(**value)
