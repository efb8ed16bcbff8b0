"""`ActivationFigures`: what the runs of models hold on a device beside weights, for tasks that are to be planned.

Counted by dry runs of the models' own code, remembered, and corrected by what runs took. One thread's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from modelpool.pool.conditioning.micro_conditioning import CONTEXT, IMAGE_CONTEXT
from modelpool.pool.controlnets.controlnet_bytes import ControlStage
from modelpool.pool.controlnets.open_controlnet import OpenControlNet
from modelpool.pool.core.lru_cache import Recent
from modelpool.pool.core.sampling_facts import Sight, VideoFacts
from modelpool.pool.core.stage_params import (
    ControlRef,
    DecodeWork,
    EncodeImageWork,
    EncodeWork,
    ModelRef,
    SampleWork,
    SeeImageWork,
    Work,
    role_of,
    stage_of,
)
from modelpool.pool.estimates.activation_calibration import (
    ActivationBook,
    ActivationError,
    ActivationKey,
    measured_activations,
)
from modelpool.pool.estimates.stage_peak_bytes import (
    TILES,
    USUAL_TOKENS,
    EmptyTold,
    TextShape,
    TextStage,
    decode_bytes,
    encode_bytes,
    encode_image_bytes,
    sample_bytes,
    see_bytes,
    stage_call,
    text_shape,
    tile_slowdown,
)
from modelpool.pool.families.text_readings import readings_of
from modelpool.pool.families.transformer_families import TEXT_ROLES
from modelpool.pool.loading.open_model import OpenModel
from modelpool.pool.models.diffusion.cascade_model import empty_text
from modelpool.pool.models.text.lengths import context_tokens, empty_told, length_read
from modelpool.pool.models.text.vision_prompt import seeing
from modelpool.pool.models.vision.preprocess import states_shape
from modelpool.pool.models.vision.qwen import empty_images
from modelpool.pool.patcher.weight_bytes import module_bytes
from modelpool.pool.pixels.latent_pixels import sampled_shape
from modelpool.pool.plan.residency import ModuleBytes
from modelpool.pool.specs.division import ways as ways_of
from modelpool.pool.specs.spec import Division, Role, RunCost, TaskSpec
from modelpool.pool.text.chunks import spelled_out
from modelpool.pool.text.clip_tokenizer import ClipTokenizer
from modelpool.pool.text.image_tokens import SeenImage
from modelpool.pool.tracing.activation_bytes import WITHOUT_MARGIN, StageModule, attention_form, with_margin
from modelpool.pool.tracing.dry_run import META
from modelpool.pool.tracing.meta_cache import MetaAnswers
from modelpool.pool.tracing.module_flops import module_work

#: texts and sizes of work whose needs are kept
SIZES_REMEMBERED = 4096
#: two calls for one text each instead of one for both, as a multiple of its seconds: kernels that are less busy.
#: A guess until it is measured on a GPU
APART_SLOWDOWN = 1.2


class ActivationFigures:
    """The figures of all models of a catalog, for devices of one kind."""

    def __init__(
        self,
        open_model: Callable[[ModelRef], OpenModel],
        device_kind: str,
        open_control: Callable[[ControlRef], OpenControlNet],
    ) -> None:
        self._open, self._open_control = open_model, open_control
        self._device_kind = device_kind
        self._answers = MetaAnswers()
        self._activations: Recent[tuple[object, ...], int] = Recent(SIZES_REMEMBERED)
        self._book = ActivationBook()
        self._texts: Recent[tuple[object, ...], TextShape] = Recent(SIZES_REMEMBERED)
        self._tokenizer: ClipTokenizer | None = None

    def text_tokens(
        self, model: ModelRef, text: str, seen: tuple[tuple[int, int], ...] = (), numbered: bool = False
    ) -> int:
        """Tokens of `text` as the diffusion model of `model` reads it, with images as `EncodeWork` has them. Raises
        UnusableField as `parse_weights` does, and TokenizerMissing."""
        return self._text_shape(model, text, seen, numbered).tokens

    def activation_bytes(self, model: ModelRef, work: Work, context_tokens: Sequence[int] = ()) -> int:
        """Device memory that `work` needs beside weights and scratch when it is not divided.

        `context_tokens` are the lengths of the texts that sampling reads; the usual ones where they are not given.
        """
        counted_bytes = self.counted_bytes(model, work, context_tokens)
        figure_bytes = self._corrected(model, work, Division(0), counted_bytes)
        if figure_bytes > counted_bytes and not self._counted_ways(model, work, context_tokens):
            return counted_bytes  # what is refused is refused by what was counted
        return figure_bytes

    def counted_bytes(self, model: ModelRef, work: Work, context_tokens: Sequence[int] = ()) -> int:
        """`activation_bytes` as it was counted, whatever runs took."""
        return self._counted_as(model, work, context_tokens, Division(0))

    def ways(self, model: ModelRef, work: Work, context_tokens: Sequence[int] = ()) -> tuple[Division, ...]:
        """`work` undivided, then `divisions`, each with what was counted for it beside what runs took."""
        counted_bytes = self.counted_bytes(model, work, context_tokens)
        whole = Division(self.activation_bytes(model, work, context_tokens), counted_bytes=counted_bytes)
        return (whole, *self.divisions(model, work, context_tokens))

    def divisions(self, model: ModelRef, work: Work, context_tokens: Sequence[int] = ()) -> tuple[Division, ...]:
        """The ways to do `work` in parts, the least divided first; each needs less than the one before.

        Which there are and in which order is by what was counted: no correction drops one. Parts of a run hold no more
        than the run does, so no figure is above one before it; the last is not above what was counted for it, so that
        no correction makes work impossible.
        """
        counted = self._counted_ways(model, work, context_tokens)
        found: list[Division] = []
        most_bytes = self.activation_bytes(model, work, context_tokens)
        for number, way in enumerate(counted, start=1):
            figure_bytes = self._corrected(model, work, way, way.counted_bytes)
            if number == len(counted):
                figure_bytes = min(figure_bytes, way.counted_bytes)
            most_bytes = min(figure_bytes, most_bytes - 1)
            found.append(replace(way, activation_bytes=most_bytes))
        return tuple(found)

    def learn(self, task: TaskSpec, cost: RunCost) -> None:
        """A run of `task` ended well and cost `cost`: later figures take it in.

        Runs that ran out of memory teach nothing here: on which device, with what else on it, and how far divided they
        were is known to the worker, whose own book learns from them. Nor do runs of several tasks at once: what of
        their memory was one task's is not known.
        """
        if cost.batched > 1:
            return
        way = ways_of(task)[0] if cost.division is None else cost.division
        key = ActivationKey(task.uses[0].component, task.stage, self._device_kind, way.batch, way.tile)
        measured = measured_activations(cost, max(use.scratch_bytes for use in task.uses))
        if measured is not None:
            self._book.learn(key, way.estimated_bytes, *measured)

    def errors(self) -> tuple[ActivationError, ...]:
        """How good the figures were that were counted, by component and stage."""
        return self._book.report()

    def _ways(self, model: ModelRef, work: Work) -> Iterator[Division]:
        """Ways that may need less, without the figure."""
        if isinstance(work, SampleWork) and (work.cfg != 1 or work.regions):
            yield Division(0, batch=1, slowdown=APART_SLOWDOWN)
        if isinstance(work, (EncodeImageWork, DecodeWork)):
            cells = self._open(model).latent.sides(work.width, work.height)
            yield from (Division(0, tile=t, slowdown=tile_slowdown(cells, t)) for t in TILES if t < max(cells))

    def _counted_ways(self, model: ModelRef, work: Work, context_tokens: Sequence[int]) -> tuple[Division, ...]:
        """The ways to do `work` in parts with what was counted for them, each less than the one before."""
        found: list[Division] = []
        least_bytes = self.counted_bytes(model, work, context_tokens)
        for way in self._ways(model, work):
            counted_bytes = self._counted_as(model, work, context_tokens, way)
            if counted_bytes < least_bytes:
                found.append(replace(way, activation_bytes=counted_bytes, counted_bytes=counted_bytes))
                least_bytes = counted_bytes
        return tuple(found)

    def _counted_as(self, model: ModelRef, work: Work, context_tokens: Sequence[int], way: Division) -> int:
        lengths = tuple(context_tokens) or _usual_tokens(work)
        shape: TextShape | tuple[int, ...] = lengths
        if isinstance(work, EncodeWork):
            shape = self._text_shape(model, _spelled(work), work.seen, work.numbered)
        key = (model.sha256, *_size_of(work), shape, way.batch, way.tile)

        def count() -> int:
            return with_margin(self._counted(model, work, lengths, way), self._device_kind)

        return self._activations.get(key, count)

    def _corrected(self, model: ModelRef, work: Work, way: Division, counted_bytes: int) -> int:
        """`counted_bytes` by what runs took: up as far as runs of just this kind were measured to take, since a figure
        of a task may divide it. Where they hold no more than was counted, only ever up."""
        component = self._open(model).component(role_of(work)).key
        key = ActivationKey(component, stage_of(work), self._device_kind, way.batch, way.tile)
        most_bytes = max(counted_bytes, self._book.most_measured(key, counted_bytes))
        figure_bytes = min(self._book.corrected(key, counted_bytes), most_bytes)
        return max(figure_bytes, counted_bytes) if self._device_kind in WITHOUT_MARGIN else figure_bytes

    def _counted(self, model: ModelRef, work: Work, lengths: Sequence[int], way: Division) -> int:
        opened = self._open(model)
        latent, family = opened.latent, opened.checkpoint.family
        match work:
            case EncodeWork():
                stages = [self._text_stage(opened, role, work) for role in family.text_encoders]
                return encode_bytes(stages, _spelled(work))
            case SampleWork():
                module = self._module(opened, role_of(work))
                told, controls = empty_told_of(opened), [self._control(control) for control in work.controls]
                return sample_bytes(module, work, latent, lengths, way.batch, family.sampling, told, controls)
            case SeeImageWork():
                return see_bytes(self._module(opened, role_of(work)), family.sampling, (work.width, work.height))
            case EncodeImageWork():
                cells = latent.sides(work.width, work.height)
                return encode_image_bytes(self._module(opened, role_of(work)), cells, latent, way.tile, work.frames)
            case DecodeWork():
                shape = sampled_shape(work, latent)
                return decode_bytes(self._module(opened, role_of(work)), shape, latent, way.tile)

    def _module(self, opened: OpenModel, role: Role) -> StageModule:
        component = opened.component(role)
        return self._stage_module(component.built.module, component.form.compute_dtype)

    def _text_stage(self, opened: OpenModel, role: Role, work: EncodeWork) -> TextStage:
        family, module = opened.checkpoint.family, self._module(opened, role)
        if not family.text_set:
            return TextStage(module, family.texts[role], self._load_tokenizer())
        text = opened.reading(role)
        reading, config = seeing(text.reading, len(work.seen), work.numbered), cast(Any, module.module).config
        images = _empty_seen(opened, work.seen, config.hidden_size) if reading.sees else ()
        return TextStage(module, reading, text.tokenizer or self._load_tokenizer(), images)

    def _control(self, control: ControlRef) -> ControlStage:
        opened = self._open_control(control)
        stage = self._stage_module(opened.module, opened.form.compute_dtype)
        return ControlStage(stage, control.hole is not None)

    def _stage_module(self, module: nn.Module, compute_dtype: torch.dtype) -> StageModule:
        return StageModule(module, compute_dtype, attention_form(self._device_kind), self._answers)

    def _text_shape(self, model: ModelRef, text: str, seen: tuple[tuple[int, int], ...], numbered: bool) -> TextShape:
        family = self._open(model).checkpoint.family

        def measure() -> TextShape:
            if not family.text_set:
                return text_shape(self._load_tokenizer(), text)
            return self._read_shape(self._open(model), text, seen, numbered)

        # those without a set read the same chunks
        return self._texts.get((model.sha256 if family.text_set else "", text, seen, numbered), measure)

    def _read_shape(self, opened: OpenModel, text: str, seen: tuple[tuple[int, int], ...], numbered: bool) -> TextShape:
        """The shape of a text that several kinds of encoders read."""
        family, lengths, read = opened.checkpoint.family, [0] * len(TEXT_ROLES), []
        counts = [len(image.states_LD) for image in _empty_seen(opened, seen, 1)]
        for role in family.text_encoders:
            own = opened.reading(role)
            reading, tokenizer = seeing(own.reading, len(seen), numbered), own.tokenizer or self._load_tokenizer()
            read.append(length_read(reading, tokenizer, text, counts if reading.sees else ()))
            lengths[own.place] = read[-1].tokens
        readings = readings_of(family.text_set)
        assert readings is not None, f"nothing says how the texts of {family.text_set} are read"
        weighted = any(each.weighted for each in read)
        return TextShape(weighted, context_tokens(family.text_set, lengths[: len(readings)]), tuple(read))

    def _load_tokenizer(self) -> ClipTokenizer:
        if self._tokenizer is None:
            self._tokenizer = ClipTokenizer.load()
        return self._tokenizer

    def batch_bytes(self, model: ModelRef, work: Work, images: int, context_tokens: int) -> int:
        """Device memory beside weights and scratch of one model call for so many images at once. No run does that:
        it is for comparison."""
        opened = self._open(model)
        component = opened.component(role_of(work))
        dtype, module = component.form.compute_dtype, component.built.module
        facts = opened.checkpoint.family.sampling
        call = stage_call(work, dtype, opened.latent, facts, context_tokens, images, empty_told_of(opened))
        counted = self._stage_module(module, dtype).peak_bytes(call)
        return with_margin(counted, self._device_kind)

    def modules(self, model: ModelRef, work: Work) -> tuple[ModuleBytes, ...]:
        """The modules of the component that `work` runs, with their work, in the order in which a pass uses them."""
        opened = self._open(model)
        component = opened.component(role_of(work))
        facts = opened.checkpoint.family.sampling
        told = empty_told_of(opened)
        call = stage_call(work, component.form.compute_dtype, opened.latent, facts, told=told)
        flops = module_work(component.built.module, component.form.compute_dtype, call)
        sizes = {m.name: m for m in module_bytes(component.weights, component.form)}
        order = (*(name for name in flops if name in sizes), *(name for name in sizes if name not in flops))
        return tuple(replace(sizes[name], flops=flops.get(name, 0)) for name in order)


def empty_told_of(opened: OpenModel) -> EmptyTold | None:
    """What the diffusion model of `opened` is told of a text; None where it is told a text and no more."""
    family = opened.checkpoint.family
    if family.sampling.reads_prior:
        return partial(empty_text, opened.component(Role.DIFFUSION_MODEL).built.module)
    facts = family.sampling
    is_told = facts.sight is not None and facts.sight.is_told
    seen = (
        {} if facts.sight is None or not is_told else {IMAGE_CONTEXT: _empty_states(opened, facts.sight, facts.video)}
    )
    if not facts.reads_text:
        return lambda tokens: {CONTEXT: seen[IMAGE_CONTEXT]}
    if not family.text_set:
        return None

    def told(tokens: int) -> Mapping[str, Tensor]:
        modules = {opened.place(role): opened.component(role).built.module for role in family.text_encoders}
        return {**empty_told(family.text_set, modules, tokens), **seen}

    return told


def _empty_states(opened: OpenModel, sight: Sight, video: VideoFacts | None) -> Tensor:
    """What a vision encoder says of the images that a run sees, without values."""
    states, width = states_shape(opened.component(Role.VISION_ENCODER).built.module, sight)
    return torch.empty((1, states * (1 if video is None else video.images_seen), width), device=META)


def _empty_seen(opened: OpenModel, seen: Sequence[tuple[int, int]], width: int) -> tuple[SeenImage, ...]:
    """What a text encoder is shown of images seen in these sizes, without values."""
    sight = opened.checkpoint.family.sampling.sight
    if sight is None:
        return empty_images(seen, width)
    states, _ = states_shape(opened.component(Role.VISION_ENCODER).built.module, sight) if seen else (0, 0)
    return tuple(SeenImage(torch.empty((states, width), device=META), 0, 0) for _ in seen)


def _spelled(work: EncodeWork) -> str:
    """A text with words for its embeddings, which take as many tokens."""
    return spelled_out(work.text, {each.name: each.rows for each in work.embeddings})


def _size_of(work: Work) -> tuple[object, ...]:
    """What the activations of `work` depend on, beside the model."""
    match work:
        case EncodeWork():
            return (stage_of(work), work.seen, work.numbered)
        case SeeImageWork():
            return (stage_of(work), Role.VISION_ENCODER, work.width, work.height)
        case SampleWork():
            shown = (work.imaged, work.reference, work.more_references, work.asks_without_image, work.leading)
            reads = (
                work.starts,
                work.masked,
                *shown,
                len(work.regions),
                *((control.content, control.hole) for control in work.controls),
            )
            size = (stage_of(work), role_of(work), work.width, work.height, work.frames)
            return (*size, work.cfg == 1, work.sampler, *reads)
        case EncodeImageWork():
            return (stage_of(work), work.width, work.height, work.frames)
        case DecodeWork():
            return (stage_of(work), work.width, work.height, work.frames, work.leading)


def _usual_tokens(work: Work) -> tuple[int, ...]:
    """Lengths of texts that nobody told."""
    if not isinstance(work, SampleWork):
        return ()
    return (USUAL_TOKENS,) * (1 if work.cfg == 1 else 2)
