"""`ActivationEstimator`: activation bytes of tasks, for planning.

Counted by dry runs of the models' own code, cached, and corrected by measurements. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from modelpool.pool.catalog.estimates.activation_calibration import (
    ActivationCalibration,
    ActivationError,
    ActivationKey,
    measured_activations,
)
from modelpool.pool.catalog.estimates.activation_counts import ActivationCounts
from modelpool.pool.catalog.estimates.counted_options import counted_options
from modelpool.pool.catalog.estimates.stage_peak_bytes import (
    AUDIO_TILES,
    TILES,
    TYPICAL_TOKENS,
    AdapterStage,
    EmptyConditioning,
    TextShape,
    TextStage,
    decode_bytes,
    encode_audio_bytes,
    encode_bytes,
    encode_image_bytes,
    encode_sound_bytes,
    sample_bytes,
    stage_call,
    text_shape,
    tile_slowdown,
    vision_encode_bytes,
    with_image_prompts,
)
from modelpool.pool.families.parts.arguments import PATCH
from modelpool.pool.families.parts.located_family import Architecture
from modelpool.pool.families.parts.two_stages import empty_text
from modelpool.pool.families.text_readings import readings_of
from modelpool.pool.families.transformer_families import TEXT_ROLES
from modelpool.pool.inference.conditioning.image_concat import reference_names
from modelpool.pool.inference.conditioning.image_embeds import use_of
from modelpool.pool.inference.conditioning.micro_conditioning import CONTEXT, IMAGE_CONTEXT, POOLED
from modelpool.pool.inference.controlnets.controlnet_bytes import ControlStage
from modelpool.pool.inference.controlnets.open_controlnet import OpenControlNet
from modelpool.pool.inference.controlnets.open_gligen import OpenGligen
from modelpool.pool.inference.image_prompts.layouts import BlockReading
from modelpool.pool.inference.image_prompts.open_adapter import OpenImagePrompt
from modelpool.pool.inference.pixels.audio_latents import samples_encoded
from modelpool.pool.inference.pixels.decode_parts import largest_tile
from modelpool.pool.inference.pixels.latent_pixels import sampled_shape, sound_length_of
from modelpool.pool.models.components.text.lengths import ReadLength, context_tokens, empty_text_kwargs, length_read
from modelpool.pool.models.components.text.work_reading import reading_of_work
from modelpool.pool.models.components.vision.preprocess import states_shape
from modelpool.pool.models.components.vision.seen_images import empty_seen
from modelpool.pool.models.loading.open_model import OpenModel
from modelpool.pool.models.text.chunks import clip_tokens, split_prompt
from modelpool.pool.models.text.clip_tokenizer import ClipTokenizer
from modelpool.pool.models.text.image_tokens import ImageStates
from modelpool.pool.models.text.templates import template_tokens
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.core.prompt_tokens import NO_TOKENS, ClipTokens, PromptTokens, TokenizedPrompt
from modelpool.pool.values.core.sampling_facts import VideoFacts, VisionEncoderUse
from modelpool.pool.values.core.stage_params import (
    FRAMES,
    SOUND,
    CameraCondition,
    ControlRef,
    DecodeParams,
    EncodeImageParams,
    EncodeParams,
    GligenRef,
    ImagePromptRef,
    KeptSoundCondition,
    MaskCondition,
    ModelRef,
    ModelStageParams,
    SampleParams,
    StartCondition,
    VisionEncodeParams,
    VoiceCondition,
    encoders_run,
    role_of,
    stage_of,
)
from modelpool.pool.values.specs.execution_modes import execution_modes as ways_of
from modelpool.pool.values.specs.spec import ExecutionMode, Role, RunCost, TaskSpec
from modelpool.pool.values.specs.wire_value import evolve
from modelpool.pool.weights.patcher.weight_bytes import module_bytes
from modelpool.pool.weights.plan.eviction_plan import ModuleBytes
from modelpool.pool.weights.tracing.activation_bytes import WITHOUT_MARGIN, StageModule, attention_form, with_margin
from modelpool.pool.weights.tracing.dry_run import META
from modelpool.pool.weights.tracing.meta_cache import MetaCache
from modelpool.pool.weights.tracing.module_flops import module_work
from modelpool.pool.weights.tracing.structure import structure_digest

#: cached texts and sizes
SIZES_REMEMBERED = 4096
#: long texts that are remembered, and the characters above which a text is long: its tokens take up to 100 bytes each
LONG_TEXTS_REMEMBERED, SHORT_CHARACTERS = 16, 2000
#: the row and the task of a text with image prompts, whole numbers, before and after they are selected
_ROW_BYTES = 32
#: time of two calls with one text each relative to one call with both: kernels are less busy.
#: An assumption, not measured on a GPU
APART_SLOWDOWN = 1.2


@dataclass(frozen=True, slots=True)
class _TextRead:
    """A prompt as the text encoders of a model read it."""

    tokens: tuple[PromptTokens, ...]
    shape: TextShape


class ActivationEstimator:
    """Estimates for all models of a catalog, for devices of one kind."""

    def __init__(
        self,
        open_model: Callable[[ModelRef], OpenModel],
        device_kind: str,
        open_control: Callable[[ControlRef], OpenControlNet],
        counts: ActivationCounts | None = None,
        open_image_prompt: Callable[[ImagePromptRef], OpenImagePrompt] | None = None,
        open_gligen: Callable[[GligenRef], OpenGligen] | None = None,
    ) -> None:
        """`counts` may be shared with other estimators, of any kind of device; None for its own. Without
        `open_image_prompt` no work has image prompts, and without `open_gligen` none has texts in boxes."""
        self._open, self._open_control, self._open_image_prompt = open_model, open_control, open_image_prompt
        self._open_gligen = open_gligen
        self._device_kind = device_kind
        self._cache = MetaCache()
        self._counts = ActivationCounts() if counts is None else counts
        self._read: LruCache[tuple[object, ...], str] = LruCache(SIZES_REMEMBERED)
        self._calibration = ActivationCalibration()
        self._texts: LruCache[tuple[object, ...], _TextRead] = LruCache(SIZES_REMEMBERED)
        self._long_texts: LruCache[tuple[object, ...], _TextRead] = LruCache(LONG_TEXTS_REMEMBERED)
        self._tokenizer: ClipTokenizer | None = None

    def tokenize(self, work: EncodeParams) -> TokenizedPrompt:
        """Return the tokens of the text of `work`, and how many of them the diffusion model reads, with images. Raises
        UnusableField as `parse_weights` does, and TokenizerMissing."""
        read = self._text_read(work)
        cut = max((each.cut for each in read.shape.read), default=0)
        usual = read if not work.text else self._text_read(replace(work, text="", embeddings=()))
        return TokenizedPrompt(read.tokens, read.shape.tokens, cut, read.shape == usual.shape)

    def activation_bytes(self, model: ModelRef, work: ModelStageParams, context_tokens: Sequence[int] = ()) -> int:
        """Return the device memory of `work` in full execution, without weights and scratch.

        `context_tokens` are the lengths of the texts that sampling reads; typical lengths if omitted.
        """
        counted_bytes = self.counted_bytes(model, work, context_tokens)
        counted = self._counted_modes(model, work, context_tokens, counted_bytes)
        return self._whole_bytes(model, work, counted_bytes, counted)

    def counted_bytes(self, model: ModelRef, work: ModelStageParams, context_tokens: Sequence[int] = ()) -> int:
        """Return `activation_bytes` as counted, without corrections."""
        return self._mode_bytes(model, work, context_tokens, ExecutionMode(0))

    def execution_modes(
        self, model: ModelRef, work: ModelStageParams, context_tokens: Sequence[int] = ()
    ) -> tuple[ExecutionMode, ...]:
        """Return full execution of `work`, then `divisions`, each with counted and corrected bytes."""
        counted_bytes = self.counted_bytes(model, work, context_tokens)
        counted = self._counted_modes(model, work, context_tokens, counted_bytes)
        whole_bytes = self._whole_bytes(model, work, counted_bytes, counted)
        whole = ExecutionMode(whole_bytes, counted_bytes=counted_bytes)
        return (whole, *self._corrected_modes(model, work, counted, whole_bytes))

    def divisions(
        self, model: ModelRef, work: ModelStageParams, context_tokens: Sequence[int] = ()
    ) -> tuple[ExecutionMode, ...]:
        """Return the divided execution modes of `work`, the least divided first; each needs less than the one before.

        Their selection and order follow the counted bytes: no correction drops one. Parts of a run hold no more than
        the run, so no value exceeds the one before it; the last does not exceed its counted bytes, so that no
        correction makes a task impossible.
        """
        return self.execution_modes(model, work, context_tokens)[1:]

    def _whole_bytes(
        self, model: ModelRef, work: ModelStageParams, counted_bytes: int, counted: Sequence[ExecutionMode]
    ) -> int:
        """Return the bytes of full execution. `counted` are the divided modes."""
        figure_bytes = self._corrected(model, work, ExecutionMode(0), counted_bytes)
        # refusals are based on counted bytes
        return figure_bytes if counted else min(figure_bytes, counted_bytes)

    def _corrected_modes(
        self, model: ModelRef, work: ModelStageParams, counted: Sequence[ExecutionMode], most_bytes: int
    ) -> Iterator[ExecutionMode]:
        for number, mode in enumerate(counted, start=1):
            figure_bytes = self._corrected(model, work, mode, mode.counted_bytes)
            if number == len(counted):
                figure_bytes = min(figure_bytes, mode.counted_bytes)
            most_bytes = min(figure_bytes, most_bytes - 1)
            yield evolve(mode, activation_bytes=most_bytes)

    def learn(self, task: TaskSpec, cost: RunCost) -> None:
        """Calibrate with a successful run of `task` with the cost `cost`.

        Runs that ran out of memory are not used here: the worker knows device, other load and division, and uses such
        runs in its own calibration. Nor are batches: the memory of a single task in a batch is unknown.
        """
        if not cost.shows_activations or not task.uses:
            return
        mode = ways_of(task)[0] if cost.division is None else cost.division
        component, options = task.uses[0].component, task.options
        key = ActivationKey(component, task.stage, self._device_kind, mode.batch, mode.tile, options=options)
        measured = measured_activations(cost, max(use.scratch_bytes for use in task.uses))
        if measured is not None:
            self._calibration.learn(key, mode.estimated_bytes, *measured)

    def errors(self) -> tuple[ActivationError, ...]:
        """Return the errors of counted estimates, by component and stage."""
        return self._calibration.report()

    def _execution_modes(self, model: ModelRef, work: ModelStageParams) -> Iterator[ExecutionMode]:
        """Execution modes that may need less, without sizes."""
        if isinstance(work, SampleParams) and (work.reads_negative or work.regions):
            yield ExecutionMode(0, batch=1, slowdown=APART_SLOWDOWN)
        if isinstance(work, (EncodeImageParams, DecodeParams)) and not _is_sound(work):
            shape, latent = work.shape if isinstance(work, DecodeParams) else work, self._open(model).latent
            latent = latent.of_encoder if isinstance(work, EncodeImageParams) else latent
            cells: tuple[int, ...] = latent.sides(shape.width, shape.height)
            if isinstance(work, DecodeParams) and work.is_tiled:
                cells = largest_tile(work, latent)[-2:]
            tiles = TILES
            if latent.audio is not None and not latent.audio.cells:  # audio of one length is short
                cells, tiles = (self._audio_cells(model, work),), AUDIO_TILES
            yield from (ExecutionMode(0, tile=t, slowdown=tile_slowdown(cells, t)) for t in tiles if t < max(cells))

    def _counted_modes(
        self, model: ModelRef, work: ModelStageParams, context_tokens: Sequence[int], least_bytes: int
    ) -> tuple[ExecutionMode, ...]:
        """Divided modes of `work` with counted bytes, each less than the one before; the whole needs `least_bytes`."""
        found: list[ExecutionMode] = []
        for mode in self._execution_modes(model, work):
            counted_bytes = self._mode_bytes(model, work, context_tokens, mode)
            if counted_bytes < least_bytes:
                found.append(evolve(mode, activation_bytes=counted_bytes, counted_bytes=counted_bytes))
                least_bytes = counted_bytes
        return tuple(found)

    def _mode_bytes(
        self, model: ModelRef, work: ModelStageParams, context_tokens: Sequence[int], mode: ExecutionMode
    ) -> int:
        lengths = tuple(context_tokens) or _typical_tokens(work)
        shape: TextShape | tuple[int, ...] = lengths
        if isinstance(work, EncodeParams):
            shape = self._text_read(work).shape
        # audio depends on the frame rate
        length = 0
        if isinstance(work, SampleParams | DecodeParams):
            length = sound_length_of(work.shape, self._open(model).latent)
        sizes = (*_size_of(work), self._audio_cells(model, work), shape, length, mode.batch, mode.tile)
        attached = (*self._controls_read(work), *_image_prompts_read(work), *_gligen_read(work))
        key = (self._structure_read(model, work), *attached, attention_form(self._device_kind), *sizes)
        return with_margin(self._counts.get(key, lambda: self._counted(model, work, lengths, mode)), self._device_kind)

    def _audio_cells(self, model: ModelRef, work: ModelStageParams) -> int:
        """The cells of an audio latent; 0 for other work."""
        seconds = work.shape.seconds if isinstance(work, SampleParams | DecodeParams) else 0.0
        seconds = work.seconds if isinstance(work, EncodeImageParams) else seconds
        latent = self._open(model).latent
        return latent.audio.cells_of(seconds, latent.downscale) if seconds and latent.audio is not None else 0

    def _structure_read(self, model: ModelRef, work: ModelStageParams) -> str:
        """A digest of everything of `model` that a dry run of `work` reads; the file's hash where that is unknown."""

        def find() -> str:
            opened = self._open(model)
            family = opened.checkpoint.family
            components = [opened.component(role) for role in _roles_read(opened, work)]
            read = [(each.role, each.form.compute_dtype, each.built.module) for each in components]
            facts = (opened.latent, family.sampling, family.text_set, family.text_encoders, family.texts)
            return structure_digest(*facts, *read) or model.sha256

        return self._read.get((model.sha256, stage_of(work), role_of(work)), find)

    def _controls_read(self, work: ModelStageParams) -> Iterator[tuple[str, bool]]:
        """The same for each ControlNet of `work`, and whether it has an inpaint mask."""
        for control in work.controls if isinstance(work, SampleParams) else ():

            def find(control: ControlRef = control) -> str:
                opened = self._open_control(control)
                return structure_digest(opened.form.compute_dtype, opened.module) or repr(control.content)

            yield self._read.get((control.content,), find), control.mask_mode is not None

    def _corrected(self, model: ModelRef, work: ModelStageParams, mode: ExecutionMode, counted_bytes: int) -> int:
        """`counted_bytes` corrected by measurements: upward only to the measured peak of equal runs, since the value
        may divide a task. On kinds without margin, never downward."""
        component = self._open(model).component(role_of(work)).key
        options = work.measured_apart if isinstance(work, EncodeParams | SampleParams | DecodeParams) else ()
        key = ActivationKey(component, stage_of(work), self._device_kind, mode.batch, mode.tile, options=options)
        most_bytes = max(counted_bytes, self._calibration.most_measured(key, counted_bytes))
        figure_bytes = min(self._calibration.corrected(key, counted_bytes), most_bytes)
        return max(figure_bytes, counted_bytes) if self._device_kind in WITHOUT_MARGIN else figure_bytes

    def _counted(self, model: ModelRef, work: ModelStageParams, lengths: Sequence[int], mode: ExecutionMode) -> int:
        opened = self._open(model)
        latent, family = opened.latent, opened.checkpoint.family
        match work:
            case EncodeParams():
                tokens = zip(_encoders_run(opened, work), self._text_read(work).tokens, strict=True)
                stages = [self._text_stage(opened, role, work, own) for role, own in tokens]
                return encode_bytes(stages, work)
            case SampleParams():
                module = self._module(opened, role_of(work))
                text_inputs, controls = (
                    empty_conditioning(opened),
                    [self._control(control) for control in work.controls],
                )
                sampled = sample_bytes(
                    module, work, latent, lengths, mode.batch, family.sampling, text_inputs, controls
                )
                if work.gligen is not None:
                    sampled += self._gligen_bytes(opened, work, work.gligen, mode.batch)
                if not work.image_prompts:
                    return sampled
                return with_image_prompts(sampled, self._adapters(opened, work, max(lengths, default=0)))
            case VisionEncodeParams():
                facts = replace(family.sampling, vision_use=use_of(work, family.sampling))
                return vision_encode_bytes(self._module(opened, role_of(work)), facts, (work.width, work.height))
            case EncodeImageParams() if work.sound:
                return encode_sound_bytes(self._module(opened, role_of(work)), work.sound)
            case EncodeImageParams() if work.seconds:
                samples = samples_encoded(work.seconds, latent)
                return encode_audio_bytes(self._module(opened, role_of(work)), samples, latent, mode.tile)
            case EncodeImageParams():
                latent = latent.of_encoder
                cells = latent.sides(work.width, work.height)
                return encode_image_bytes(self._module(opened, role_of(work)), cells, latent, mode.tile, work.frames)
            case DecodeParams():
                length = 0 if work.part > 1 or work.track == FRAMES else sound_length_of(work.shape, latent)
                shape = () if _is_sound(work) else largest_tile(work, latent)
                return decode_bytes(self._module(opened, role_of(work)), shape, latent, mode.tile, length)

    def _module(self, opened: OpenModel, role: Role) -> StageModule:
        component = opened.component(role)
        return self._stage_module(component.built.module, component.form.compute_dtype)

    def _text_stage(self, opened: OpenModel, role: Role, work: EncodeParams, tokens: PromptTokens) -> TextStage:
        family, module = opened.checkpoint.family, self._module(opened, role)
        if family.architectures[role] is Architecture.TEXT_CONNECTOR:
            return TextStage(module, opened.reading(role).reading, self._load_tokenizer(), tokens)
        config = cast(Any, module.module).config
        learned = {each.name: torch.empty((each.rows, config.hidden_size), device=META) for each in work.embeddings}
        if not family.text_set:
            return TextStage(module, family.texts[role], self._load_tokenizer(), tokens, embeddings=learned)
        text = opened.reading(role, work.lyrics)
        reading = reading_of_work(text.reading, work)
        images = _empty_seen(opened, work.seen, config.hidden_size) if reading.sees else ()
        known = learned if isinstance(tokens, ClipTokens) else {}
        return TextStage(module, reading, text.tokenizer or self._load_tokenizer(), tokens, images, known)

    def _control(self, control: ControlRef) -> ControlStage:
        opened = self._open_control(control)
        stage = self._stage_module(opened.module, opened.form.compute_dtype)
        return ControlStage(stage, control.mask_mode is not None)

    def _adapters(self, opened_model: OpenModel, work: SampleParams, text_tokens: int) -> list[AdapterStage]:
        assert self._open_image_prompt is not None, f"{work} has image prompts"
        found = []
        for prompt in work.image_prompts:
            opened = self._open_image_prompt(prompt)
            module = self._stage_module(opened.module, opened.form.compute_dtype)
            images = max(1, prompt.images)
            # the images of the prompt, and the negative prompt
            queries_bytes = _queries_bytes(opened_model, work, opened.plan.kind.blocks, text_tokens)
            found.append(AdapterStage(module, opened.call_of(1 + images), opened.held_bytes(2, images), queries_bytes))
        return found

    def _gligen_bytes(self, opened: OpenModel, work: SampleParams, ref: GligenRef, batch: int) -> int:
        """What texts in boxes need in addition to the run: the largest of their layers, within a block, and tokens."""
        assert self._open_gligen is not None, f"{work} has texts in boxes"
        gligen = self._open_gligen(ref)
        stage = self._stage_module(gligen.module, gligen.form.compute_dtype)
        height, width = sampled_shape(work, opened.latent)[-2:]
        texts = min(batch or work.texts, work.texts)
        return stage.peak_bytes(gligen.call_of(texts, height * width)) + gligen.held_bytes(2)

    def _stage_module(self, module: nn.Module, compute_dtype: torch.dtype) -> StageModule:
        return StageModule(module, compute_dtype, attention_form(self._device_kind), self._cache)

    def _text_read(self, work: EncodeParams) -> _TextRead:
        family = self._open(work.model).checkpoint.family
        rows = tuple((each.name, each.rows) for each in work.embeddings)

        def read() -> _TextRead:
            if family.text_set:
                return self._read_by_encoders(work, dict(rows))
            tokens = clip_tokens(self._load_tokenizer(), work.text)
            chunks = split_prompt(self._load_tokenizer(), work.text, dict(rows), tokens=tokens)
            return _TextRead((tokens,) * len(family.text_encoders), text_shape(chunks))

        # families without a text set read the same chunks
        text_set = work.model.sha256 if family.text_set else len(family.text_encoders)
        size = None if work.writes is None else (work.writes.width, work.writes.height)
        key = (text_set, work.text, rows, work.is_negative, work.seen, work.numbered, size, work.lyrics)
        texts = self._texts if len(work.text) <= SHORT_CHARACTERS else self._long_texts
        return texts.get(key, read)

    def _read_by_encoders(self, work: EncodeParams, rows: Mapping[str, int]) -> _TextRead:
        """The tokens and the shape of a text that several kinds of encoders read; CLIPs read the same tokens."""
        opened = self._open(work.model)
        family, lengths = opened.checkpoint.family, [0] * len(TEXT_ROLES)
        read: list[ReadLength] = []
        tokens: list[PromptTokens] = []
        counts = [len(image.states_LD) for image in _empty_seen(opened, work.seen, 1)]
        clip: ClipTokens | None = None
        for role in _encoders_run(opened, work):
            own = opened.reading(role, work.lyrics)
            if own.reading.connects:  # it reads the text as the encoder before it
                tokens.append(tokens[-1])
                read.append(read[-1])
                lengths[own.place] = read[-1].tokens
                continue
            reading = reading_of_work(own.reading, work)
            tokenizer = own.tokenizer or self._load_tokenizer()
            if isinstance(tokenizer, ClipTokenizer):
                clip = clip or clip_tokens(tokenizer, work.text)
                tokens.append(clip)
            elif reading.quotes_apart:
                tokens.append(NO_TOKENS)
            else:
                tokens.append(template_tokens(tokenizer, work.text, reading, work.is_negative))
            how = counts if reading.sees else (), tokens[-1], rows, work.is_negative
            read.append(length_read(reading, tokenizer, work.text, *how))
            lengths[own.place] = read[-1].tokens
        readings = readings_of(family.text_set)
        assert readings is not None, f"no readings are defined for {family.text_set}"
        length = context_tokens(family.text_set, lengths[: len(readings)])
        learned = bool(rows) and clip is not None
        return _TextRead(tuple(tokens), TextShape(any(each.weighted for each in read), length, tuple(read), learned))

    def _load_tokenizer(self) -> ClipTokenizer:
        if self._tokenizer is None:
            self._tokenizer = ClipTokenizer.load()
        return self._tokenizer

    def batch_bytes(self, model: ModelRef, work: ModelStageParams, images: int, context_tokens: int) -> int:
        """Return the device memory of one model call for `images` images at once, without weights and scratch. No run
        does that: for comparison only."""
        opened = self._open(model)
        component = opened.component(role_of(work))
        dtype, module = component.form.compute_dtype, component.built.module
        facts = opened.checkpoint.family.sampling
        call = stage_call(work, dtype, opened.latent, facts, context_tokens, images, empty_conditioning(opened))
        counted = self._stage_module(module, dtype).peak_bytes(call)
        return with_margin(counted, self._device_kind)

    def modules(self, model: ModelRef, work: ModelStageParams) -> tuple[ModuleBytes, ...]:
        """Return the modules of the component that `work` runs, with operation counts, in pass order."""
        opened = self._open(model)
        component = opened.component(role_of(work))
        facts = opened.checkpoint.family.sampling
        text_inputs = empty_conditioning(opened)
        call = stage_call(work, component.form.compute_dtype, opened.latent, facts, text_inputs=text_inputs)
        flops = module_work(component.built.module, component.form.compute_dtype, call)
        sizes = {m.name: m for m in module_bytes(component.weights, component.form)}
        order = (*(name for name in flops if name in sizes), *(name for name in sizes if name not in flops))
        return tuple(replace(sizes[name], flops=flops.get(name, 0)) for name in order)


def _queries_bytes(opened: OpenModel, work: SampleParams, blocks: BlockReading | None, text_tokens: int) -> int:
    """Return the bytes that `blocks` of the diffusion model of `opened` keep for image prompts: queries, of all tokens
    of one image or of those that are no text, and the row and the task of the text."""
    if blocks is None:
        return 0
    component = opened.component(role_of(work))
    module: Any = component.built.module
    height, width = sampled_shape(work, opened.latent)[-2:]
    cells = height * width
    for wide, high in reference_names(work).values():
        cells += (high * height // work.shape.height) * (wide * width // work.shape.width)
    tokens = cells // PATCH + (text_tokens if blocks is BlockReading.IN_ATTENTION else 0)
    return tokens * int(module.inner_dim) * component.form.compute_dtype.itemsize + _ROW_BYTES


def _image_prompts_read(work: ModelStageParams) -> Iterator[tuple[str, int]]:
    """Everything of the image prompts of `work` that its activations depend on."""
    for prompt in work.image_prompts if isinstance(work, SampleParams) else ():
        yield prompt.content, prompt.images


def _gligen_read(work: ModelStageParams) -> Iterator[tuple[object, int]]:
    """Everything of the boxes of `work` that its activations depend on."""
    if isinstance(work, SampleParams) and work.gligen is not None:
        yield work.gligen.content, len(work.gligen.boxes)


def empty_conditioning(opened: OpenModel) -> EmptyConditioning | None:
    """Return a function for the text inputs of the diffusion model of `opened`, without values; None if it reads a
    plain text only."""
    family = opened.checkpoint.family
    if family.sampling.is_decoder_stage:
        return partial(empty_text, opened.component(Role.DIFFUSION_MODEL).built.module)
    facts = family.sampling
    is_model_input = facts.vision_use is not None and facts.vision_use.is_model_input
    seen = (
        {}
        if facts.vision_use is None or not is_model_input
        else {IMAGE_CONTEXT: _empty_states(opened, facts.vision_use, facts.video)}
    )
    if not facts.reads_text:
        return lambda tokens: {CONTEXT: seen[IMAGE_CONTEXT]}
    if not family.text_set:
        return None

    def text_inputs(tokens: int) -> Mapping[str, Tensor]:
        modules = {opened.place(role): opened.component(role).built.module for role in family.text_encoders}
        return {**empty_text_kwargs(family.text_set, modules, tokens), **seen}

    return text_inputs


def widths_of(text_inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the widths of the text inputs of a diffusion model, as `pool.values.core.results.Encoded.widths`."""
    states = {name: value for name, value in sorted(text_inputs.items()) if value.is_floating_point()}
    widths = {name: value.shape[-1] for name, value in states.items()}
    return {"context": widths.pop(CONTEXT), "pooled": widths.pop(POOLED, 0), **widths}


def _empty_states(opened: OpenModel, vision_use: VisionEncoderUse, video: VideoFacts | None) -> Tensor:
    """Image embeddings of the vision encoder for one run, without values."""
    states, width = states_shape(opened.component(Role.VISION_ENCODER).built.module, vision_use)
    return torch.empty((1, states * (1 if video is None else video.images_encoded), width), device=META)


def _empty_seen(opened: OpenModel, seen: Sequence[tuple[int, int]], width: int) -> tuple[ImageStates, ...]:
    """Image embeddings that a text encoder reads for images of these sizes, without values."""
    vision_use = opened.checkpoint.family.sampling.vision_use
    if vision_use is None:
        vision = opened.component(Role.VISION_ENCODER).built.module if seen else None
        return () if vision is None else empty_seen(vision, seen, width)
    states, _ = states_shape(opened.component(Role.VISION_ENCODER).built.module, vision_use) if seen else (0, 0)
    return tuple(ImageStates(torch.empty((states, width), device=META), 0, 0) for _ in seen)


def _is_sound(work: ModelStageParams) -> bool:
    """Whether `work` encodes or decodes an audio track alone."""
    if isinstance(work, EncodeImageParams):
        return work.sound > 0
    return isinstance(work, DecodeParams) and work.track == SOUND


def _size_of(work: ModelStageParams) -> tuple[object, ...]:
    """Everything that the activations of `work` depend on besides the model and the ControlNets."""
    match work:
        case EncodeParams():
            written = None if work.writes is None else (work.writes.width, work.writes.height)
            return (stage_of(work), work.seen, work.numbered, written, work.lyrics)
        case VisionEncodeParams():
            return (stage_of(work), Role.VISION_ENCODER, work.width, work.height, work.use)
        case SampleParams():
            images: tuple[object, ...]
            images = (work.image is not None, work.references, work.guidance.without_image, work.shape.leading)
            images = (*images, len(work.guides)) if work.guides else images
            factors = tuple((guide.cells, guide.factor) for guide in work.guides if guide.factor)
            images = (*images, factors) if factors else images
            images = (*images, "camera") if work.has(CameraCondition) else images
            images = (*images, "sound") if work.has(KeptSoundCondition) else images
            images = (*images, *(("voice", voice.length) for voice in work.all_of(VoiceCondition)))
            reads = (
                work.has(StartCondition),
                work.has(MaskCondition),
                *images,
                len(work.regions),
            )
            size = (stage_of(work), role_of(work), work.shape.width, work.shape.height, work.shape.frames)
            return (*size, work.reads_negative, work.schedule.sampler, counted_options(work.options), *reads)
        case EncodeImageParams():
            sound = ("sound", work.sound) if work.sound else ()
            return (stage_of(work), work.width, work.height, work.frames, *sound)
        case DecodeParams():
            sizes: tuple[object, ...]
            sizes = (stage_of(work), work.shape.width, work.shape.height, work.shape.frames, work.shape.leading)
            # only the first part of a decode has the audio track
            sizes = (*sizes, work.track) if work.track else sizes
            return (*sizes, work.tile, work.tile_frames, work.part <= 1) if work.is_tiled else sizes


def _roles_read(opened: OpenModel, work: ModelStageParams) -> tuple[Role, ...]:
    """The components that a dry run of `work` reads: what it runs, and what its inputs come from."""
    family = opened.checkpoint.family
    if isinstance(work, VisionEncodeParams | EncodeImageParams | DecodeParams):
        return (role_of(work),)
    sees = family.sampling.vision_use is not None and Role.VISION_ENCODER in opened.checkpoint.roles
    seen = (Role.VISION_ENCODER,) if sees else ()
    runs = (role_of(work),) if isinstance(work, SampleParams) else ()
    return (*runs, *(family.text_encoders if family.text_set or not runs else ()), *seen)


def _encoders_run(opened: OpenModel, work: EncodeParams) -> tuple[Role, ...]:
    """The text encoders that `work` runs."""
    family = opened.checkpoint.family
    return encoders_run(work, family.text_encoders, family.sampling)


def _typical_tokens(work: ModelStageParams) -> tuple[int, ...]:
    """Typical text lengths if they are unknown."""
    if not isinstance(work, SampleParams):
        return ()
    return (TYPICAL_TOKENS,) * (2 if work.reads_negative else 1)
