"""Builds the tasks of a workflow: each node becomes the tasks that a request with the same work has, so that equal
parts of workflows and requests are computed once. Pure functions of a request and a catalog.

A node is computed from the values of the nodes that it reads: the task of each, its kind and its size, which are known
before anything runs. Errors name the node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from modelpool.actors.graph.all_features import check_request, with_defaults
from modelpool.actors.graph.common.graph_catalog import GraphCatalog
from modelpool.actors.graph.common.input_ids import input_audio_id, input_frames_id, input_image_id
from modelpool.actors.graph.common.output_shape import duration_of, quality_of
from modelpool.actors.graph.common.stage_request import StageRequest
from modelpool.actors.graph.common.task_collector import JobGraph, TaskCollector
from modelpool.actors.graph.features.decode_tiles_graph import add_decode, with_tiles
from modelpool.actors.graph.features.decoder_graph import check_decodes, with_own_sides
from modelpool.actors.graph.features.guide_graph import GuideRead, check_guided_part, check_guides_fit, guide_read
from modelpool.actors.graph.features.prompt_syntax import prompt_warnings
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.graph.features.reference_graph import edit_model_warnings
from modelpool.actors.graph.features.schedule_guidance import sampler_warnings
from modelpool.actors.graph.features.sound_graph import (
    SoundRead,
    check_keeps_sound,
    length_warning,
    sound_encoded,
    voice_encoded,
)
from modelpool.actors.graph.features.upscale_graph import upscale_params
from modelpool.actors.graph.features.vision_graph import with_unguided_warning
from modelpool.actors.graph.pass_workflow import workflow_of_passes
from modelpool.actors.graph.request_tasks import ReadFromNodes, RequestTasks
from modelpool.actors.graph.workflow_recipe import workflow_recipe
from modelpool.actors.request.audio_fields import InputAudio
from modelpool.actors.request.bounds import over_bound, reworded
from modelpool.actors.request.control_video_fields import InputVideo, TaskVideo
from modelpool.actors.request.field_errors import unsupported_field
from modelpool.actors.request.field_table import SIZE_STEP
from modelpool.actors.request.image_decoding import MAX_SIDE
from modelpool.actors.request.image_fields import TaskImage, skipped_steps
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.video_output_fields import AUDIO_FORMATS, IMAGE_FORMATS, VIDEO_FORMATS
from modelpool.actors.request.workflow_fields import (
    AudioNode,
    DecodeNode,
    EncodeNode,
    ImageNode,
    OperationNode,
    SampleNode,
    TextNode,
    UpscaleNode,
    VideoNode,
    Workflow,
)
from modelpool.pool.families.control_video_models import follows_tracks
from modelpool.pool.families.parts.audio_tracks import sound_length
from modelpool.pool.inference.operations.audio_edits import MAX_SECONDS
from modelpool.pool.inference.operations.latent_edits import LatentStart, SoundTrackOf, VaeScale
from modelpool.pool.inference.operations.operate import operation_named
from modelpool.pool.inference.operations.operation import AUDIO, ENCODED, IMAGE, LATENT, MASK, Operation, Size
from modelpool.pool.inference.operations.own_nodes import OpenedNode
from modelpool.pool.inference.operations.pixel_levels import STILL_RATE
from modelpool.pool.inference.operations.resampling import SLERP
from modelpool.pool.values.core import task_inputs
from modelpool.pool.values.core.errors import UnknownName, UnusableField, UserError, counted, unusable_field
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.sampling_facts import ModelDefaults, SamplingFacts, VideoFacts
from modelpool.pool.values.core.stage_params import (
    SOUND,
    CameraCondition,
    DecodeParams,
    EncodeImageParams,
    FirstFrames,
    ModelRef,
    OperationParams,
    OutputShape,
    PriorCondition,
    SettingValue,
    StepPart,
    TracksCondition,
    UpscaleParams,
    UpscalerRef,
)
from modelpool.pool.values.specs.spec import JobId, Role, Stage, TaskId

#: bytes of the results of all nodes of a workflow together
MAX_INTERMEDIATE_BYTES = 8 << 30
#: tokens of a text that is made of others: about as many as the longest prompt has
MAX_JOINED_TOKENS = 1 << 17
#: bytes of a token of an encoded text, and of a second of audio
_TOKEN_BYTES, _SECOND_BYTES = 16384, 384_000
#: bytes of a cell of a latent: 16 channels of float32; some families have more, and larger cells
_CELL_BYTES = 64
_NO_SIZE = Size(0, 0)
#: kinds of VAEs of LTX-Video and LTX-2
LTX_VAES = "ltx"
#: pixels by which a mask may be larger or smaller than an image, as parts of cells are cut off
_CELL_SIDE = 16
#: the image and the mask that an inpainting model reads; other models do not read them
_INPAINTED = ("inpaint_image", "inpaint_mask")
#: beginning of the names of images that guide a video
_GUIDES = "guides."
#: beginning of the names of texts in boxes
_BOXES = "boxes."
#: level below which a start latent is a part of what a run begins with
_ALL_NOISE = 0.999
#: videos that condition a run
_VIDEOS = ("video", "video_mask", "face_video")
#: what models of videos read of a camera, by the name in `ModelKwargs`
_CAMERA = "camera"
#: the latent of the first model of two, and the image that has the size of the output
_PRIOR, _SIZE = "prior", "size"
#: the audio of a video that is kept
_SOUND = "sound"
#: audio with the voice that the audio of a video has
_VOICE = "voice"
#: the input with the frames that a video begins with
_FIRST_FRAMES = "first_frames"
_SAMPLE_INPUTS = (
    "positive, negative, latent, mask, image, last_image, reference.N, controls.N, image_prompts.N, regions.N.mask, "
    "video, video_mask, face_video, first_frames, guides.N, boxes.N, prior, size, sound, voice"
)


@dataclass(frozen=True, slots=True)
class NodeValue:
    """The result of a node.

    kind    of `pool.inference.operations.operation`
    task    that computes it, or an image of the user
    size    in pixels, or in cells of a latent
    tokens  of an encoded text
    shape   of what a latent is decoded to
    model   that a latent is of
    reader  the model that an encoded text is encoded for
    has_sound  whether a latent has an audio track behind its frames
    is_pooled  whether an encoded text has its pooled state, for boxes
    """

    kind: str
    task: TaskId
    size: Size = _NO_SIZE
    tokens: int = 0
    shape: OutputShape | None = None
    model: ModelRef | None = None
    has_sound: bool = False
    is_pooled: bool = False
    reader: ModelRef | None = None

    @property
    def timing(self) -> float:
        """Frames per second of several images, seconds of audio; 0 for a single image."""
        if self.shape is None:
            return 0.0
        return self.shape.seconds if self.kind == AUDIO else self.shape.frame_rate

    @property
    def size_bytes(self) -> int:
        """About the bytes of the result."""
        if self.kind == AUDIO:
            return int(self.timing * _SECOND_BYTES)
        bytes_of_one = {IMAGE: 3, MASK: 1, LATENT: _CELL_BYTES}.get(self.kind, 0)
        return self.size.width * self.size.height * self.size.count * bytes_of_one + self.tokens * _TOKEN_BYTES


def build_workflow(request: GenerateRequest, job_id: JobId, catalog: GraphCatalog) -> tuple[Recipe, JobGraph]:
    """Build the recipe (without versions) and the task graph of a request with a workflow or with passes. Its seed must
    be set, and its images must be in the pool. Raises UserError that names the node."""
    workflow = workflow_of_passes(request) if request.workflow is None else request.workflow
    builder = _WorkflowTasks(catalog, request, workflow)
    if request.passes and request.regions:
        builder.warnings["regions: passes do not read them, the first run alone does"] = None
    value = builder.build()
    graph = builder.tasks.job(job_id, value.task, frozenset(), tuple(builder.warnings))
    if request.passes:
        model = catalog.find_model(request.model)
        graph = with_unguided_warning(graph, model, catalog.model_defaults(model).sampling, request.negative)
    kind, formats = _output_formats(value)
    if request.format is not None and request.format not in formats:
        raise unusable_field("format", request.format, f"{' or '.join(formats)}: the workflow makes {kind}")
    file_format = request.format or formats[0]
    quality = quality_of(request.quality, file_format) or 0
    shape = value.shape or OutputShape(value.size.width, value.size.height, value.size.frames)
    recipe = workflow_recipe(
        request, workflow, builder.resolved, graph, shape, (file_format, quality), builder.versions
    )
    return recipe, graph


def _output_formats(value: NodeValue) -> tuple[str, tuple[str, ...]]:
    """Return what a workflow makes, for messages, and its file formats. Raises UnusableField for a value that is
    no output."""
    if value.kind == AUDIO:
        return "audio", AUDIO_FORMATS
    if value.kind != IMAGE:
        raise unusable_field("workflow.output", f"a node that makes a value of kind {value.kind}", "an image or audio")
    return ("a video", VIDEO_FORMATS) if value.size.frames else ("an image", IMAGE_FORMATS)


class _WorkflowTasks:
    """The tasks of the nodes of one workflow."""

    def __init__(self, catalog: GraphCatalog, request: GenerateRequest, workflow: Workflow) -> None:
        self._catalog = catalog
        self._request = request
        self._workflow = workflow
        self._values: dict[str, NodeValue] = {}
        self.tasks = TaskCollector(catalog, keeps=True)
        self.warnings: dict[str, None] = {}
        #: the requests of sampling nodes with the defaults of their models, by node
        self.resolved: dict[str, GenerateRequest] = {}
        #: versions of the nodes of users, by name
        self.versions: dict[str, str] = {}

    def build(self) -> NodeValue:
        """Add the tasks of all nodes that the output depends on; return the value of the output. Raises UserError."""
        total_bytes = 0
        for node_id, node in self._workflow.in_order:
            self.tasks.node = node_id
            try:
                value = self._value(node_id, node)
            except UserError as problem:
                raise _at_node(node_id, problem) from problem
            self._values[node_id] = value
            total_bytes += value.size_bytes
            if total_bytes > MAX_INTERMEDIATE_BYTES:
                found = f"more than {MAX_INTERMEDIATE_BYTES} bytes in the results of its nodes up to node {node_id}"
                raise over_bound("workflow", found, f"up to {MAX_INTERMEDIATE_BYTES}")
        value = self._values[self._workflow.output]
        if value.task not in self.tasks:
            raise unusable_field("workflow.output", self._workflow.output, "a node that computes something")
        return value

    def _value(self, node_id: str, node: Any) -> NodeValue:
        match node:
            case TextNode():
                return self._text(node)
            case ImageNode():
                return _given(node)
            case VideoNode():
                return _given_video(node)
            case AudioNode():
                return _given_audio(node)
            case EncodeNode():
                return self._encode(node)
            case SampleNode():
                return self._sample(node_id, node)
            case DecodeNode():
                return self._decode(node)
            case UpscaleNode():
                return self._upscale(node)
            case OperationNode():
                return self._operate(node)
        raise AssertionError(f"a node of an unknown kind: {node}")

    def _read(self, node: Any, name: str, kind: str) -> NodeValue:
        """Return the value that a node reads under a name. Raises UnusableField for none, and for another kind."""
        value = self._optional(node, name, kind)
        if value is None:
            raise UnusableField(f"{name}: missing; expected a node that makes a value of kind {kind}")
        return value

    def _optional(self, node: Any, name: str, kind: str) -> NodeValue | None:
        """Return the value that a node reads under a name; None for none. Raises UnusableField for another kind."""
        if name not in node.inputs:
            return None
        value = self._values[node.inputs[name]]
        if value.kind != kind:
            raise unusable_field(name, f"node {node.inputs[name]}, of kind {value.kind}", f"a value of kind {kind}")
        return value

    def _model(self, name: str) -> tuple[ModelRef, ModelDefaults]:
        model = self._catalog.find_model(name)
        return model, with_own_sides(self._catalog.model_defaults(model))

    def _check_latent(self, name: str, latent: NodeValue, model: ModelRef) -> None:
        """Raise UnusableField for a latent of no model, and for one that means another image for the VAE of `model`."""
        if latent.model is None:
            expected = "that of a run or of an image; a run without a latent begins with noise"
            raise unusable_field(name, "an empty latent, of no model", expected)
        if latent.model.name == model.name:
            return
        found, wanted = (self._model(each.name)[1].latent for each in (latent.model, model))
        if found is None or wanted is None or _kind_of_latents(found) == _kind_of_latents(wanted):
            return
        raise unusable_field(
            name,
            f"a latent of model {latent.model.name!r}",
            f"one with the layout and the scale of model {model.name!r}; an image passes between other models: decode "
            "the latent with its own model, and encode the image",
        )

    def _check_text(self, name: str, text: NodeValue, model: ModelRef) -> None:
        """Raise UnusableField for a text of other text encoders than `model` reads, and warn of one that it reads in
        another way."""
        if text.reader is None or text.reader.name == model.name:
            return
        found, wanted = (self._model(each.name)[1].texts for each in (text.reader, model))
        if found is None or wanted is None or found == wanted:
            return
        other_text = f"a text for model {text.reader.name!r}"
        if found.encoders != wanted.encoders:
            own, other = (", ".join(each.encoders) for each in (found, wanted))
            raise unusable_field(name, f"{other_text}, of {own}", f"one of {other}, which model {model.name!r} reads")
        warning = f"{name}: found {other_text}: model {model.name!r} reads the same text encoders in another way"
        self.warnings[warning] = None

    def _text(self, node: TextNode) -> NodeValue:
        check_inputs(node, ())
        name = "negative" if node.is_negative else "prompt"
        fields: dict[str, Any] = {"model": node.model, "prompt": "", "loras": node.loras, "clip_skip": node.clip_skip}
        request = GenerateRequest(**{**fields, name: node.prompt})
        tasks = RequestTasks(self._catalog, StageRequest(Stage.ENCODE, request), self.tasks)
        task, tokens = tasks.encoded(node.is_negative, node.pooled)
        self.warnings |= tasks.warnings
        reader = self._catalog.find_model(node.model)
        return NodeValue(ENCODED, task, tokens=tokens, is_pooled=node.pooled, reader=reader)

    def _encode(self, node: EncodeNode) -> NodeValue:
        for name, encode in (("video", self._encode_video), ("audio", self._encode_audio)):
            if name in node.inputs:
                check_inputs(node, (name,))
                return encode(node)
        check_inputs(node, ("image", "mask"))
        image, mask = self._read(node, "image", IMAGE), self._one_mask(node)
        if image.size.frames:
            raise unusable_field("image", f"{image.size.frames} frames", "one image")
        model, defaults = self._model(node.model)
        self._check_encodes(model, defaults)
        width, height = whole_cells(image.size, defaults)
        self._warn_of_shape(mask, width, height)
        needs = {task_inputs.IMAGE: image.task, **({} if mask is None else {task_inputs.MASK: mask.task})}
        task = self.tasks.add(EncodeImageParams(model, width, height, hides=mask is not None), needs)
        if defaults.latent is not None and (side := defaults.latent.encoded_side):
            width, height = (defaults.latent.pixels_of(pixels // side) for pixels in (width, height))
        return _latent(task, OutputShape(width, height), model, defaults)

    def _check_encodes(self, model: ModelRef, defaults: ModelDefaults) -> None:
        """Raise UnusableField for a file of the first model of two without its encoder of images."""
        if defaults.sampling.is_prior_stage and Role.VAE not in self._catalog.components(model):
            expected = "a file of stage C with its encoder of images (tensors vae.encoder.*)"
            raise unusable_field("model", model.name, expected)

    def _encode_video(self, node: EncodeNode) -> NodeValue:
        video = self._read(node, "video", IMAGE)
        model, defaults = self._model(node.model)
        facts = defaults.sampling.video
        if facts is None or not _reads_frames(defaults):
            raise unusable_field("model", node.model, "a model of videos without sound: others encode an image")
        if not video.size.frames:
            raise unusable_field("video", "one image", "frames; operation image_repeat makes some of one image")
        width, height = whole_cells(video.size, defaults)
        frames = 1 + (video.size.frames - 1) // facts.multiple * facts.multiple
        task = self.tasks.add(
            EncodeImageParams(model, width, height, video=FirstFrames(frames)), {task_inputs.VIDEO: video.task}
        )
        return _latent(task, OutputShape(width, height, frames, facts.rate), model, defaults)

    def _encode_audio(self, node: EncodeNode) -> NodeValue:
        audio = self._read(node, "audio", AUDIO)
        model, defaults = self._model(node.model)
        facts = defaults.sampling.audio
        if facts is None:
            raise unusable_field("model", node.model, "a model of audio")
        assert audio.shape is not None, "audio has a length"
        seconds = facts.whole_seconds(audio.shape.seconds, defaults.downscale)
        if not 0 < seconds <= facts.longest:
            expected = f"up to {facts.longest:g} seconds, and at least one cell of the latent"
            raise unusable_field("audio", f"{audio.shape.seconds:g} seconds", expected)
        task = self.tasks.add(EncodeImageParams(model, 0, 0, seconds=seconds), {task_inputs.AUDIO: audio.task})
        return _latent(task, OutputShape(0, 0, seconds=seconds), model, defaults)

    def _one_mask(self, node: EncodeNode | SampleNode) -> NodeValue | None:
        """Return the mask that a node reads, if it reads one. Raises UnusableField for one with frames."""
        mask = self._optional(node, "mask", MASK)
        if mask is not None and mask.size.frames:
            raise unusable_field("mask", f"{mask.size.frames} frames", "one mask")
        return mask

    def _warn_of_shape(self, mask: NodeValue | None, width: int, height: int) -> None:
        """Warn of a mask that is cut: it is scaled to cover the image. Parts of cells are no difference."""
        if mask is None or not width or not height:
            return
        if abs(mask.size.width * height - mask.size.height * width) > _CELL_SIDE * max(width, height):
            found = f"{mask.size.width}x{mask.size.height} for an image of {width}x{height}"
            self.warnings[f"mask: found {found}: it is scaled to cover the image, and cut at its sides"] = None

    def _sample(self, node_id: str, node: SampleNode) -> NodeValue:
        model, defaults = self._model(node.request.model)
        facts = defaults.sampling
        texts = {
            name: (value.task, value.tokens)
            for name in (task_inputs.POSITIVE, task_inputs.NEGATIVE)
            if (value := self._optional(node, name, ENCODED)) is not None
        }
        for name in texts:
            self._check_text(name, self._read(node, name, ENCODED), model)
        start, mask = self._optional(node, "latent", LATENT), self._one_mask(node)
        if start is not None:
            self._check_latent("latent", start, model)
            if mask is not None and start.shape is not None and start.shape.seconds and not start.shape.frames:
                raise unusable_field("mask", "a mask", "none with latents of audio")
            _check_sound(node, start, defaults)
            _check_frames(node, start, defaults)
            if start.shape is not None:
                self._warn_of_shape(mask, start.shape.width, start.shape.height)
        prior = self._prior(node, model, facts)
        request = self._with_nodes(node, start, facts)
        if facts.inpaints and {*_INPAINTED} <= node.inputs.keys():
            shown = {
                name: self._task_image(node, place) for name, place in zip(("image", "mask"), _INPAINTED, strict=True)
            }
            request, mask = request.model_copy(update=shown), None
        check_request(request, facts, in_workflow=True)
        guides = self._guides(node, facts.video)
        request = with_defaults(request, model, defaults)
        _check_guides(node, guides, request, defaults)
        self.resolved[node_id] = request
        first_step, part = node.first_step, StepPart(node.last_step, node.adds_noise, node.keeps_noise)
        if node.strength is not None:
            first_step = skipped_steps("strength", node.strength, request.steps, facts.rounds_steps_up)
        start_task, mask_task = (None if each is None else each.task for each in (start, mask))
        first = self._task_video(node, _FIRST_FRAMES) if _FIRST_FRAMES in node.inputs else None
        if first is not None and "image" not in node.inputs:
            raise UnusableField(f"{_FIRST_FRAMES}: expected image, too: the first of them")
        camera = None if node.camera is None else CameraCondition(**node.camera.model_dump())
        if camera is not None and _CAMERA not in facts.reads:
            raise unsupported_field(_CAMERA, request.model, "reads no camera")
        read = ReadFromNodes(texts, start_task, mask_task, first_step, part, node.video_stops, first, guides, camera)
        seen: dict[str, Any] = {"of_prompt": _predicts_prompt(node, facts), "nested": node.nested, "prior": prior}
        seen |= self._boxes(node, model) | _tracks(node, request, facts)
        seen |= {"sound": self._kept_sound(node, request, model, facts), "voice": self._voice(node, model, facts)}
        read = replace(read, **seen)
        tasks = RequestTasks(self._catalog, StageRequest(Stage.SAMPLE, request), self.tasks, read)
        task, work = tasks.sampled()
        if first_step and work.schedule.first_step != first_step:
            field = "first_step" if node.strength is None else "strength"
            expected = f"none: model {model.name!r} reads its image in all steps"
            raise unusable_field(field, node.first_step or node.strength, expected)
        if guides and not work.steps_run:
            raise unusable_field("guides", counted(len(guides), "image"), "none in a run of no step")
        if _SOUND in node.inputs and not work.steps_run:
            raise UnusableField(f"{_SOUND}: expected none in a run of no step")
        self.warnings |= tasks.warnings
        self.warnings |= dict.fromkeys(edit_model_warnings(request, facts, model))
        self.warnings |= dict.fromkeys(sampler_warnings(request, facts))
        if facts.reads_text:
            self.warnings |= dict.fromkeys(prompt_warnings(request))
        made = _latent(task, replace(work.shape, leading=work.leading_kept), model, defaults)
        return replace(made, has_sound=_makes_sound(defaults))

    def _voice(self, node: SampleNode, model: ModelRef, facts: SamplingFacts) -> SoundRead | None:
        """Return the audio with the voice that the audio of a video has. Raises UnusableField."""
        if _VOICE not in node.inputs:
            if node.voice_scale:
                raise unusable_field("voice_scale", node.voice_scale, f"0 without the input {_VOICE}")
            return None
        value = self._read(node, _VOICE, AUDIO)
        return voice_encoded(value.task, value.timing, model, facts, node.voice_scale)

    def _kept_sound(
        self, node: SampleNode, request: GenerateRequest, model: ModelRef, facts: SamplingFacts
    ) -> SoundRead | None:
        """Return the audio of a video that a run keeps. Raises UnusableField for audio of another video."""
        if _SOUND not in node.inputs:
            return None
        check_keeps_sound(model, facts)
        value, found = self._values[node.inputs[_SOUND]], duration_of(request, model.name, facts)
        if value.kind == AUDIO:
            read = sound_encoded(value.task, model, facts, found.frames, found.frame_rate)
            if warning := length_warning(value.timing, found.frames / found.frame_rate):
                self.warnings[warning] = None
            return read
        value = self._read(node, _SOUND, LATENT)
        self._check_latent(_SOUND, value, model)
        timing = (0, 0.0) if value.shape is None else (value.shape.frames, value.shape.frame_rate)
        if not value.has_sound or timing != (found.frames, found.frame_rate):
            shown = f"{timing[0]} frames at {timing[1]:g}" if value.has_sound else "no audio"
            raise unusable_field(
                _SOUND, shown, f"audio, or that of {found.frames} frames at {found.frame_rate:g} per second"
            )
        return SoundRead(value.task)

    def _boxes(self, node: SampleNode, model: ModelRef) -> dict[str, Any]:
        """Return what a run reads of texts in boxes, as fields. Raises UnusableField for boxes without their text, or
        the other way round."""
        boxes = () if node.gligen is None else node.gligen.boxes
        given = [name for name in node.inputs if name.startswith(_BOXES)]
        expected = [f"{_BOXES}{number}" for number, _ in enumerate(boxes)]
        if sorted(given) != sorted(expected):
            raise unusable_field("inputs", ", ".join(given) or "no boxes", ", ".join(expected) or "no boxes")
        if node.gligen is None:
            return {}
        texts = {name: self._read(node, name, ENCODED) for name in expected}
        for name, text in texts.items():
            self._check_text(name, text, model)
            if not text.is_pooled:
                raise unusable_field(name, "a text without its pooled state", "a text node with pooled")
        gligen = replace(self._catalog.gligens.find(node.gligen.model), end=node.gligen.end)
        places = [(box.x, box.y, box.x + box.width, box.y + box.height) for box in boxes]
        tasks = (text.task for text in texts.values())
        return {"gligen": gligen, "boxes": tuple(zip(tasks, places, strict=True))}

    def _prior(self, node: SampleNode, model: ModelRef, facts: SamplingFacts) -> tuple[TaskId, PriorCondition] | None:
        """Return the latent of the first model of two that a node reads; None for other models. Raises UnusableField,
        and as `find_decoder`."""
        if not facts.is_decoder_stage:
            if _PRIOR in node.inputs:
                raise unsupported_field(_PRIOR, model.name, "reads no latent of another model")
            return None
        latent = self._read(node, _PRIOR, LATENT)
        if latent.model is None or not self._model(latent.model.name)[1].sampling.is_prior_stage:
            name = "no model" if latent.model is None else latent.model.name
            found = f"node {node.inputs[_PRIOR]}, a latent of {name}"
            raise unusable_field(_PRIOR, found, f"a latent of the model that {model.name!r} follows")
        self._catalog.find_decoder(latent.model, model.name)
        return latent.task, PriorCondition(latent.size.height, latent.size.width)

    def _guides(self, node: SampleNode, video: VideoFacts | None) -> tuple[GuideRead, ...]:
        """Return the images and frames that guide a video. Raises UnusableField for some without their place, or the
        other way round."""
        given = [name for name in node.inputs if name.startswith(_GUIDES)]
        expected = [f"{_GUIDES}{number}" for number in range(len(node.guides))]
        if sorted(given) != sorted(expected):
            raise unusable_field("inputs", ", ".join(given) or "no guides", ", ".join(expected) or "no guides")
        found = []
        for name, guide in zip(expected, node.guides, strict=True):
            has_frames = bool(self._read(node, name, IMAGE).size.frames)
            source = self._task_video(node, name) if has_frames else self._task_image(node, name)
            lora = None if guide.lora is None else self._catalog.find_lora(guide.lora, 1.0)
            factor = 1 if lora is None else self._catalog.reference_factor(lora)
            found.append(guide_read(guide, source, video, factor))
        return tuple(found)

    def _with_nodes(self, node: SampleNode, start: NodeValue | None, facts: SamplingFacts) -> GenerateRequest:
        """Return the request of a node with its seed, the size of its start latent, and the images of other nodes."""
        request = node.request
        changed: dict[str, Any] = {} if request.seed is not None else {"seed": self._request.seed}
        if start is not None:
            assert start.shape is not None, "a latent has a shape"
            for name, side in (("width", start.shape.width), ("height", start.shape.height)):
                if (own := getattr(request, name)) not in (None, side):
                    raise unusable_field(name, own, f"{side}, that of the start latent, or none")
                changed[name] = side or None
            if start.shape.frames:
                if (own := request.frames) not in (None, start.shape.frames):
                    raise unusable_field("frames", own, f"{start.shape.frames}, those of the start latent, or none")
                rate = request.frame_rate or start.shape.frame_rate
                changed |= {"frames": start.shape.frames, "frame_rate": rate}
            if start.shape.seconds:
                changed["seconds"] = start.shape.seconds
        if _SIZE in node.inputs:
            changed |= self._size_of_image(node, start)
        alone = (_PRIOR, _SIZE, _SOUND, _VOICE, _FIRST_FRAMES, *_INPAINTED, *_VIDEOS)
        others = ("positive", "negative", "latent", "mask", *alone)
        videos = {name: self._task_video(node, name) for name in _VIDEOS if name in node.inputs}
        _check_videos(videos, request.frames)
        changed |= videos
        read = [name for name in node.inputs if name not in others and not name.startswith((_GUIDES, _BOXES))]
        images = {name: self._task_image(node, name) for name in read}
        parts: dict[str, Any] = {}
        for name, image in images.items():
            field, _, place = name.partition(".")
            if name in ("image", "last_image"):
                parts[name] = image
            elif field == "reference" and place.isdecimal():
                parts[field] = (*parts.get(field, ()), image)
            elif field in ("controls", "image_prompts", "regions"):
                number, _, what = place.partition(".")
                known = list(parts.get(field, getattr(request, field)))
                if not number.isdecimal() or int(number) >= len(known) or what not in ("", "mask"):
                    raise unusable_field("inputs", name, f"a number of one of its {field}")
                known[int(number)] = known[int(number)].model_copy(update={what or "image": image})
                parts[field] = tuple(known)
            else:
                raise unusable_field("inputs", name, _SAMPLE_INPUTS)
        if len(parts.get("reference", ())) == 1:
            parts["reference"] = parts["reference"][0]
        sized, step = parts.get("image"), SIZE_STEP
        if sized is None and facts.blank_reference:
            sized, step = parts.get("reference"), facts.side_multiple or SIZE_STEP
        if isinstance(sized, TaskImage):
            for name, side in (("width", sized.width), ("height", sized.height)):
                if getattr(request, name) is None and name not in changed:
                    changed[name] = max(step, side // step * step)
        return request.model_copy(update={**changed, **parts})

    def _size_of_image(self, node: SampleNode, start: NodeValue | None) -> dict[str, int]:
        """Return width and height of a run that makes an image as large as one that it reads nothing else of. Raises
        UnusableField for a run with another size, too."""
        size = self._read(node, _SIZE, IMAGE).size
        if start is not None or node.request.width is not None or node.request.height is not None:
            raise UnusableField(f"{_SIZE}: expected none next to a start latent, and to width and height")
        sides = {"width": size.width // SIZE_STEP * SIZE_STEP, "height": size.height // SIZE_STEP * SIZE_STEP}
        if not all(sides.values()):
            raise unusable_field(_SIZE, f"{size.width}x{size.height}", f"sides of at least {SIZE_STEP}")
        return sides

    def _task_image(self, node: SampleNode, name: str) -> TaskImage:
        value = self._read(node, name, MASK if name.endswith("mask") else IMAGE)
        if value.size.frames:
            raise unusable_field(name, f"{value.size.frames} frames", "one image")
        return TaskImage(value.task, value.size.width, value.size.height)

    def _task_video(self, node: SampleNode, name: str) -> TaskVideo:
        value = self._read(node, name, MASK if name.endswith("mask") else IMAGE)
        if not value.size.frames:
            raise unusable_field(name, "one image", "frames; operation image_repeat makes some of one image")
        return TaskVideo(value.task, value.size.width, value.size.height, value.size.frames)

    def _decode(self, node: DecodeNode) -> NodeValue:
        check_inputs(node, ("latent",))
        latent = self._read(node, "latent", LATENT)
        model, defaults = self._model(node.model)
        check_decodes(model.name, defaults.sampling)
        self._check_latent("latent", latent, model)
        shape = latent.shape
        assert shape is not None, "a latent has a shape"
        if node.track and not latent.has_sound:
            raise unusable_field("track", node.track, "none: the latent has no audio")
        work = DecodeParams(model, shape, track=node.track)
        if node.track == SOUND:
            task = self.tasks.add(work, {task_inputs.LATENT: latent.task})
            return NodeValue(AUDIO, task, shape=OutputShape(0, 0, seconds=shape.frames / shape.frame_rate))
        if node.vae_tile or node.vae_frames:
            tiles = GenerateRequest(model=node.model, prompt="", vae_tile=node.vae_tile, vae_frames=node.vae_frames)
            work = with_tiles(work, tiles, defaults.sampling)
        task = add_decode(self.tasks, work, {task_inputs.LATENT: latent.task}, defaults)
        size = Size(shape.width, shape.height, shape.frames)
        return NodeValue(AUDIO if shape.seconds and not shape.frames else IMAGE, task, size, shape=shape)

    def _upscale(self, node: UpscaleNode) -> NodeValue:
        check_inputs(node, ("image", "latent"))
        upscaler = self._catalog.upscalers.find(node.upscale.model)
        if "latent" in node.inputs:
            return self._upscale_latent(node, upscaler)
        image = self._read(node, "image", IMAGE)
        shape = OutputShape(image.size.width, image.size.height, image.size.frames)
        work = upscale_params(node.upscale, upscaler, shape)
        task = self.tasks.add(work, {task_inputs.IMAGE: image.task})
        size = Size(work.out_width, work.out_height, image.size.frames)
        return NodeValue(IMAGE, task, size, shape=_resized(image.shape, size))

    def _upscale_latent(self, node: UpscaleNode, upscaler: UpscalerRef) -> NodeValue:
        """Add the task that enlarges the latent of a video. Raises UnusableField for an upscaler of other latents."""
        check_inputs(node, ("latent",))
        value = self._read(node, "latent", LATENT)
        if value.model is None or value.shape is None:
            raise unusable_field("latent", "an empty latent, of no model", "the latent of a run")
        defaults = self._model(value.model.name)[1]
        latent, read = defaults.latent, upscaler.latent_channels
        if not read or latent is None or not latent.vae.startswith(LTX_VAES) or latent.channels != read:
            found = f"{upscaler.name!r}, an upscaler of {f'latents of {read} channels' if read else 'images'}"
            expected = f"an upscaler of the latents of model {value.model.name!r}"
            expected += "" if latent is None else f", of {latent.channels} channels"
            raise unusable_field("upscale.model", found, f"{expected}; upscalers of latents are of LTX")
        if node.upscale.model_fields_set - {"model"}:
            fields = ", ".join(sorted(node.upscale.model_fields_set - {"model"}))
            raise unusable_field("upscale", fields, "the model alone: latents are enlarged whole, by its own factor")
        size = replace(value.size, width=value.size.width * upscaler.scale, height=value.size.height * upscaler.scale)
        if max(value.shape.width, value.shape.height) * upscaler.scale > MAX_SIDE:
            raise unusable_field(
                "upscale.model", upscaler.name, f"a factor that gives sides of up to {MAX_SIDE} pixels"
            )
        cells = value.size.width, value.size.height, size.width, size.height, value.size.frames
        work = UpscaleParams(upscaler, *cells, vae=value.model)
        task = self.tasks.add(work, {task_inputs.LATENT: value.task})
        return replace(value, task=task, size=size, shape=_decoded_shape(value, size, defaults))

    def _params(self, node: OperationNode, operation: Operation, read: Mapping[str, NodeValue]) -> Any:
        """Return the parameters of an operation, with the size of a cell and the scale of the latents that it reads.
        Raises UnusableField, also for latents of different kinds."""
        latents = {name: value for name, value in read.items() if value.model is not None}
        settings, model = dict(node.settings), next((value.model for value in latents.values()), None)
        if model is None:
            return operation.params_of(settings)
        for name, value in latents.items():
            self._check_latent(name, value, model)
        known = {one.name for one in dataclasses.fields(operation.params)}
        defaults = self._model(model.name)[1]
        if "downscale" in known:
            settings.setdefault("downscale", defaults.downscale)
        params = operation.params_of(settings)
        if isinstance(params, SoundTrackOf):
            return _sound_track(read, defaults)
        # scaling is the same in both scales, but for the method that turns vectors
        depends = "scale" in known and getattr(params, "method", SLERP) == SLERP
        if depends and not params.scale and defaults.latent is not None:
            scale = VaeScale.of(defaults.latent)
            # with a factor alone, all but one of these operations are the same in both scales
            if scale.shift or scale.means or isinstance(params, LatentStart):
                params = replace(params, scale=scale.numbers)
        return params

    def _check_version(self, node: OperationNode, own: OpenedNode | None) -> None:
        """Note the version of a node of a user. Raises UnusableField for a node of another version."""
        if own is not None:
            self.versions[node.name] = own.declared.version
        expected = "" if own is None else own.declared.version
        if node.version and node.version != expected:
            raise unusable_field("version", node.version, f"{expected}, as installed" if expected else "none")

    def _operate(self, node: OperationNode) -> NodeValue:
        own = self._catalog.own_nodes.get(node.name)
        operation = operation_named(node.name) if own is None else own.operation
        self._check_version(node, own)
        check_inputs(node, tuple(operation.inputs))
        read = {
            name: value
            for name, kind in operation.inputs.items()
            if (value := self._optional(node, name, kind)) is not None
        }
        if missing := sorted(set(operation.inputs) - set(read) - operation.optional):
            raise UnusableField(f"{operation.name}: missing inputs {', '.join(missing)}")
        alike = [value for value in read.values() if value.kind == operation.result]
        # an empty latent has no model
        like = next((value for value in alike if value.model is not None), alike[0] if alike else None)
        if own is not None:
            node = node.model_copy(update={"settings": own.parsed(node.settings)})
        params = self._params(node, operation, read)
        size = operation.size_of(params, {name: value.size for name, value in read.items()})
        settings = settings_of(params)
        work = OperationParams(operation.name, settings if own is None else own.work_settings(settings))
        task = self.tasks.add(work, {name: value.task for name, value in read.items()})
        tokens = sum(value.tokens for value in read.values()) if "concat" in operation.name else 0
        tokens = tokens or (0 if like is None else like.tokens)
        if operation.result == LATENT and like is not None and like.model is not None and like.shape is not None:
            defaults = self._model(like.model.name)[1]
            shape, has_sound = _decoded_shape(like, size, defaults), like.has_sound or isinstance(params, SoundTrackOf)
            return NodeValue(LATENT, task, size, shape=shape, model=like.model, has_sound=has_sound)
        reader = self._reader_of(read) if operation.result == ENCODED else None
        timings = {name: value.timing for name, value in read.items() if value.timing}
        timing = operation.timing(params, timings)
        if tokens > MAX_JOINED_TOKENS:
            raise unusable_field(node.name, counted(tokens, "token"), f"up to {MAX_JOINED_TOKENS}")
        if operation.result == AUDIO and timing > MAX_SECONDS:
            raise unusable_field(node.name, f"{timing:g} seconds of audio", f"up to {MAX_SECONDS}")
        made = NodeValue(operation.result, task, size, tokens, _made_shape(operation.result, size, timing))
        return replace(made, reader=reader)

    def _reader_of(self, read: Mapping[str, NodeValue]) -> ModelRef | None:
        """Return the model that encoded texts are encoded for. Raises UnusableField for texts of other encoders."""
        texts = {name: value for name, value in read.items() if value.reader is not None}
        reader = next((value.reader for value in texts.values()), None)
        for name, text in texts.items():
            if reader is not None:
                self._check_text(name, text, reader)
        return reader


def _predicts_prompt(node: SampleNode, facts: SamplingFacts) -> bool:
    """Whether the prediction without the image that guides is for the prompt. Raises UnusableField."""
    if node.prompt_without_image and facts.names_images:
        raise unsupported_field("prompt_without_image", node.request.model, "names images in its texts")
    return node.prompt_without_image


def _tracks(node: SampleNode, request: GenerateRequest, facts: SamplingFacts) -> dict[str, TracksCondition]:
    """Return the tracks that a node has, by the name of a field of `ReadFromNodes`. Raises UnusableField."""
    if node.tracks is None:
        return {}
    if not follows_tracks(facts):
        raise unsupported_field("tracks", request.model, "follows no tracks of points")
    if request.image is None:
        raise UnusableField("tracks: expected image, the first frame in which they begin")
    for name, is_set in ((_FIRST_FRAMES, _FIRST_FRAMES in node.inputs), ("last_image", request.last_image is not None)):
        if is_set:
            raise UnusableField(f"tracks: found them next to {name}, expected the first frame alone")
    longest = max(map(len, node.tracks.points))
    if longest > (request.frames or longest):
        raise unusable_field("tracks", f"a track of {longest} frames", f"up to {request.frames}, as the video has")
    return {"tracks": TracksCondition(**node.tracks.model_dump())}


def _kind_of_latents(latent: LatentFacts) -> tuple[object, ...]:
    """Return a key that models share if they read each other's latents."""
    return latent.channels, latent.downscale, latent.cells, VaeScale.of(latent), latent.sound is None


def _reads_frames(defaults: ModelDefaults) -> bool:
    """Whether the latent of a model is of the frames of a video alone."""
    facts = defaults.sampling.video
    return facts is not None and not facts.layers and facts.sound is None


def _check_frames(node: SampleNode, start: NodeValue, defaults: ModelDefaults) -> None:
    """Raise UnusableField for the latent of an image with which a model of videos cannot begin, and for a mask next to
    the latent of a video."""
    if not _reads_frames(defaults):
        return
    if start.shape is not None and not start.shape.frames:
        expected = "one of frames: operation image_repeat makes some of an image, and encode reads them as video"
        raise unusable_field("latent", f"node {node.inputs['latent']}, a latent of an image", expected)
    if "mask" in node.inputs:
        raise unusable_field("mask", "a mask", f"none: model {node.request.model!r} makes videos")


def _makes_sound(defaults: ModelDefaults) -> bool:
    """Whether a model samples an audio track with the frames of its videos."""
    return defaults.sampling.video is not None and defaults.sampling.video.sound is not None


def _check_sound(node: SampleNode, start: NodeValue, defaults: ModelDefaults) -> None:
    """Raise UnusableField for a start latent without the audio that a model samples with its frames."""
    if not _makes_sound(defaults):
        return
    if not start.has_sound:
        expected = "one with audio, which the model samples with its frames: operation latent_sound_track"
        raise unusable_field("latent", f"node {node.inputs['latent']}, a latent without audio", expected)
    if "mask" in node.inputs:
        raise UnusableField("mask: expected none: the model samples audio with its frames, and the mask is of frames")
    rate = 0.0 if start.shape is None else start.shape.frame_rate
    if node.request.frame_rate not in (None, rate):
        found = f"{node.request.frame_rate:g}"
        raise unusable_field("frame_rate", found, f"{rate:g}, of the start latent, on which the audio depends")


def _check_guides(
    node: SampleNode,
    guides: tuple[GuideRead, ...],
    request: GenerateRequest,
    defaults: ModelDefaults,
) -> None:
    """Raise UnusableField for images and frames that cannot guide a run, and for a start latent beside an image with
    which a video begins: a run reads one of them."""
    video = defaults.sampling.video
    begins_below = bool(request.sigmas) and request.sigmas[0] < _ALL_NOISE
    if video is not None and begins_below and {"latent", "image"} <= node.inputs.keys():
        expected = "guides in place of image" if video.guided else "none: the run begins with noise and this image"
        raise unusable_field("latent", f"node {node.inputs['latent']}, next to an image", expected)
    if not guides:
        return
    if video is None or not video.guided:
        raise unsupported_field("guides", node.request.model, "reads no images at frames of a video")
    if request.image is not None:
        raise UnusableField("image: expected it as a guide at frame 0, next to other guides")
    shape = request.width or 0, request.height or 0, request.frames or 0
    check_guides_fit(guides, shape, video, defaults.sampling.side_multiple or SIZE_STEP)
    check_guided_part(guides, bool(node.last_step) or not node.adds_noise)


def _sound_track(read: Mapping[str, NodeValue], defaults: ModelDefaults) -> SoundTrackOf:
    """Return the size of the empty audio track of a video. Raises UnusableField, also for a track of another video."""
    samples, sound, video = read["samples"], read.get("sound"), defaults.sampling.video
    if video is None or video.sound is None or samples.shape is None or not samples.shape.frames:
        raise UnusableField("samples: expected the latent of a video of a model that samples audio with its frames")
    timing = samples.shape.frames, samples.shape.frame_rate
    if sound is None:
        return SoundTrackOf(sound_length(video.sound, *timing), video.sound.width)
    assert sound.shape is not None, "a latent of a model has a shape"
    if not sound.has_sound or (sound.shape.frames, sound.shape.frame_rate) != timing:
        found = f"{sound.shape.frames} frames at {sound.shape.frame_rate:g}" if sound.has_sound else "no audio"
        raise unusable_field("sound", found, f"the audio of {timing[0]} frames at {timing[1]:g} per second")
    return SoundTrackOf()


def settings_of(params: Any) -> tuple[tuple[str, SettingValue], ...]:
    """Return all parameters of an operation by name, sorted: numbers that are equal are written equally."""
    found = ((one.name, one.type, getattr(params, one.name)) for one in dataclasses.fields(params))
    return tuple(sorted((name, float(value) if kind == "float" else value) for name, kind, value in found))


def _at_node(node_id: str, problem: UserError) -> UserError:
    """Return an error of a node, which names it."""
    message = f"node {node_id}: {problem}"
    return UnknownName(message) if isinstance(problem, UnknownName) else reworded(problem, message)


def whole_cells(size: Size, defaults: ModelDefaults) -> tuple[int, int]:
    """Return the width and height of the largest image within `size` that a model encodes. Raises UnusableField if
    there is none."""
    step = defaults.sampling.side_multiple or max(SIZE_STEP, defaults.downscale)
    if defaults.latent is not None and defaults.latent.encoded_side:
        step = defaults.latent.encoded_side
    width, height = size.width // step * step, size.height // step * step
    if not width or not height:
        raise unusable_field("image", f"{size.width}x{size.height}", f"sides of at least {step}")
    return width, height


def check_inputs(node: Any, known: tuple[str, ...]) -> None:
    """Raise UnusableField for an input that a node does not read."""
    if unknown := sorted(set(node.inputs) - set(known)):
        raise unusable_field("inputs", ", ".join(unknown), ", ".join(known) or "none")


def _given(node: ImageNode) -> NodeValue:
    """Return an image, or a mask, of the user."""
    check_inputs(node, ())
    is_mask, source = node.kind == "mask", node.source
    task = input_image_id(source, is_mask)
    return NodeValue(MASK if is_mask else IMAGE, task, Size(source.width, source.height))


def _given_video(node: VideoNode) -> NodeValue:
    """Return the frames of a video of the user."""
    check_inputs(node, ())
    video = node.video
    assert isinstance(video, InputVideo), f"the client brings videos to the pool, found {video!r}"
    shape = OutputShape(video.width, video.height, video.frames, STILL_RATE)
    return NodeValue(IMAGE, input_frames_id(video), Size(video.width, video.height, video.frames), shape=shape)


def _given_audio(node: AudioNode) -> NodeValue:
    """Return the audio of a file of the user."""
    check_inputs(node, ())
    audio = node.audio
    assert isinstance(audio, InputAudio), f"the client brings audio to the pool, found {audio!r}"
    return NodeValue(AUDIO, input_audio_id(audio), Size(0, 0), shape=OutputShape(0, 0, seconds=audio.seconds))


def _check_videos(videos: Mapping[str, TaskVideo], frames: int | None) -> None:
    """Raise UnusableField for videos of a run of so many frames that do not fit together."""
    if not videos:
        return
    if "video" not in videos:
        raise UnusableField(f"{', '.join(videos)}: expected an input video, too")
    count = videos["video"].frames
    if "face_video" in videos and videos["face_video"].frames != count:
        found = counted(videos["face_video"].frames, "frame")
        raise unusable_field("face_video", found, f"{count} like the video")
    read = min(count, frames or count)
    if "video_mask" in videos and videos["video_mask"].frames < read:
        found = counted(videos["video_mask"].frames, "frame")
        raise unusable_field("video_mask", found, f"at least {read}, those of the video that are read")


def _latent(task: TaskId, shape: OutputShape, model: ModelRef, defaults: ModelDefaults) -> NodeValue:
    video = defaults.sampling.video
    cells = 0 if video is None else 1 + (shape.frames - 1) // video.frames_per_cell + shape.leading
    high, wide = shape.height // defaults.downscale, shape.width // defaults.downscale
    if defaults.latent is not None and defaults.latent.cells != 1:
        high, wide = defaults.latent.sides(shape.width, shape.height)
    size = Size(wide, high, cells)
    return NodeValue(LATENT, task, size, shape=shape, model=model)


def _decoded_shape(before: NodeValue, size: Size, defaults: ModelDefaults) -> OutputShape:
    """Return the shape of the output of a latent of `size`, which an operation made of the latent `before`."""
    shape, video = before.shape, defaults.sampling.video
    assert shape is not None, "a latent of a model has a shape"
    width, height = size.width * defaults.downscale, size.height * defaults.downscale
    if defaults.latent is not None and defaults.latent.cells != 1:
        width, height = (defaults.latent.pixels_of(cells) for cells in (size.width, size.height))
    found = replace(shape, width=width, height=height)
    if video is None or size.frames == before.size.frames:
        return found
    return replace(found, frames=1 + (size.frames - 1) * video.frames_per_cell, leading=0)


def _made_shape(kind: str, size: Size, timing: float) -> OutputShape | None:
    """Return the shape of an operation's result; None if it is no output."""
    if kind == AUDIO:
        return OutputShape(0, 0, seconds=timing)
    if kind != IMAGE:
        return None
    return OutputShape(size.width, size.height, size.frames, (timing or STILL_RATE) if size.frames else 0.0)


def _resized(shape: OutputShape | None, size: Size) -> OutputShape | None:
    """Return the shape of images of another size; None if nothing else is known of them."""
    return None if shape is None else replace(shape, width=size.width, height=size.height, frames=size.frames)
