"""Builds the task graph of a request: pure functions of an order and a catalog.

Equal work gets equal task ids, for all users, so it runs once. A LoRA is part of the work of only those stages whose
weights it changes, so the other stages are shared with jobs that do not use it. Knows neither workers nor queues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from types import MappingProxyType
from typing import TypeAlias

from modelpool.actors.graph import decoder_graph as decoder_graph
from modelpool.actors.graph import vision_graph as vision_graph
from modelpool.actors.graph.control_graph import control_inputs, control_refs
from modelpool.actors.graph.control_video_graph import leading_cells, video_read, with_video_size
from modelpool.actors.graph.expert_graph import (
    SINGLE_MODEL,
    ExpertRun,
    check_expert_loras,
    expert_lora_warnings,
    expert_runs,
    with_expert_defaults,
)
from modelpool.actors.graph.graph_catalog import GraphCatalog
from modelpool.actors.graph.graph_recipe import recipe_of
from modelpool.actors.graph.image_concat_graph import (
    image_concat_input,
    input_image_task,
    with_image_size,
    with_reference_size,
)
from modelpool.actors.graph.model_defaults import resolve_guidance, resolve_schedule, with_model_defaults
from modelpool.actors.graph.orders import (
    DecodeOrder,
    EncodeImageOrder,
    EncodeOrder,
    InputLatent,
    InputRef,
    Order,
    SampleOrder,
    order_for,
)
from modelpool.actors.graph.output_shape import duration_of, format_of, output_shape_of, size_of
from modelpool.actors.graph.recipe import Recipe
from modelpool.actors.graph.reference_graph import (
    NO_REFERENCES,
    ReferenceInputs,
    edit_model_warnings,
    read_references,
    with_reference_mode,
)
from modelpool.actors.graph.region_graph import region_work
from modelpool.actors.graph.request_checks import check_request
from modelpool.actors.graph.video_output_graph import first_frame_mode
from modelpool.actors.request.field_errors import missing_field
from modelpool.actors.request.requests import GenerateRequest, LoraChoice
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.core.sample_conditions import condition_inputs
from modelpool.pool.core.sampling_facts import ImageConcat, SamplingFacts
from modelpool.pool.core.stage_params import (
    ControlVideoCondition,
    DecodeParams,
    EncodeImageParams,
    EncodeParams,
    GuidanceParams,
    ImageCondition,
    LoraRef,
    MaskCondition,
    MaskedImageCondition,
    ModelRef,
    OutputShape,
    ReferenceCondition,
    SampleCondition,
    SampleParams,
    SamplingSchedule,
    StageParams,
    StartCondition,
    VisionEncodeParams,
    batch_key,
    stage_of,
    task_id,
)
from modelpool.pool.core.task_inputs import (
    CONTROL_VIDEO,
    IMAGE,
    IMAGE_EMBEDS,
    LAST_IMAGE,
    LATENT,
    MASK,
    MASKED_IMAGE,
    PRIOR,
    REFERENCE,
    REGION_MASK,
    SAMPLER_STATE,
    START,
    numbered,
)
from modelpool.pool.families.control_video import takes_control_video
from modelpool.pool.specs.spec import ComponentKey, ComponentSpec, ComponentUse, JobId, JobSpec, Role, TaskId, TaskSpec

#: the components that one kind of work uses
Roles: TypeAlias = tuple[Role, ...]


@dataclass(frozen=True, slots=True)
class JobGraph:
    """A job for the core, the work of each of its tasks, and the sizes of the components that they name.

    warnings      messages for the user
    fingerprints  of the files of components (`pool.loading.file_fingerprint`), as far as they could be read
    """

    job: JobSpec
    works: Mapping[TaskId, StageParams]
    components: tuple[ComponentSpec, ...]
    warnings: tuple[str, ...] = ()
    fingerprints: Mapping[ComponentKey, str] = field(default_factory=dict)


def build_graph(request: GenerateRequest, job_id: JobId, catalog: GraphCatalog) -> tuple[Recipe, JobGraph]:
    """Build the recipe (without versions) and the task graph of `request`, whose seed must be set; fields left out get
    the model's defaults. Raises UserError."""
    model = catalog.find_model(request.model)
    model_defaults = catalog.model_defaults(model)
    facts = model_defaults.sampling
    check_request(request, facts)
    request = with_model_defaults(with_expert_defaults(request, facts), facts.defaults)
    request = with_video_size(with_image_size(request, facts), facts)
    request = with_reference_mode(with_reference_size(request, model_defaults), facts, model)
    order = order_for(request, facts.rounds_steps_up)
    builder = _GraphBuilder(catalog)
    builder.warnings |= dict.fromkeys(edit_model_warnings(request, facts, model))
    wanted = builder.task_for(order)
    sample = next(work for work in builder.works.values() if isinstance(work, SampleParams))
    loras = tuple(_found_lora(catalog, lora) for lora in request.loras if lora.strength != 0)
    written_as = format_of(request.format, request.model, facts)
    recipe = recipe_of(
        request, sample, loras, written_as, tuple(builder.warnings), builder.embeddings(), builder.second
    )
    return recipe, builder.build_job(job_id, wanted)


def _found_lora(catalog: GraphCatalog, choice: LoraChoice) -> LoraRef:
    return replace(catalog.find_lora(choice.name, choice.strength), noise=choice.noise)


def build_stage_graph(
    order: Order, job_id: JobId, catalog: GraphCatalog, given: frozenset[TaskId] = frozenset()
) -> JobGraph:
    """Build the task graph of `order`; tasks in `given`, whose results exist, are left out. Raises UserError."""
    builder = _GraphBuilder(catalog)
    return builder.build_job(job_id, builder.task_for(order), given)


class _GraphBuilder:
    """Collects the tasks of one job, each after the tasks that it needs."""

    def __init__(self, catalog: GraphCatalog) -> None:
        self._catalog = catalog
        self._tasks: dict[TaskId, TaskSpec] = {}
        self._components: dict[ComponentKey, ComponentSpec] = {}
        self.works: dict[TaskId, StageParams] = {}
        self.warnings: dict[str, None] = {}
        #: work of the decoder of a two-stage model
        self.second: SampleParams | None = None

    def build_job(self, job_id: JobId, wanted: TaskId, given: frozenset[TaskId] = frozenset()) -> JobGraph:
        """Return the tasks that `wanted` depends on, except those in `given` and those that the driver provides."""
        needed: set[TaskId] = set()
        inputs: dict[TaskId, None] = {}
        reached = [wanted]
        while reached:
            task_id = reached.pop()
            needed.add(task_id)
            for need in self._tasks[task_id].needs:
                if need in given or need not in self._tasks:
                    inputs[need] = None
                else:
                    reached.append(need)
        tasks = tuple(task for task in self._tasks.values() if task.task_id in needed)
        keys = (key for task in tasks for use in task.uses for key in (use.component, *use.adapters))
        components = {key: self._components[key] for key in keys}
        works = {task.task_id: self.works[task.task_id] for task in tasks}
        job = JobSpec(job_id, tasks, wanted, tuple(inputs))
        return JobGraph(job, MappingProxyType(works), tuple(components.values()), tuple(self.warnings))

    def embeddings(self) -> tuple[tuple[str, str], ...]:
        """Return the name and the SHA-256 of each textual inversion that the texts name."""
        texts = (work for work in self.works.values() if isinstance(work, EncodeParams))
        return tuple(sorted({(each.name, each.sha256) for work in texts for each in work.embeddings}))

    def task_for(self, order: Order) -> TaskId:
        match order:
            case EncodeOrder():
                return self._encode(order)
            case EncodeImageOrder():
                return self._encode_image(order)
            case SampleOrder():
                return self._sample(order)[0]
            case DecodeOrder():
                return self._decode(order)

    def _encode(
        self, order: EncodeOrder, embeds: Sequence[TaskId] = (), references: ReferenceInputs = NO_REFERENCES
    ) -> TaskId:
        """Add the encoding of a text, with image embeddings where the text encoder reads images."""
        model = self._catalog.find_model(order.model)
        roles = tuple(role for role in self._catalog.components(model) if role.is_text_encoder)
        if not roles:
            raise unusable_field("model", order.model, "a model that reads prompts")
        loras = self._loras(model, roles, order.loras)
        words_negative = order.is_negative and self._catalog.model_defaults(model).sampling.words_negative
        named = self._catalog.embeddings.of(order.text)
        text = order.text, order.layers_skipped, words_negative, named
        work = EncodeParams(model, loras, *text, references.seen, references.numbered)
        return self._add(work, roles, loras, _numbered(IMAGE, embeds))

    def _sample(self, order: SampleOrder) -> tuple[TaskId, SampleParams]:
        model = self._catalog.find_model(order.model)
        facts = self._catalog.model_defaults(model).sampling
        if facts.low_noise is None:
            return self._sample_expert(order, model)
        frames = duration_of(order, model.name, facts).frames
        parts = tuple(expert_runs(order, facts, self._size(model, order), frames))
        self.warnings |= dict.fromkeys(expert_lora_warnings(order, [expert for _, expert in parts]))
        made: list[tuple[TaskId, SampleParams]] = []
        for one, expert in parts:
            before = {SAMPLER_STATE: made[-1][0]} if made else {}
            made.append(self._sample_expert(one, model, expert, before))
        return made[-1]

    def _sample_expert(
        self,
        order: SampleOrder,
        model: ModelRef,
        expert: ExpertRun = SINGLE_MODEL,
        before: Mapping[str, TaskId] = MappingProxyType({}),
    ) -> tuple[TaskId, SampleParams]:
        """Add the sampling of `order` by one expert, after the tasks in `before`; or by the only diffusion model."""
        roles = (expert.role,)
        loras = self._loras(model, roles, order.loras)
        facts = self._catalog.model_defaults(model).sampling
        if facts.is_decoder_stage:
            expected = "a model that starts from noise; this one reads the latent of another model"
            raise unusable_field("model", order.model, expected)
        concat = image_concat_input(order, model.name, facts)
        width, height = (side * concat.enlarges for side in self._size(model, order))
        whole = self._size(model, replace(order, scale=1.0))
        sampler, schedule = resolve_schedule(facts.defaults, order.sampler, order.schedule)
        cfg, guidance = resolve_guidance(facts.defaults, order.cfg)
        numbers = vision_graph.video_conditioning(order, facts)
        self.warnings |= dict.fromkeys(vision_graph.unread_text_warnings(order, model.name, facts, cfg))
        duration, first_frame = duration_of(order, model.name, facts), first_frame_mode(order, model.name, facts)
        first_frame_order = vision_graph.first_frame_order(order, first_frame, duration.frames, numbers.image_noise)
        inputs, reads_mask = self._start_inputs(model, order, first_frame_order)
        imaged = first_frame is not None or concat.is_shown
        references = read_references(order, facts, whole)
        has_start = order.start is not None and not imaged and not (reads_mask and order.first_step == 0)
        image = ImageCondition(
            concat.noise_level, numbers.image_noise, numbers.motion, numbers.elevation, order.last is not None
        )
        conditions: list[SampleCondition] = [
            *([StartCondition()] if has_start else []),
            *([image] if imaged else []),
            *([MaskCondition()] if order.inpaint is not None and not reads_mask else []),
            *([MaskedImageCondition()] if reads_mask else []),
            *([ControlVideoCondition()] if takes_control_video(facts) else []),
            *(ReferenceCondition(*size) for size in references.sizes),
            *(region_work(region, whole) for region in order.regions),
            *control_refs(order, self._catalog.controls),
        ]
        work = SampleParams(
            model,
            loras,
            OutputShape(
                width, height, duration.frames, duration.frame_rate, duration.seconds, leading_cells(order, facts)
            ),
            SamplingSchedule(
                order.steps,
                sampler,
                schedule,
                0 if imaged else order.first_step,
                expert.switch,
                expert.low_noise,
            ),
            GuidanceParams(cfg, guidance, concat.image_cfg),
            order.seed,
            tuple(conditions),
        )
        needs, lengths = self._inputs_of(work, order, facts, inputs, references)
        return self._add(work, roles, loras, {**needs, **before}, work.schedule.steps_run, lengths), work

    def _inputs_of(
        self,
        work: SampleParams,
        order: SampleOrder,
        facts: SamplingFacts,
        start: Mapping[str, TaskId],
        references: ReferenceInputs,
    ) -> tuple[dict[str, TaskId], tuple[int, ...]]:
        """Add the inputs of `work`, which starts from `start`; return them by name, and the lengths of its texts."""
        model, texts = work.model, vision_graph.texts_read(order, facts, work.guidance.cfg)
        vision_inputs = vision_graph.vision_inputs(order, facts)
        embeds = tuple(
            self._add(embed, (Role.VISION_ENCODER,), (), {numbered(IMAGE, 0): image})
            for embed, image in references.vision_tasks(model)
        )
        needs: dict[str, TaskId] = {}
        for name, text in texts.items():
            read = embeds or self._image_embeds(model, facts, vision_inputs(text), is_model_input=False)
            needs[name] = self._encode(text, read, references)
        if work.image is not None or work.has(StartCondition):
            needs[START if work.image is None else IMAGE] = start[START]
        needs |= {name: task for name, task in start.items() if name in (MASK, MASKED_IMAGE)}
        if work.has(ControlVideoCondition):
            needs[CONTROL_VIDEO] = self._control_video(work, order)
        for embeds_task in self._image_embeds(model, facts, vision_inputs(None)):
            needs[IMAGE_EMBEDS] = embeds_task
        needs |= _numbered(REFERENCE, [self._encode_image(each) for each in references.orders])
        for number, region in enumerate(order.regions):
            if region.mask is not None:
                needs[numbered(REGION_MASK, number)] = region.mask.task_id
        needs |= {name: self._image(each) for name, each in control_inputs(order, work.controls)}
        missing = set(condition_inputs(work.conditions)) - needs.keys()
        assert not missing, f"{work} reads {sorted(missing)}, which nothing provides"
        seen = references.seen, references.numbered
        text_lengths = tuple(self._catalog.text_tokens(model, text.text, *seen) for text in texts.values())
        return needs, vision_graph.image_context_lengths(facts, work.guidance.cfg) or text_lengths

    def _start_inputs(
        self, model: ModelRef, order: SampleOrder, first_frame: EncodeImageOrder | None
    ) -> tuple[dict[str, TaskId], bool]:
        """Return the results that sampling starts from, by name ("start" also of an image that is not a start latent),
        and whether the model reads the inpaint mask. Raises UnusableField if an inpainting model has no mask."""
        reads_mask = self._catalog.model_defaults(model).sampling.inpaints
        if reads_mask and (order.inpaint is None or not isinstance(order.start, EncodeImageOrder)):
            reason = f"model {model.name!r} is an inpainting model and requires image and mask"
            raise missing_field("mask" if order.start is not None else "image and mask", reason)
        if order.start is None:
            return {}, reads_mask
        if self._catalog.model_defaults(model).sampling.image_concat is ImageConcat.PIXELS:
            return {START: input_image_task(order.start)}, reads_mask
        if first_frame is not None:
            return {START: self._encode_image(first_frame)}, reads_mask
        start = self.task_for(order.start)
        if order.inpaint is None:
            return {START: start}, reads_mask
        if not reads_mask:
            return {START: start, MASK: order.inpaint.mask.task_id}, reads_mask
        assert isinstance(order.start, EncodeImageOrder), "inpainting requires an image"
        hidden = self._encode_image(replace(order.start, hidden=order.inpaint.mask))
        return {START: start, MASK: order.inpaint.mask.task_id, MASKED_IMAGE: hidden}, reads_mask

    def _encode_image(self, order: EncodeImageOrder) -> TaskId:
        model = self._catalog.find_model(order.model)
        decoder_graph.check_reads_images(model.name, self._catalog.model_defaults(model).sampling)
        width, height = self._size(model, order)
        image = order.image.task_id if isinstance(order.image, InputRef) else self._decode(order.image)
        others = {MASK: order.hidden, LAST_IMAGE: order.last}
        needs = {IMAGE: image, **{name: source.task_id for name, source in others.items() if source is not None}}
        work = EncodeImageParams(
            model,
            width,
            height,
            hides=order.hidden is not None,
            frames=order.frames,
            noise=order.noise,
            seed=order.seed,
            ends=order.last is not None,
            bright=order.bright,
            black=order.black,
        )
        return self._add(work, (Role.VAE,), (), needs)

    def _image(self, order: InputRef | EncodeImageOrder) -> TaskId:
        return order.task_id if isinstance(order, InputRef) else self._encode_image(order)

    def _control_video(self, work: SampleParams, order: SampleOrder) -> TaskId:
        """Add the encoding of the control video that `work` reads."""
        encode = EncodeImageParams(
            work.model, work.shape.width, work.shape.height, frames=work.shape.frames, is_control_video=True
        )
        return self._add(encode, (Role.VAE,), (), video_read(order))

    def _image_embeds(
        self, model: ModelRef, facts: SamplingFacts, images: tuple[TaskId, ...], is_model_input: bool = True
    ) -> tuple[TaskId, ...]:
        """Add the image embeddings of `images`, if the model (`is_model_input`), or else its text encoder, reads
        them."""
        if facts.vision_use is None or facts.video is None or facts.vision_use.is_model_input is not is_model_input:
            return ()
        work = VisionEncodeParams(model, facts.video.images_encoded)
        return (self._add(work, (Role.VISION_ENCODER,), (), _numbered(IMAGE, images)),)

    def _decode(self, order: DecodeOrder) -> TaskId:
        model = self._catalog.find_model(order.model)
        latent = order.latent
        if isinstance(latent, InputLatent):
            decoder_graph.check_decodes(model.name, self._catalog.model_defaults(model).sampling)
            width, height, lasts = output_shape_of(latent.cells, model.name, self._catalog.model_defaults(model))
            work = DecodeParams(model, OutputShape(width, height, *astuple(lasts)))
            return self._add(work, (Role.VAE,), (), {LATENT: latent.task_id})
        need, sample = self._sample(latent)
        if self._catalog.model_defaults(sample.model).sampling.is_prior_stage:
            need, sample = self._second(need, sample, order)
            model = sample.model
        kept = latent.inpaint if latent.inpaint is not None and latent.inpaint.paste else None
        work = DecodeParams(model, replace(sample.shape, leading=sample.leading_kept), kept is not None)
        needs = {LATENT: need}
        if kept is not None:
            needs |= {IMAGE: kept.image.task_id, MASK: kept.mask.task_id}
        return self._add(work, (Role.VAE,), (), needs)

    def _second(self, prior: TaskId, made: SampleParams, order: DecodeOrder) -> tuple[TaskId, SampleParams]:
        """Add the work of the decoder of a two-stage model, on the result of `prior`, which did `made`."""
        model = self._catalog.find_decoder(made.model, decoder_graph.decoder_name(order))
        work = decoder_graph.second_work(model, made, order, self._catalog.model_defaults(model).sampling)
        texts = decoder_graph.second_texts(order)
        lengths = tuple(self._catalog.text_tokens(made.model, text.text) for text in texts.values())
        needs = {**{name: self._encode(text) for name, text in texts.items()}, PRIOR: prior}
        self.second = work
        return self._add(work, (Role.DIFFUSION_MODEL,), (), needs, work.schedule.steps_run, lengths), work

    def _size(self, model: ModelRef, order: SampleOrder | EncodeImageOrder) -> tuple[int, int]:
        """Return the width and the height of the output in pixels; 0 for audio."""
        defaults = self._catalog.model_defaults(model)
        return size_of(order, model.name, defaults.sampling, (defaults.width, defaults.height))

    def _loras(self, model: ModelRef, roles: Roles, choices: Sequence[LoraChoice]) -> tuple[LoraRef, ...]:
        """Return those of `choices` that change one of these components."""
        check_expert_loras(choices, model.name, self._catalog.model_defaults(model).sampling)
        found = [_found_lora(self._catalog, lora) for lora in choices if lora.strength != 0]
        for lora in found:
            problem = self._catalog.lora_warning(model, lora)
            if problem is not None:
                self.warnings[f"LoRA {lora.name!r} on model {model.name!r}: {problem}"] = None
        return tuple(lora for lora in found if any(self._catalog.touches(model, role, lora) for role in roles))

    def _add(
        self,
        work: StageParams,
        roles: Roles,
        loras: tuple[LoraRef, ...],
        needs: Mapping[str, TaskId] = MappingProxyType({}),
        passes: int = 1,
        context_tokens: tuple[int, ...] = (),
    ) -> TaskId:
        """Return the id of the task that does `work` on these inputs; equal work shares one task."""
        new = task_id(work, needs)
        if new not in self._tasks:
            controls = work.controls if isinstance(work, SampleParams) else ()
            # one that reads several images occurs once
            files = {control.content: control for control in controls}
            controlnets = [self._catalog.controls.use_with(work.model, control, passes) for control in files.values()]
            uses = (*(self._use(work.model, role, loras, passes) for role in roles), *(use for _, use in controlnets))
            specs = self._catalog.components(work.model)
            loaded = (*(specs[role] for role in roles), *(spec for spec, _ in controlnets))
            for sized in (*loaded, *(self._catalog.lora_spec(lora) for lora in loras)):
                self._components[sized.key] = sized
            self.works[new] = work
            whole, *divided = self._catalog.execution_modes(work.model, work, context_tokens)
            self._tasks[new] = TaskSpec(
                task_id=new,
                stage=stage_of(work),
                uses=uses,
                activation_bytes=whole.activation_bytes,
                run_seconds=self._catalog.run_seconds(work.model, work),
                needs=tuple(needs.values()),
                input_names=tuple(needs),
                divisions=tuple(divided),
                counted_bytes=whole.counted_bytes,
                together=batch_key(work, context_tokens),
            )
        return new

    def _use(self, model: ModelRef, role: Role, loras: tuple[LoraRef, ...], passes: int) -> ComponentUse:
        """Return what a run needs of one component, with those of `loras` that change it."""
        changing = tuple(lora for lora in loras if self._catalog.touches(model, role, lora))
        return self._catalog.use(model, role, changing, passes)


def _numbered(name: str, tasks: Sequence[TaskId]) -> dict[str, TaskId]:
    """Return several inputs of a kind by name."""
    return {numbered(name, number): task for number, task in enumerate(tasks)}
