"""Cuts what a driver wants into tasks: pure functions of an order and a catalog.

Equal work gets equal ids, whoever asks, so that it is run once. A LoRA is named in the work of those stages only whose
weights it changes, so that the other stages are shared with jobs that do not use it. Knows no worker and no queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

from modelpool.actors.graph import decoder_cut
from modelpool.actors.graph import vision_cut as seen_cut
from modelpool.actors.graph.control_cut import control_images, control_refs
from modelpool.actors.graph.control_video_cut import fitting_video, leading_cells, video_read
from modelpool.actors.graph.expert_cut import WHOLE, Half, as_usual_pair, check_halves, halves, hints
from modelpool.actors.graph.graph_catalog import Catalog as Catalog
from modelpool.actors.graph.graph_catalog import Controls as Controls
from modelpool.actors.graph.graph_recipe import recipe_of
from modelpool.actors.graph.image_concat_cut import fitting_image, given_task, shown_image, sized_as_reference
from modelpool.actors.graph.model_defaults import as_usual, guided, usual_schedule
from modelpool.actors.graph.orders import (
    DecodeOrder,
    EncodeImageOrder,
    EncodeOrder,
    GivenLatent,
    GivenOrder,
    Order,
    SampleOrder,
    order_for,
)
from modelpool.actors.graph.output_shape import duration_of, extent_of, format_of, size_of
from modelpool.actors.graph.recipe import Recipe
from modelpool.actors.graph.reference_cut import (
    NO_REFERENCES,
    ReferencesRead,
    references_read,
    started_edits,
    with_sight,
)
from modelpool.actors.graph.region_cut import region_work
from modelpool.actors.graph.request_checks import check_request
from modelpool.actors.graph.video_output_cut import video_beginning
from modelpool.actors.request.requests import GenerateRequest, LoraChoice
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.core.sampling_facts import SamplingFacts, Shown
from modelpool.pool.core.stage_params import (
    DecodeWork,
    EncodeImageWork,
    EncodeWork,
    LoraRef,
    ModelRef,
    SampleWork,
    SeeImageWork,
    Work,
    stage_of,
    task_id,
    together_key,
)
from modelpool.pool.families.control_video_form import follows_video
from modelpool.pool.specs.spec import ComponentKey, ComponentSpec, ComponentUse, JobId, JobSpec, Role, TaskId, TaskSpec

#: the components that one kind of work runs
Roles: TypeAlias = tuple[Role, ...]


@dataclass(frozen=True, slots=True)
class CutJob:
    """A job for the core, the work behind each of its tasks, and the sizes of the components that they name.

    warnings  what to tell whoever asked for it
    """

    job: JobSpec
    works: Mapping[TaskId, Work]
    components: tuple[ComponentSpec, ...]
    warnings: tuple[str, ...] = ()


def cut_request(request: GenerateRequest, job_id: JobId, catalog: Catalog) -> tuple[Recipe, CutJob]:
    """`request`, whose seed must be set, as a recipe (without versions) and a job; what it leaves open is the model's
    own. Raises UserError."""
    model = catalog.find_model(request.model)
    made_for = catalog.made_for(model)
    facts = made_for.sampling
    check_request(request, facts)
    request = as_usual(as_usual_pair(request, facts), facts.usual)
    request = fitting_video(fitting_image(request, facts), facts)
    request = with_sight(sized_as_reference(request, made_for), facts, model)
    order = order_for(request, facts.rounds_steps_up)
    cutter = _Cutter(catalog)
    cutter.warnings |= dict.fromkeys(started_edits(request, facts, model))
    wanted = cutter.task_for(order)
    sample = next(work for work in cutter.works.values() if isinstance(work, SampleWork))
    loras = tuple(_found_lora(catalog, lora) for lora in request.loras if lora.strength != 0)
    written_as = format_of(request.format, request.model, facts)
    told = tuple(cutter.warnings), cutter.embeddings()
    recipe = recipe_of(request, sample, loras, written_as, *told, cutter.second)
    return recipe, cutter.cut_job(job_id, wanted)


def _found_lora(catalog: Catalog, choice: LoraChoice) -> LoraRef:
    return replace(catalog.find_lora(choice.name, choice.strength), noise=choice.noise)


def cut_order(order: Order, job_id: JobId, catalog: Catalog, given: frozenset[TaskId] = frozenset()) -> CutJob:
    """`order` as a job whose result is the root's; tasks whose results are `given` are left out. Raises UserError."""
    cutter = _Cutter(catalog)
    return cutter.cut_job(job_id, cutter.task_for(order), given)


class _Cutter:
    """Collects the tasks of one job; every task after the ones it needs."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._tasks: dict[TaskId, TaskSpec] = {}
        self._components: dict[ComponentKey, ComponentSpec] = {}
        self.works: dict[TaskId, Work] = {}
        self.warnings: dict[str, None] = {}
        #: what the second model does, of an image that two make
        self.second: SampleWork | None = None

    def cut_job(self, job_id: JobId, wanted: TaskId, given: frozenset[TaskId] = frozenset()) -> CutJob:
        """What `wanted` depends on, up to what is given: by the driver, or because no task here makes it."""
        needed: set[TaskId] = set()
        read: dict[TaskId, None] = {}
        reached = [wanted]
        while reached:
            task_id = reached.pop()
            needed.add(task_id)
            for need in self._tasks[task_id].needs:
                if need in given or need not in self._tasks:
                    read[need] = None
                else:
                    reached.append(need)
        tasks = tuple(task for task in self._tasks.values() if task.task_id in needed)
        keys = (key for task in tasks for use in task.uses for key in (use.component, *use.adapters))
        components = {key: self._components[key] for key in keys}
        works = {task.task_id: self.works[task.task_id] for task in tasks}
        job = JobSpec(job_id, tasks, wanted, tuple(read))
        return CutJob(job, MappingProxyType(works), tuple(components.values()), tuple(self.warnings))

    def embeddings(self) -> tuple[tuple[str, str], ...]:
        """Name and SHA-256 of each textual inversion that a text names."""
        texts = (work for work in self.works.values() if isinstance(work, EncodeWork))
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
        self, order: EncodeOrder, shown: tuple[TaskId, ...] = (), read: ReferencesRead = NO_REFERENCES
    ) -> TaskId:
        """A text; beside what was seen of images, where its encoder is shown some."""
        model = self._catalog.find_model(order.model)
        roles = tuple(role for role in self._catalog.components(model) if role.is_text_encoder)
        if not roles:
            raise unusable_field("model", order.model, "one that reads texts")
        loras = self._loras(model, roles, order.loras)
        words_negative = order.is_negative and self._catalog.made_for(model).sampling.words_negative
        named = self._catalog.embeddings.of(order.text)
        own = order.text, order.layers_skipped, words_negative, named
        return self._add(EncodeWork(model, loras, *own, read.seen, read.numbered), roles, loras, shown)

    def _sample(self, order: SampleOrder) -> tuple[TaskId, SampleWork]:
        model = self._catalog.find_model(order.model)
        facts = self._catalog.made_for(model).sampling
        if facts.low_noise is None:
            return self._half(order, model)
        frames = duration_of(order, model.name, facts).frames
        parts = tuple(halves(order, facts, self._size(model, order), frames))
        self.warnings |= dict.fromkeys(hints(order, [half for _, half in parts]))
        made: list[tuple[TaskId, SampleWork]] = []
        for one, half in parts:
            made.append(self._half(one, model, half, tuple(task for task, _ in made)))
        return made[-1]

    def _half(
        self, order: SampleOrder, model: ModelRef, half: Half = WHOLE, before: tuple[TaskId, ...] = ()
    ) -> tuple[TaskId, SampleWork]:
        """What one of two diffusion models does of `order`, after `before`; or all of it, where a model is one."""
        roles = (half.role,)
        loras = self._loras(model, roles, order.loras)
        facts = self._catalog.made_for(model).sampling
        if facts.reads_prior:
            raise unusable_field("model", order.model, "one that begins with noise, not with another model's latent")
        shows = shown_image(order, model.name, facts)
        width, height = (side * shows.enlarges for side in self._size(model, order))
        whole = self._size(model, replace(order, scale=1.0))
        sampler, schedule = usual_schedule(facts.usual, order.sampler, order.schedule)
        cfg, guidance = guided(facts.usual, order.cfg)
        told = seen_cut.video_told(order, facts)
        self.warnings |= dict.fromkeys(seen_cut.unread_texts(order, model.name, facts, cfg))
        duration, begins = duration_of(order, model.name, facts), video_beginning(order, model.name, facts)
        first = seen_cut.beginning_order(order, begins, duration.frames, told.image_noise)
        read, told_hidden = self._started(model, order, first)
        imaged = begins is not None or shows.is_shown
        referred = references_read(order, facts, whole)
        work = SampleWork(
            model=model,
            loras=loras,
            width=width,
            height=height,
            steps=order.steps,
            cfg=cfg,
            guidance=guidance,
            sampler=sampler,
            schedule=schedule,
            seed=order.seed,
            first_step=0 if imaged else order.first_step,
            frames=duration.frames,
            frame_rate=duration.frame_rate,
            seconds=duration.seconds,
            imaged=imaged,
            starts=order.start is not None and not imaged and not (told_hidden and order.first_step == 0),
            masked=order.hole is not None and not told_hidden,
            told_hidden=told_hidden,
            regions=tuple(region_work(region, whole) for region in order.regions),
            controls=control_refs(order, self._catalog.controls),
            reference=referred.sizes[0] if referred.sizes else None,
            more_references=referred.sizes[1:],
            image_cfg=shows.image_cfg,
            noise_level=shows.noise_level,
            image_noise=told.image_noise,
            motion=told.motion,
            elevation=told.elevation,
            ends=order.last is not None,
            switch=half.switch,
            low_noise=half.low_noise,
            follows=follows_video(facts),
            leading=leading_cells(order, facts),
        )
        needs, lengths = self._inputs_of(work, order, facts, read, referred)
        return self._add(work, roles, loras, (*needs, *before), work.steps_run, lengths), work

    def _inputs_of(
        self,
        work: SampleWork,
        order: SampleOrder,
        facts: SamplingFacts,
        read: tuple[TaskId, ...],
        referred: ReferencesRead,
    ) -> tuple[tuple[TaskId, ...], tuple[int, ...]]:
        """What `work` reads, in its order, with `read` for what it begins with; and the lengths of its texts."""
        model, texts, looks = work.model, seen_cut.texts_read(order, facts, work.cfg), seen_cut.looks(order, facts)
        shown = tuple(self._add(see, (Role.VISION_ENCODER,), (), of) for see, of in referred.sights(model))
        images = tuple(region.mask.task_id for region in order.regions if region.mask is not None)
        images += tuple(self._image(each) for each in control_images(order, work.controls))
        needs = (
            *(self._encode(text, shown or self._seen(model, facts, looks(text), False), referred) for text in texts),
            *(read[0:1] if work.starts or work.imaged else ()),
            *read[1:],
            *self._followed(work, order),
            *self._seen(model, facts, looks(None)),
            *(self._encode_image(each) for each in referred.orders),
            *images,
        )
        seen = referred.seen, referred.numbered
        own = tuple(self._catalog.text_tokens(model, text.text, *seen) for text in texts)
        return needs, seen_cut.seen_lengths(facts, work.cfg) or own

    def _started(
        self, model: ModelRef, order: SampleOrder, begins: EncodeImageOrder | None
    ) -> tuple[tuple[TaskId, ...], bool]:
        """The results that sampling begins with, the latent to start from first, and whether the model is told of a
        hole. Raises UnusableField for a model that fills holes where there is none."""
        told_hidden = self._catalog.made_for(model).sampling.fills_holes
        if told_hidden and (order.hole is None or not isinstance(order.start, EncodeImageOrder)):
            expected = f"an image and a mask: model {model.name!r} was trained to fill a part of an image"
            raise unusable_field("mask", "nothing", expected)
        if order.start is None:
            return (), told_hidden
        if self._catalog.made_for(model).sampling.shown is Shown.PIXELS:
            return (given_task(order.start),), told_hidden
        if begins is not None:
            return (self._encode_image(begins),), told_hidden
        start = self.task_for(order.start)
        if order.hole is None:
            return (start,), told_hidden
        if not told_hidden:
            return (start, order.hole.mask.task_id), told_hidden
        assert isinstance(order.start, EncodeImageOrder), "a hole is in an image"
        hidden = self._encode_image(replace(order.start, hidden=order.hole.mask))
        return (start, order.hole.mask.task_id, hidden), told_hidden

    def _encode_image(self, order: EncodeImageOrder) -> TaskId:
        model = self._catalog.find_model(order.model)
        decoder_cut.check_reads_images(model.name, self._catalog.made_for(model).sampling)
        width, height = self._size(model, order)
        image = order.image.task_id if isinstance(order.image, GivenOrder) else self._decode(order.image)
        beside = tuple(given.task_id for given in (order.hidden, order.last) if given is not None)
        needs, hides, ends = tuple(dict.fromkeys((image, *beside))), order.hidden is not None, order.last is not None
        how = order.frames, order.noise, order.seed, ends, order.bright
        work = EncodeImageWork(model, width, height, hides, *how, black=order.black)
        return self._add(work, (Role.VAE,), (), needs)

    def _image(self, order: GivenOrder | EncodeImageOrder) -> TaskId:
        return order.task_id if isinstance(order, GivenOrder) else self._encode_image(order)

    def _followed(self, work: SampleWork, order: SampleOrder) -> tuple[TaskId, ...]:
        """What the model of `work` is told of a video to follow."""
        told = EncodeImageWork(work.model, work.width, work.height, frames=work.frames, follows=True)
        return (self._add(told, (Role.VAE,), (), video_read(order)),) if work.follows else ()

    def _seen(
        self, model: ModelRef, facts: SamplingFacts, images: tuple[TaskId, ...], is_told: bool = True
    ) -> tuple[TaskId, ...]:
        """What the model's vision encoder says of images, where it is told that itself, or its text encoder is."""
        if facts.sight is None or facts.video is None or facts.sight.is_told is not is_told:
            return ()
        return (self._add(SeeImageWork(model, facts.video.images_seen), (Role.VISION_ENCODER,), (), images),)

    def _decode(self, order: DecodeOrder) -> TaskId:
        model = self._catalog.find_model(order.model)
        latent = order.latent
        if isinstance(latent, GivenLatent):
            decoder_cut.check_decodes(model.name, self._catalog.made_for(model).sampling)
            width, height, lasts = extent_of(latent.cells, model.name, self._catalog.made_for(model))
            work = DecodeWork(model, width, height, False, *astuple(lasts))
            return self._add(work, (Role.VAE,), (), (latent.task_id,))
        need, sample = self._sample(latent)
        if self._catalog.made_for(sample.model).sampling.hands_on:
            need, sample = self._second(need, sample, order)
            model = sample.model
        kept = latent.hole if latent.hole is not None and latent.hole.paste else None
        duration = sample.frames, sample.frame_rate, sample.seconds, sample.leading_made
        work = DecodeWork(model, sample.width, sample.height, kept is not None, *duration)
        needs = (need,) if kept is None else (need, kept.image.task_id, kept.mask.task_id)
        return self._add(work, (Role.VAE,), (), needs)

    def _second(self, first: TaskId, made: SampleWork, order: DecodeOrder) -> tuple[TaskId, SampleWork]:
        """What the second of two models makes of the result of `first`, which did `made`."""
        model = self._catalog.find_decoder(made.model, decoder_cut.decoder_name(order))
        work = decoder_cut.second_work(model, made, order, self._catalog.made_for(model).sampling)
        texts = decoder_cut.second_texts(order)
        lengths = tuple(self._catalog.text_tokens(made.model, text.text) for text in texts)
        needs = (*(self._encode(text) for text in texts), first)
        self.second = work
        return self._add(work, (Role.DIFFUSION_MODEL,), (), needs, work.steps_run, lengths), work

    def _size(self, model: ModelRef, order: SampleOrder | EncodeImageOrder) -> tuple[int, int]:
        """Width and height of what is made or encoded, in pixels; 0 for audio."""
        own = self._catalog.made_for(model)
        return size_of(order, model.name, own.sampling, (own.width, own.height))

    def _loras(self, model: ModelRef, roles: Roles, choices: Sequence[LoraChoice]) -> tuple[LoraRef, ...]:
        """Those of `choices` that change one of these components."""
        check_halves(choices, model.name, self._catalog.made_for(model).sampling)
        found = [_found_lora(self._catalog, lora) for lora in choices if lora.strength != 0]
        for lora in found:
            problem = self._catalog.lora_warning(model, lora)
            if problem is not None:
                self.warnings[f"LoRA {lora.name!r} on model {model.name!r}: {problem}"] = None
        return tuple(lora for lora in found if any(self._catalog.touches(model, role, lora) for role in roles))

    def _add(
        self,
        work: Work,
        roles: Roles,
        loras: tuple[LoraRef, ...],
        needs: tuple[TaskId, ...] = (),
        passes: int = 1,
        context_tokens: tuple[int, ...] = (),
    ) -> TaskId:
        """The id of the task that does `work`; the task is new unless equal work is there already."""
        new = task_id(work, needs)
        if new not in self._tasks:
            controls = work.controls if isinstance(work, SampleWork) else ()
            # one that speaks of two images is there once
            files = {control.content: control for control in controls}
            beside = [self._catalog.controls.beside(work.model, control, passes) for control in files.values()]
            uses = (*(self._use(work.model, role, loras, passes) for role in roles), *(use for _, use in beside))
            specs = self._catalog.components(work.model)
            loaded = (*(specs[role] for role in roles), *(spec for spec, _ in beside))
            for sized in (*loaded, *(self._catalog.lora_spec(lora) for lora in loras)):
                self._components[sized.key] = sized
            self.works[new] = work
            whole, *divided = self._catalog.ways(work.model, work, context_tokens)
            self._tasks[new] = TaskSpec(
                task_id=new,
                stage=stage_of(work),
                uses=uses,
                activation_bytes=whole.activation_bytes,
                run_seconds=self._catalog.run_seconds(work.model, work),
                needs=needs,
                divisions=tuple(divided),
                counted_bytes=whole.counted_bytes,
                together=together_key(work, context_tokens),
            )
        return new

    def _use(self, model: ModelRef, role: Role, loras: tuple[LoraRef, ...], passes: int) -> ComponentUse:
        """What a run needs of one component, with those of `loras` that change it."""
        own = tuple(lora for lora in loras if self._catalog.touches(model, role, lora))
        return self._catalog.use(model, role, own, passes)
