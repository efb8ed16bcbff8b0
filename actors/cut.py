"""Cuts what a driver wants into tasks: pure functions of an order and a catalog.

Equal work gets equal ids, whoever asks, so that it is run once. A LoRA is named in the work of those stages only whose
weights it changes, so that the other stages are shared with jobs that do not use it. Knows no worker and no queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

from actors import decoder_cut, seen_cut
from actors.cut_catalog import Catalog as Catalog
from actors.cut_catalog import Controls as Controls
from actors.extents import duration_of, extent_of, format_of, size_of
from actors.film_cut import check_film, film_beginning
from actors.model_usual import as_usual, guided, usual_schedule
from actors.orders import (
    DecodeOrder,
    EncodeOrder,
    EncodePictureOrder,
    GivenLatent,
    GivenOrder,
    Order,
    RegionOrder,
    SampleOrder,
    order_for,
)
from actors.recipe import PICTURE_FORMAT, Recipe, RecipeDecoder, RecipeLora, RecipePictures
from actors.requests import SIZE_STEP, GenerateRequest, LoraChoice
from actors.shown_cut import check_shown, fitting_picture, given_task, reference_size, shown_picture, sized_as_reference
from pool.checkpoints.sampling_facts import Shown
from pool.errors import unusable_field
from pool.spec import ComponentKey, ComponentSpec, ComponentUse, JobId, JobSpec, Role, TaskId, TaskSpec
from pool.work import (
    DecodeWork,
    EncodePictureWork,
    EncodeWork,
    LoraRef,
    ModelRef,
    RegionWork,
    SampleWork,
    SeePictureWork,
    Work,
    stage_of,
    task_id,
    together_key,
)

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
    made_for = catalog.made_for(catalog.find_model(request.model))
    facts = made_for.sampling
    check_film(request, facts)
    seen_cut.check_film_numbers(request, facts)
    check_shown(request, facts)
    decoder_cut.check_decoder(request, facts)
    request = fitting_picture(as_usual(request, facts.usual), facts)
    request = sized_as_reference(request, made_for)
    order = order_for(request, facts.rounds_steps_up)
    cutter = _Cutter(catalog)
    wanted = cutter.task_for(order)
    sample = next(work for work in cutter.works.values() if isinstance(work, SampleWork))
    loras = tuple(catalog.find_lora(lora.name, lora.strength) for lora in request.loras if lora.strength != 0)
    pictures = RecipePictures.of(request, sample.controls)
    written_as = format_of(request.format, request.model, facts)
    recipe = Recipe(
        model=sample.model.name,
        model_sha256=sample.model.sha256,
        prompt=request.prompt,
        negative=request.negative,
        loras=tuple(RecipeLora(lora.name, lora.sha256, lora.strength) for lora in loras),
        steps=sample.steps,
        cfg=sample.guidance or sample.cfg,
        sampler=sample.sampler,
        schedule=sample.schedule,
        width=sample.width,
        height=sample.height,
        seed=sample.seed,
        warnings=tuple(cutter.warnings),
        pictures=None if pictures is None else _as_used(pictures, sample),
        frames=sample.frames,
        frame_rate=sample.frame_rate,
        motion=sample.motion,
        image_noise=sample.image_noise,
        elevation=sample.elevation,
        seconds=sample.seconds,
        format="" if written_as == PICTURE_FORMAT else written_as,
        clip_skip=request.clip_skip,
        embeddings=cutter.embeddings(),
        decoder=RecipeDecoder.of(cutter.second),
    )
    return recipe, cutter.cut_job(job_id, wanted)


def _as_used(pictures: RecipePictures, sample: SampleWork) -> RecipePictures:
    first_step, image_cfg, noise_level = sample.first_step, sample.picture_cfg, sample.noise_level
    return replace(pictures, first_step=first_step, image_cfg=image_cfg, noise_level=noise_level)


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
        #: what the second model does, of a picture that two make
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
            case EncodePictureOrder():
                return self._encode_picture(order)
            case SampleOrder():
                return self._sample(order)[0]
            case DecodeOrder():
                return self._decode(order)

    def _encode(self, order: EncodeOrder) -> TaskId:
        model = self._catalog.find_model(order.model)
        roles = tuple(role for role in self._catalog.components(model) if role.is_text_encoder)
        if not roles:
            raise unusable_field("model", order.model, "one that reads texts")
        loras = self._loras(model, roles, order.loras)
        words_negative = order.is_negative and self._catalog.made_for(model).sampling.words_negative
        work = EncodeWork(
            model, loras, order.text, order.layers_skipped, words_negative, self._catalog.embeddings.of(order.text)
        )
        return self._add(work, roles, loras)

    def _sample(self, order: SampleOrder) -> tuple[TaskId, SampleWork]:
        model = self._catalog.find_model(order.model)
        roles = (Role.DIFFUSION_MODEL,)
        loras = self._loras(model, roles, order.loras)
        facts = self._catalog.made_for(model).sampling
        if facts.reads_prior:
            raise unusable_field("model", order.model, "one that begins with noise, not with another model's latent")
        shows = shown_picture(order, model.name, facts)
        width, height = (side * shows.enlarges for side in self._size(model, order))
        sampler, schedule = usual_schedule(facts.usual, order.sampler, order.schedule)
        cfg, guidance = guided(facts.usual, order.cfg)
        texts, told = seen_cut.texts_read(order, facts, cfg), seen_cut.film_told(order, facts)
        self.warnings |= dict.fromkeys(seen_cut.unread_texts(order, model.name, facts, cfg))
        duration, begins = duration_of(order, model.name, facts), film_beginning(order, model.name, facts)
        first = seen_cut.beginning_order(order, begins, duration.frames, told.image_noise)
        read, told_hidden = self._started(model, order, first)
        pictured = begins is not None or shows.is_shown
        referred, reference = self._reference(model, order)
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
            first_step=0 if pictured else order.first_step,
            frames=duration.frames,
            frame_rate=duration.frame_rate,
            seconds=duration.seconds,
            pictured=pictured,
            starts=order.start is not None and not pictured and not (told_hidden and order.first_step == 0),
            masked=order.hole is not None and not told_hidden,
            told_hidden=told_hidden,
            regions=tuple(self._region(model, order, region) for region in order.regions),
            controls=tuple(self._catalog.controls.find(c.model, c.strength, c.start, c.end) for c in order.controls),
            reference=reference,
            picture_cfg=shows.picture_cfg,
            noise_level=shows.noise_level,
            image_noise=told.image_noise,
            motion=told.motion,
            elevation=told.elevation,
            ends=order.last is not None,
        )
        pictures = tuple(region.mask.task_id for region in order.regions if region.mask is not None)
        pictures += tuple(control.picture.task_id for control in order.controls)
        needs = (
            *(self._encode(text) for text in texts),
            *(read[0:1] if work.starts or work.pictured else ()),
            *read[1:],
            *self._seen(model, seen_cut.seen_pictures(order, facts)),
            *referred,
            *pictures,
        )
        own = tuple(self._catalog.text_tokens(model, text.text) for text in texts)
        lengths = seen_cut.seen_lengths(facts, cfg) or own
        return self._add(work, roles, loras, needs, work.steps_run, lengths), work

    def _region(self, model: ModelRef, order: SampleOrder, region: RegionOrder) -> RegionWork:
        """Raises UnusableField for a box that reaches out of the picture."""
        if region.box is None:
            return RegionWork(region.strength)
        left, top, width, height = region.box
        whole_width, whole_height = self._size(model, replace(order, scale=1.0))
        if left + width > whole_width or top + height > whole_height:
            raise unusable_field(
                "regions.box", region.box, f"one within the {whole_width}x{whole_height} of the picture"
            )
        return RegionWork(
            region.strength,
            (left / whole_width, top / whole_height, width / whole_width, height / whole_height),
        )

    def _started(
        self, model: ModelRef, order: SampleOrder, begins: EncodePictureOrder | None
    ) -> tuple[tuple[TaskId, ...], bool]:
        """The results that sampling begins with, the latent to start from first, and whether the model is told of a
        hole. Raises UnusableField for a model that fills holes where there is none."""
        told_hidden = self._catalog.made_for(model).sampling.fills_holes
        if told_hidden and (order.hole is None or not isinstance(order.start, EncodePictureOrder)):
            expected = f"a picture and a mask: model {model.name!r} was trained to fill a part of a picture"
            raise unusable_field("mask", "nothing", expected)
        if order.start is None:
            return (), told_hidden
        if self._catalog.made_for(model).sampling.shown is Shown.PIXELS:
            return (given_task(order.start),), told_hidden
        if begins is not None:
            return (self._encode_picture(begins),), told_hidden
        start = self.task_for(order.start)
        if order.hole is None:
            return (start,), told_hidden
        if not told_hidden:
            return (start, order.hole.mask.task_id), told_hidden
        assert isinstance(order.start, EncodePictureOrder), "a hole is in a picture"
        hidden = self._encode_picture(replace(order.start, hidden=order.hole.mask))
        return (start, order.hole.mask.task_id, hidden), told_hidden

    def _reference(self, model: ModelRef, order: SampleOrder) -> tuple[tuple[TaskId, ...], tuple[int, int] | None]:
        """The latent of the picture to work from, if there is one, and the size that it is read in: its own
        proportions, and about as large as the picture that is made, before that is scaled up."""
        if order.reference is None:
            return (), None
        width, height = self._size(model, replace(order, scale=1.0))
        step = self._catalog.made_for(model).sampling.side_multiple or SIZE_STEP
        size = reference_size(order.reference.size, width * height, step)
        return (self._encode_picture(EncodePictureOrder(order.reference.picture, order.model, *size)),), size

    def _encode_picture(self, order: EncodePictureOrder) -> TaskId:
        model = self._catalog.find_model(order.model)
        decoder_cut.check_reads_pictures(model.name, self._catalog.made_for(model).sampling)
        width, height = self._size(model, order)
        picture = order.picture.task_id if isinstance(order.picture, GivenOrder) else self._decode(order.picture)
        beside = tuple(given.task_id for given in (order.hidden, order.last) if given is not None)
        needs, hides, ends = tuple(dict.fromkeys((picture, *beside))), order.hidden is not None, order.last is not None
        work = EncodePictureWork(model, width, height, hides, order.frames, order.noise, order.seed, ends)
        return self._add(work, (Role.VAE,), (), needs)

    def _seen(self, model: ModelRef, pictures: tuple[TaskId, ...]) -> tuple[TaskId, ...]:
        """What the model's vision encoder says of pictures."""
        film = self._catalog.made_for(model).sampling.film
        if not pictures or film is None:
            return ()
        return (self._add(SeePictureWork(model, film.pictures_seen), (Role.VISION_ENCODER,), (), pictures),)

    def _decode(self, order: DecodeOrder) -> TaskId:
        model = self._catalog.find_model(order.model)
        latent = order.latent
        if isinstance(latent, GivenLatent):
            decoder_cut.check_decodes(model.name, self._catalog.made_for(model).sampling)
            width, height, lasts = extent_of(latent.cells, model.name, self._catalog.made_for(model))
            work = DecodeWork(model, width, height, False, lasts.frames, lasts.frame_rate, lasts.seconds)
            return self._add(work, (Role.VAE,), (), (latent.task_id,))
        need, sample = self._sample(latent)
        if self._catalog.made_for(sample.model).sampling.hands_on:
            need, sample = self._second(need, sample, order)
            model = sample.model
        kept = latent.hole if latent.hole is not None and latent.hole.paste else None
        work = DecodeWork(
            model, sample.width, sample.height, kept is not None, sample.frames, sample.frame_rate, sample.seconds
        )
        needs = (need,) if kept is None else (need, kept.picture.task_id, kept.mask.task_id)
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

    def _size(self, model: ModelRef, order: SampleOrder | EncodePictureOrder) -> tuple[int, int]:
        """Width and height of what is made or encoded, in pixels; 0 for sound."""
        own = self._catalog.made_for(model)
        return size_of(order, model.name, own.sampling, (own.width, own.height))

    def _loras(self, model: ModelRef, roles: Roles, choices: Iterable[LoraChoice]) -> tuple[LoraRef, ...]:
        """Those of `choices` that change one of these components."""
        found = [self._catalog.find_lora(lora.name, lora.strength) for lora in choices if lora.strength != 0]
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
            # one that speaks of two pictures is there once
            files = {control.sha256: control for control in controls}
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
