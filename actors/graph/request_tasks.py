"""Adds the tasks of a request, or of one sampling run of a workflow, to the tasks of a job.

A request with the model's defaults becomes stage parameters, which become tasks. Pure functions of a request and a
catalog.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from modelpool.actors.graph.common.graph_catalog import GraphCatalog
from modelpool.actors.graph.common.input_ids import input_image_id, input_video_id
from modelpool.actors.graph.common.output_shape import output_shape_of
from modelpool.actors.graph.common.sampling_runs import (
    SamplingRun,
    StageTask,
    sampling_passes,
    start_image_task,
)
from modelpool.actors.graph.common.stage_request import StageRequest
from modelpool.actors.graph.common.task_collector import JobGraph, TaskCollector
from modelpool.actors.graph.features.control_graph import control_inputs
from modelpool.actors.graph.features.control_video_graph import control_video_task
from modelpool.actors.graph.features.decode_tiles_graph import add_decode, with_tiles
from modelpool.actors.graph.features.decoder_graph import check_decodes, decoder_params, with_own_sides
from modelpool.actors.graph.features.expert_graph import check_expert_loras, expert_lora_warnings, expert_runs
from modelpool.actors.graph.features.guide_graph import GuideRead
from modelpool.actors.graph.features.image_prompt_graph import appended_tokens, image_prompt_inputs
from modelpool.actors.graph.features.lora_graph import check_lora_texts
from modelpool.actors.graph.features.music_graph import lyrics_of, music_lengths, text_of
from modelpool.actors.graph.features.reference_graph import (
    NO_REFERENCES,
    ReferenceInputs,
    text_with_images,
)
from modelpool.actors.graph.features.sound_graph import SoundRead
from modelpool.actors.graph.features.upscale_graph import add_output_changes, enlarged_to
from modelpool.actors.graph.features.vision_graph import (
    first_frame_task,
    first_frames_task,
    image_context_lengths,
    reads_own_images,
    unread_text_warnings,
    varied_images,
    vision_images,
    with_unguided_warning,
)
from modelpool.actors.graph.sample_graph import sample_params
from modelpool.actors.request.control_video_fields import TaskVideo
from modelpool.actors.request.gpu_fields import gpus_of_work
from modelpool.actors.request.image_fields import Region
from modelpool.actors.request.lora_fields import LoraChoice
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.families.parts.text_reading import image_names
from modelpool.pool.inference.sampling.sampler_names import OWN_STEPS
from modelpool.pool.values.core.errors import UnusableField, counted, unusable_field
from modelpool.pool.values.core.lora_texts import NEGATIVE as NEGATIVE_TEXT
from modelpool.pool.values.core.lora_texts import PROMPT, acts_for, region_text
from modelpool.pool.values.core.refs import loras_of_text, unread_text_strengths
from modelpool.pool.values.core.sample_conditions import condition_inputs
from modelpool.pool.values.core.sampling_facts import VisionEncoderUse
from modelpool.pool.values.core.stage_params import (
    CameraCondition,
    ControlVideoCondition,
    DecodeParams,
    EncodeImageParams,
    EncodeParams,
    FaceCondition,
    GligenRef,
    ImageCondition,
    KeptSoundCondition,
    LoraRef,
    MaskCondition,
    ModelRef,
    OutputShape,
    PriorCondition,
    SampleParams,
    StartCondition,
    StepPart,
    TracksCondition,
    VisionEncodeParams,
)
from modelpool.pool.values.core.task_inputs import (
    BOX,
    CONTROL_VIDEO,
    FACE_VIDEO,
    GUIDE,
    IMAGE,
    IMAGE_EMBEDS,
    LATENT,
    LYRICS,
    MASK,
    MASKED_IMAGE,
    NEGATIVE,
    POSITIVE,
    PRIOR,
    REFERENCE,
    REGION,
    REGION_MASK,
    SAMPLER_STATE,
    SOUND,
    START,
    VOICE,
    WITHOUT_IMAGES,
    numbered,
)
from modelpool.pool.values.core.written_tokens import WrittenTokens
from modelpool.pool.values.specs.spec import JobId, Role, Stage, TaskId
from modelpool.pool.values.specs.wire_value import evolve


@dataclass(frozen=True, slots=True)
class ReadFromNodes:
    """What a sampling run of a workflow reads from other nodes, in the place of what its request has.

    texts       encoded texts, each with its number of tokens, by `POSITIVE` and `NEGATIVE`
    start       the start latent, to which noise is added
    mask        where the latent is regenerated
    first_step  steps of the schedule that are left out
    part        of the steps; None: all from `first_step` on
    video_stops  nothing follows the last frame of a video that is followed
    first_frames  the frames that a video begins with, if they are several
    guides      images and frames that guide a video
    camera      of a video, for a model that reads its path
    tracks      of points through a video
    gligen      a GLIGEN model, and its boxes: the text of each, with left, top, right and bottom in pixels
    of_prompt, nested  as in `GuidanceParams`
    prior       the latent of the first model of two, for the second one
    sound       the audio of a video that is kept: a latent with it, or audio that is encoded
    voice       audio with the voice that the audio of a video has
    """

    texts: Mapping[str, tuple[TaskId, int]]
    start: TaskId | None = None
    mask: TaskId | None = None
    first_step: int = 0
    part: StepPart | None = None
    video_stops: bool = False
    first_frames: TaskVideo | None = None
    guides: tuple[GuideRead, ...] = ()
    camera: CameraCondition | None = None
    tracks: TracksCondition | None = None
    gligen: GligenRef | None = None
    boxes: tuple[tuple[TaskId, tuple[int, int, int, int]], ...] = ()
    of_prompt: bool = False
    nested: bool = False
    prior: tuple[TaskId, PriorCondition] | None = None
    sound: SoundRead | None = None
    voice: SoundRead | None = None


class RequestTasks:
    """Builds the tasks of one stage of a request and of everything that it depends on."""

    def __init__(
        self,
        catalog: GraphCatalog,
        stage: StageRequest,
        tasks: TaskCollector | None = None,
        read: ReadFromNodes | None = None,
    ) -> None:
        """Tasks are added to `tasks`, by default to none of others. `read`: it is one sampling run of a workflow."""
        self._catalog = catalog
        self._stage = stage
        self._request = stage.request
        self._model = catalog.find_model(stage.request.model)
        self._defaults = catalog.model_defaults(self._model)
        if read is not None:
            self._defaults = with_own_sides(self._defaults)
        self._facts = self._defaults.sampling
        self._passes = sampling_passes(self._request, self._model, self._defaults)
        size, self._gpus = stage.request.batch, gpus_of_work(stage.request.gpus)
        self._tasks = TaskCollector(catalog, size if isinstance(size, int) else 1) if tasks is None else tasks
        self._read = read
        self.warnings: dict[str, None] = {}
        #: LoRAs of the request that have an effect, for any component
        self.loras: tuple[LoraRef, ...] = ()

    def build(self, job_id: JobId, given: frozenset[TaskId] = frozenset()) -> JobGraph:
        """Return the tasks of the stage, except those in `given`. Raises UserError."""
        match self._stage.stage:
            case Stage.ENCODE:
                wanted, _ = self._encode(self._request, self._named(self._request.prompt))
            case Stage.SAMPLE:
                wanted, _ = self._sample(self._passes[-1])
            case Stage.DECODE:
                wanted = self._decode()
        graph = self._tasks.job(job_id, wanted, given, tuple(self.warnings))
        return with_unguided_warning(graph, self._model, self._facts, self._stage.negative_prompt)

    def encoded(self, is_negative: bool = False, pooled: bool = False) -> tuple[TaskId, int]:
        """Add the encoding of the prompt of the request, or of its negative prompt, also with its pooled state; return
        the task, and the number of tokens. Raises UserError."""
        if is_negative:
            text = self._named(self._request.negative, 0, "negative")
            return self._encode(self._request, text, is_negative=True, name=NEGATIVE_TEXT, pooled=pooled)
        return self._encode(self._request, self._named(self._request.prompt), pooled=pooled)

    def sampled(self) -> tuple[TaskId, SampleParams]:
        """Add the sampling run of a workflow; return its task and its work. Raises UserError."""
        assert self._read is not None, "a request is built as a whole"
        run = replace(
            self._passes[0],
            first_step=self._read.first_step,
            is_second=self._read.start is not None,
            reads_prior=self._read.prior is not None,
        )
        if self._read.start is None and self._request.image is not None:
            run = replace(run, first_step=self._read.first_step or self._passes[0].first_step)
        if self._read.part is not None and self._facts.low_noise is not None:
            raise unusable_field("last_step", self._read.part.last_step, "0 for a model with two experts")
        return self._sample(run)

    def _add(self, task: StageTask) -> TaskId:
        return self._tasks.add(task.work, task.needs)

    def _encode(
        self,
        request: GenerateRequest,
        text: str,
        references: ReferenceInputs = NO_REFERENCES,
        embeds: Sequence[TaskId] = (),
        is_negative: bool = False,
        name: str = PROMPT,
        writes: WrittenTokens | None = None,
        is_lyrics: bool = False,
        pooled: bool = False,
    ) -> tuple[TaskId, int]:
        """Add the encoding of a text, or of lyrics, by the model of `request` with its LoRAs that act for the text of
        this name, and with image embeddings where the text encoder reads images. Return the task, and the number of
        tokens that the diffusion model reads. `writes` are the tokens of the image that the text encoder writes for the
        text; `pooled` as in `EncodeParams`."""
        catalog = self._catalog
        model = self._model if request.model == self._request.model else catalog.find_model(request.model)
        roles = tuple(role for role in catalog.components(model) if role.is_text_encoder)
        if not roles:
            raise unusable_field("model", request.model, "a model that reads prompts")
        loras = self._loras(request, model, roles, name)
        if is_negative:
            is_negative = catalog.model_defaults(model).sampling.words_negative
        text = text if is_lyrics else text_of(request, text, self._facts, self._request)
        named = () if is_lyrics else catalog.embeddings.of(text, self._files_of_loras(request))
        how = (references.seen, references.numbered, writes, is_lyrics, pooled)
        work = EncodeParams(model, loras, text, request.clip_skip, is_negative, named, *how)
        tokenized = catalog.tokenize(work)
        if tokenized.cut:
            label = "lyrics" if is_lyrics else name
            unread = counted(tokenized.cut, "token at its end is not read", "tokens at its end are not read")
            self.warnings[f"{label}: {unread} by a text encoder of model {model.name!r}: it is too long"] = None
        size = self._tasks.text_batch(work, tokenized.is_usual)
        work = replace(work, tokens=tokenized.tokens, batch_size=size)
        task = self._tasks.add(work, _numbered(IMAGE, embeds))
        return task, tokenized.length

    def _texts(
        self,
        work: SampleParams,
        regions: Sequence[Region] = (),
        references: ReferenceInputs = NO_REFERENCES,
    ) -> dict[str, tuple[TaskId, int]]:
        """Add the encoding of the texts that `work` reads: the prompt, the negative prompt, and the prompts of
        `regions`. Return them by name; none for a model that reads only images.

        Where texts name reference images, these alone are the negative text, and the negative prompt is the text of
        the prediction without an image."""
        if not self._facts.reads_text:
            return {}
        embeds = [self._add(each) for each in references.embeds]
        request, positive, negative = self._request, self._stage.positive_request, self._stage.negative
        image_embeds = embeds or self._image_embeds(is_model_input=False)
        named_images = len(request.references) if self._facts.names_images else 0
        writes = None
        # inputs of the negative prompt
        negative_references, negative_embeds, negative_image_embeds = references, embeds, image_embeds
        if self._facts.writes_tokens:
            writes = WrittenTokens(work.shape.width, work.shape.height, work.seed)
            # without an image to write, no reference images are read
            negative_references, negative_embeds, negative_image_embeds = NO_REFERENCES, [], []
        prompt = self._named(positive.prompt)
        given = {} if self._read is None else dict(self._read.texts)
        texts = {
            POSITIVE: given.pop(POSITIVE, None)
            or self._encode(positive, prompt, references, image_embeds, writes=writes)
        }
        if self._facts.reads_lyrics:
            texts[LYRICS] = self._encode(positive, lyrics_of(positive), is_lyrics=True)
        unguided = (NEGATIVE,) if work.reads_negative and not self._facts.learned_negative else ()
        if work.reads_negative and named_images:
            images = image_names(named_images)
            texts[NEGATIVE] = self._encode(request, images, references, is_negative=True, name=NEGATIVE_TEXT)
            unguided = (WITHOUT_IMAGES,) if work.guidance.without_image else ()
            usual = "" if self._facts.defaults is None else self._facts.defaults.negative
            if not unguided and self._stage.negative_prompt not in ("", usual):
                reason = f"model {self._model.name!r} reads it with image_cfg above 1 only, as it has references"
                self.warnings[f"negative: ignored, {reason}"] = None
        if work.guidance.of_prompt and work.guidance.without_image:
            texts[WITHOUT_IMAGES] = texts[POSITIVE]
        for name in unguided:
            if name in given:
                texts[name] = given[name]
                continue
            if negative is not None:
                text = self._named(negative.prompt, 0)
                texts[name] = self._encode(negative, text, negative_references, negative_image_embeds)
                continue
            embedded = negative_embeds or self._image_embeds(is_model_input=False, is_negative=True)
            text = self._named(request.negative, 0, "negative")
            texts[name] = self._encode(request, text, negative_references, embedded, True, NEGATIVE_TEXT)
        for number, region in enumerate(regions):
            text, name = self._named(region.prompt), region_text(number)
            encoded = self._encode(request, text, references, image_embeds, name=name, writes=writes)
            texts[numbered(REGION, number)] = encoded
        for number in range(len(regions), len(work.regions)):  # `EMPTY_TEXT`
            texts[numbered(REGION, number)] = self._encode(request, "", references, image_embeds)
        return texts

    def _named(self, text: str, count: int | None = None, field: str = "prompt") -> str:
        """Return `text` with the names of `count` reference images, by default all, for models that read names."""
        if not self._facts.names_images:
            return text
        return text_with_images(text, len(self._request.references) if count is None else count, field)

    def _sample(self, one_pass: SamplingRun) -> tuple[TaskId, SampleParams]:
        """Add the sampling of one pass; return the last task and its work."""
        runs = expert_runs(one_pass)
        if self._facts.low_noise is not None:
            self.warnings |= dict.fromkeys(expert_lora_warnings(runs))
        *before, last = runs
        resumed: dict[str, TaskId] = {}
        for run in before:
            resumed = {SAMPLER_STATE: self._sample_run(run, resumed)[0]}
        return self._sample_run(last, resumed)

    def _sample_run(self, run: SamplingRun, resumed: Mapping[str, TaskId]) -> tuple[TaskId, SampleParams]:
        """Add one sampling run, which resumes from the task in `resumed` if there is one."""
        loras = self._loras(self._request, self._model, (run.role,))
        work, references = sample_params(run, loras, self._catalog)
        if self._read is not None:
            work = _as_read(work, self._read, self._model)
            self.warnings |= dict.fromkeys(_box_warnings(work))
        check_lora_texts(self._request.loras, work)
        guided = work.reads_negative
        texts_set = self._stage.positive_request.prompt, self._stage.negative_prompt
        self.warnings |= dict.fromkeys(unread_text_warnings(run, *texts_set, guided))
        started = self._start_inputs(run, work)
        texts = self._texts(work, self._request.regions, references)
        needs = {name: task for name, (task, _) in texts.items()} | started
        if work.has(ControlVideoCondition):
            stops = self._read is not None and self._read.video_stops
            control = control_video_task(self._request, self._model, work.shape, self._facts, stops)
            needs[CONTROL_VIDEO] = self._add(control)
        if work.has(FaceCondition):
            needs[FACE_VIDEO] = input_video_id(self._request.face_video)
        for embeds in self._image_embeds():
            needs[IMAGE_EMBEDS] = embeds
        needs |= _numbered(BOX, [] if self._read is None else [text for text, _ in self._read.boxes])
        needs |= _numbered(REFERENCE, [self._add(each) for each in references.encodes])
        for number, region in enumerate(self._request.regions):
            if region.mask is not None:
                needs[numbered(REGION_MASK, number)] = input_image_id(region.mask, is_mask=True)
        for name, hint in control_inputs(run, work.controls):
            needs[name] = self._add(hint) if isinstance(hint, StageTask) else hint
        if work.image_prompts:
            for name, states in image_prompt_inputs(self._request, self._catalog.image_prompts):
                needs[name] = self._add(states) if isinstance(states, StageTask) else states
            if tokens := appended_tokens(work.image_prompts):
                task, length = texts[POSITIVE]
                texts[POSITIVE] = (task, length + tokens)
        missing = set(condition_inputs(work.conditions)) - needs.keys()
        assert not missing, f"{work} reads {sorted(missing)}, which nothing provides"
        lengths = image_context_lengths(self._facts, guided) or [length for _, length in texts.values()]
        lengths = music_lengths(lengths) if self._facts.reads_lyrics else lengths
        return self._tasks.add(work, {**needs, **resumed}, lengths, self._gpus), work

    def _start_inputs(self, run: SamplingRun, work: SampleParams) -> dict[str, TaskId]:
        """Add what sampling starts from; return the tasks and inputs by name."""
        request, found = self._request, dict[str, TaskId]()
        read = self._read
        if read is not None and read.mask is not None:
            found[MASK] = read.mask
        if read is not None and read.prior is not None:
            found[PRIOR] = read.prior[0]
        for name, heard in () if read is None else ((SOUND, read.sound), (VOICE, read.voice)):
            if heard is not None:
                found[name] = heard.source if heard.encodes is None else self._tasks.add(heard.encodes, heard.needs)
        for number, guide in enumerate(() if read is None else read.guides):
            found[numbered(GUIDE, number)] = self._tasks.add(*guide.encoded(self._model, work.shape))
        if work.image is not None:
            found[IMAGE] = self._first_image(run, work)
        elif read is not None and read.start is not None:
            found[START] = read.start
        elif work.has(StartCondition):
            found[START] = self._first_pass(run) if run.is_second else self._add(start_image_task(run))
        if request.mask is not None:
            found[MASK] = input_image_id(request.mask, is_mask=True)
            if self._facts.inpaints:
                found[MASKED_IMAGE] = self._add(start_image_task(run, is_masked=True))
        return found

    def _first_image(self, run: SamplingRun, work: SampleParams) -> TaskId:
        """Add the image that the model of `work` reads."""
        if self._facts.image_concat is not None and self._facts.image_concat.is_pixels:
            return input_image_id(self._request.image)
        begins = None if self._facts.video is None else self._facts.video.begins
        if self._read is not None and self._read.first_frames is not None:
            return self._add(first_frames_task(run, begins, work.shape.frames, self._read.first_frames))
        return self._add(first_frame_task(run, begins, work.shape.frames, work.image_numbers.image_noise))

    def _first_pass(self, run: SamplingRun) -> TaskId:
        """Add the first pass, from which `run` starts: its latent, or the latent of its image."""
        need, work = self._sample(self._passes[0])
        assert self._request.hires is not None, "a second pass is that of hires"
        if self._request.hires.via == "latent":
            return need
        pixels = self._add_decode(_decode_params(self._model, work), {LATENT: need})
        size = run.size(run.scale)
        if self._request.hires.upscaler is not None:
            upscaler = self._catalog.upscalers.find(self._request.hires.upscaler)
            enlarged = enlarged_to(upscaler, (work.shape.width, work.shape.height), size)
            pixels = self._tasks.add(enlarged, {IMAGE: pixels})
        return self._tasks.add(EncodeImageParams(self._model, *size), {IMAGE: pixels})

    def _image_embeds(self, is_model_input: bool = True, is_negative: bool = False) -> list[TaskId]:
        """Add the embeddings of the images that the vision encoder reads, if the model (`is_model_input`), or else its
        text encoder, reads them; of no image for a negative prompt."""
        vision_use, video = self._facts.vision_use, self._facts.video
        if is_model_input and reads_own_images(self._request, self._model.name, self._facts):
            encoder = self._catalog.image_prompts.encoder_for(self._model, self._request.image_prompts[0].encoder)
            seen = varied_images(self._request, self._facts)
            use = VisionEncoderUse.CENTER_PROJECTED.value
            return [self._tasks.add(VisionEncodeParams(encoder, len(seen), use=use), _numbered(IMAGE, seen))]
        if vision_use is None or vision_use.is_model_input is not is_model_input:
            return []
        if self._facts.image_labels is not None:
            varied = varied_images(self._request, self._facts)
            return [self._tasks.add(VisionEncodeParams(self._model, len(varied)), _numbered(IMAGE, varied))]
        images = () if is_negative else vision_images(self._request)
        work = VisionEncodeParams(self._model, 1 if video is None else video.images_encoded)
        return [self._tasks.add(work, _numbered(IMAGE, images))]

    def _decode(self) -> TaskId:
        stage, catalog = self._stage, self._catalog
        if stage.latent is not None:
            check_decodes(self._model.name, self._facts)
            shape = output_shape_of(stage.latent.cells, self._model.name, self._defaults)
            return self._decoded(DecodeParams(self._model, shape), {LATENT: stage.latent.task_id})
        model = catalog.find_model(stage.vae_model) if stage.vae_model else self._model
        need, sample = self._sample(self._passes[-1])
        if self._facts.is_prior_stage:
            need, sample = self._second_stage(need, sample)
            model = sample.model
        pastes = self._request.mask is not None and self._request.paste
        needs = {LATENT: need}
        if pastes:
            needs |= {
                IMAGE: input_image_id(self._request.image),
                MASK: input_image_id(self._request.mask, is_mask=True),
            }
        return self._decoded(_decode_params(model, sample, pastes), needs)

    def _decoded(self, work: DecodeParams, needs: Mapping[str, TaskId]) -> TaskId:
        """Add the decoding of the output, and what changes it afterwards."""
        decoded = self._add_decode(work, needs)
        return add_output_changes(self._tasks, self._request, self._catalog, decoded, work.shape)

    def _add_decode(self, work: DecodeParams, needs: Mapping[str, TaskId]) -> TaskId:
        """Add a decode with the tiles of the request."""
        model = self._catalog.model_defaults(work.model)
        return add_decode(self._tasks, with_tiles(work, self._request, self._facts), needs, model)

    def _second_stage(self, prior: TaskId, work: SampleParams) -> tuple[TaskId, SampleParams]:
        """Add the sampling of the decoder of a two-stage model, on the result of `prior`, which did `work`."""
        decoder = self._request.decoder
        name = "" if self._stage.vae_model == self._request.model else self._stage.vae_model
        model = self._catalog.find_decoder(self._model, name if decoder is None else decoder.model or name)
        second = decoder_params(model, work, decoder, self._catalog.model_defaults(model).sampling)
        texts = self._texts(second)
        needs = {**{name: task for name, (task, _) in texts.items()}, PRIOR: prior}
        return self._tasks.add(second, needs, [length for _, length in texts.values()], self._gpus), second

    def _loras(
        self, request: GenerateRequest, model: ModelRef, roles: Sequence[Role], text: str = ""
    ) -> tuple[LoraRef, ...]:
        """Return the LoRAs of `request` that change one of these components of `model`; for text encoders those that
        act for the text of this name."""
        check_expert_loras(request.loras, model.name, self._catalog.model_defaults(model).sampling)
        found = self._files_of_loras(request)
        if request is self._request:
            self.loras = found
        for lora in found:
            problem = self._catalog.lora_warning(model, lora)
            if problem is not None:
                self.warnings[f"LoRA {lora.name!r} on model {model.name!r}: {problem}"] = None
        if roles[0].is_text_encoder:
            acting = [each for each in found if acts_for(each.only, text)]
            for lora in unread_text_strengths(acting):
                problem = f"its strength {lora.text_strength:g} on the text encoders is not used: this use begins at"
                reason = (
                    f"{lora.start:g} of the schedule, after another one, and texts are encoded before the first step"
                )
                self.warnings[f"LoRA {lora.name!r}: {problem} {reason}"] = None
            applied = loras_of_text(acting)
        else:
            applied = [each.for_diffusion_model() for each in found]
        return tuple(lora for lora in applied if any(self._catalog.touches(model, role, lora) for role in roles))

    def _files_of_loras(self, request: GenerateRequest) -> tuple[LoraRef, ...]:
        """Return the LoRAs of `request` that have an effect, with all their strengths, and the models that are merged
        with its model. Raises UserError."""
        chosen = (lora for lora in request.loras if lora.has_effect)
        return tuple(each.applied(self._file_of(each)) for each in chosen)

    def _file_of(self, choice: LoraChoice) -> LoraRef:
        if not choice.merge:
            return self._catalog.find_lora(choice.name, choice.strength)
        model = self._catalog.find_model(choice.name)
        if model.assembly is not None:
            raise unusable_field("loras.name", choice.name, "a model of one file or folder, which can be merged")
        return LoraRef(model.name, model.path, model.sha256, choice.strength, files=model.files)


def _as_read(work: SampleParams, read: ReadFromNodes, model: ModelRef) -> SampleParams:
    """Return the work of a sampling run with what it reads from other nodes. Raises UnusableField."""
    schedule = work.schedule
    if schedule.sampler in OWN_STEPS and read.part is not None:
        expected = f"0, with noise added and none kept: sampler {schedule.sampler} places its own steps"
        raise unusable_field("last_step", read.part.last_step, expected)
    if read.first_step > schedule.steps:
        raise unusable_field("first_step", read.first_step, f"up to the number of steps, {schedule.steps}")
    if read.mask is not None:
        if read.start is None:
            raise UnusableField(f"mask: model {model.name!r} has no start latent that it could keep a part of")
        work = replace(work, conditions=(*work.conditions, MaskCondition()))
    if read.first_frames is not None:
        count = min(read.first_frames.frames, work.shape.frames)
        conditions = (replace(one, frames=count) if isinstance(one, ImageCondition) else one for one in work.conditions)
        work = replace(work, conditions=tuple(conditions))
    if read.guides:
        guides = tuple(guide.condition for guide in read.guides)
        leading = sum(guide.leading for guide in guides)
        shape = replace(work.shape, leading=work.shape.leading + leading)
        work = replace(work, shape=shape, conditions=(*work.conditions, *guides))
    if read.prior is not None:
        work = replace(work, conditions=(*work.conditions, read.prior[1]))
    if read.camera is not None:
        work = replace(work, conditions=(*work.conditions, read.camera))
    if read.tracks is not None:
        work = replace(work, conditions=(*work.conditions, read.tracks))
    if read.sound is not None:
        work = replace(work, conditions=(*work.conditions, KeptSoundCondition()))
    if read.voice is not None and read.voice.voice is not None:
        work = replace(work, conditions=(*work.conditions, read.voice.voice))
    guidance = replace(work.guidance, of_prompt=read.of_prompt, nested=read.nested)
    if guidance.without_image:
        work = replace(work, guidance=guidance)
    elif read.of_prompt or read.nested:
        name = "prompt_without_image" if read.of_prompt else "nested"
        raise UnusableField(
            f"{name}: found it in a run without guidance by an image: it needs image_cfg and cfg, not 1"
        )
    if read.gligen is not None:
        gligen = replace(read.gligen, boxes=tuple(_shares(box, work.shape) for _, box in read.boxes))
        work = replace(work, conditions=(*work.conditions, gligen))
    part = read.part
    if part is not None and 0 < part.last_step <= read.first_step:
        raise unusable_field("last_step", part.last_step, f"more than the first step, {read.first_step}")
    if part is not None and part.last_step >= schedule.steps:
        part = replace(part, last_step=0, keeps_noise=False)
    return evolve(work, part=None if part == StepPart() else part)


def _shares(box: tuple[int, int, int, int], shape: OutputShape) -> tuple[float, float, float, float]:
    left, top, right, bottom = box
    return left / shape.width, top / shape.height, right / shape.width, bottom / shape.height


def _box_warnings(work: SampleParams) -> Iterator[str]:
    """Yield warnings about boxes beyond the image. Raises UnusableField for texts in boxes next to an option with which
    they do not act."""
    if work.gligen is None:
        return
    for number, box in enumerate(work.gligen.boxes):
        if max(box) > 1:
            yield (f"gligen.boxes.{number}: it ends beyond the image of {work.shape.width}x{work.shape.height} pixels: "
                   "models were trained with boxes inside of images")  # fmt: skip
    options = work.options
    if options.tiled is not None:
        raise UnusableField("gligen: found together with options.tiled, expected one: boxes are of the whole image")
    if options.perp_neg is not None:
        expected = "expected one of them: the empty text of perp_neg would read the boxes"
        raise UnusableField(f"gligen: found together with options.perp_neg, {expected}")


def _decode_params(model: ModelRef, sample: SampleParams, pastes: bool = False) -> DecodeParams:
    return DecodeParams(model, evolve(sample.shape, leading=sample.leading_kept), pastes)


def _numbered(name: str, tasks: Sequence[TaskId]) -> dict[str, TaskId]:
    """Return several inputs of a kind by name."""
    return {numbered(name, number): task for number, task in enumerate(tasks)}
