"""The stages encode, sample and decode on components that are ready to run, for one task or a batch. Plain functions
without memory management.

Shape legend: B batch, L tokens, D text width, V width of a pooled text, C latent channels, H W height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelpool.pool.families.parts.audio_tracks import SoundTrack
from modelpool.pool.families.parts.text_reading import Reading, with_layers_skipped
from modelpool.pool.families.text_readings import readings_of
from modelpool.pool.inference.conditioning.conditions import Condition
from modelpool.pool.inference.conditioning.first_frame import first_frame_inputs
from modelpool.pool.inference.conditioning.image_concat import ImageInputs, image_inputs, repeats_image
from modelpool.pool.inference.conditioning.image_embeds import texts_read
from modelpool.pool.inference.conditioning.micro_conditioning import SILENCE, STEP, UNCONDITIONAL, micro_conditioning
from modelpool.pool.inference.conditioning.regions import Regions, region_weights
from modelpool.pool.inference.conditioning.starts import StartLatent, start_of
from modelpool.pool.inference.controlnets.controlnet_run import controls_of
from modelpool.pool.inference.extensions.run_extension import run_extension
from modelpool.pool.inference.extensions.step_clock import StepClock
from modelpool.pool.inference.guidance.call_model import call_model, model_inputs, step_input, tokens_of
from modelpool.pool.inference.guidance.guided_steps import ModelCall, Prompts
from modelpool.pool.inference.guidance.model_guiders import FirstFrame, guider_of
from modelpool.pool.inference.guidance.prepared_prompts import prepared_prompts
from modelpool.pool.inference.guidance.sampling_run import ImagesToDenoise, denoise_images
from modelpool.pool.inference.guidance.text_loras import with_text_loras
from modelpool.pool.inference.image_prompts.prompt_run import NO_IMAGE_PROMPTS, image_prompts_of
from modelpool.pool.inference.pixels.image_ops import HALF
from modelpool.pool.inference.pixels.latent_pixels import as_bytes, decoded, encoded, sampled_shape, to_model_scale
from modelpool.pool.inference.pixels.tiled import HOST
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.inference.sampling.partial_run import (
    forgotten_if_failed,
    partial_run_of,
    run_states,
    sampler_states,
)
from modelpool.pool.inference.sampling.schedules import FlowTable, levels_of, sigma_table
from modelpool.pool.models.components.text.connectors import connected
from modelpool.pool.models.components.text.text_conditioning import text_kwargs
from modelpool.pool.models.components.text.work_reading import reading_of_work
from modelpool.pool.models.components.vae.audio_decoders import sound_of
from modelpool.pool.models.text.clip_tokenizer import ClipTokenizer
from modelpool.pool.models.text.embeddings import Embedding
from modelpool.pool.models.text.encode import AnyTokenizer, ReadText, match_lengths, read_texts
from modelpool.pool.models.text.image_tokens import ImageStates
from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.values.core.family_facts import PLAIN_TEXT, LatentFacts, TextFacts
from modelpool.pool.values.core.sampling_facts import PLAIN_SAMPLING, SamplingFacts
from modelpool.pool.values.core.stage_params import (
    AudioSamples,
    Encoded,
    EncodeParams,
    ImageEmbeds,
    ImagePixels,
    Latent,
    Mask,
    Output,
    PixelArray,
    RunHooks,
    RunState,
    SampleParams,
    SamplerState,
    VideoFrames,
)
from modelpool.pool.values.core.stopping import stop_check
from modelpool.pool.values.core.task_inputs import IMAGE, LYRICS, REGION_MASK, TaskInputs, numbered
from modelpool.pool.values.specs.spec import ExecutionMode
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher
from modelpool.pool.weights.patcher.scheduled_patches import PatchesAtStep, scheduled_patches

#: amplitude of clips that are taken for silence. Source: diffusers' AceStepPipeline
SMALLEST_PEAK = 1e-6


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """A text encoder of a model and its reading. `place` is its index among the encoders of the family, `name` its name
    in textual inversions; `tokenizer` is set if it is not CLIP's."""

    patcher: ModelPatcher
    facts: TextFacts | Reading = PLAIN_TEXT
    place: int = 0
    tokenizer: AnyTokenizer | None = None
    name: str = "clip_l"


def encode(
    work: EncodeParams, encoders: Sequence[TextEncoder], tokenizer: ClipTokenizer, hooks: RunHooks, text_set: str = ""
) -> Encoded:
    """Encode the text of `work` for the diffusion model: the outputs of `encoders`, concatenated or, with `text_set`,
    combined as the family requires. One step, or one for each token that is written. Raises Stopped at a layer."""
    return encode_batch((work,), encoders, tokenizer, hooks, text_set)[0]


def encode_batch(
    works: Sequence[EncodeParams],
    encoders: Sequence[TextEncoder],
    tokenizer: ClipTokenizer,
    hooks: RunHooks,
    text_set: str = "",
    embeddings: Sequence[Embedding] = (),
    images: Sequence[ImageEmbeds] = (),
) -> tuple[Encoded, ...]:
    """`encode` for each of `works`, which differ in their texts, in one run. `embeddings` are the textual inversions
    that the texts name, `images` the reference images that the text encoders read."""
    texts, negative = [work.text for work in works], [work.is_negative for work in works]
    read: list[tuple[ReadText, ...]] = []
    for number, encoder in enumerate(encoders):
        facts = with_layers_skipped(encoder.facts, works[0].layers_skipped)
        if isinstance(facts, Reading):
            facts = reading_of_work(facts, works[0])
        with encoder.patcher.running(stop_check(hooks)) as module:
            if isinstance(facts, Reading) and facts.connects:
                read.append(connected(module, read[-1], encoder.patcher.compute_dtype))
                continue
            own, known = encoder.tokenizer or tokenizer, {}
            if embeddings and isinstance(own, ClipTokenizer):
                config: Any = module.config  # transformers is not typed
                known = {each.name: each.for_encoder(encoder.name, config.hidden_size) for each in embeddings}
            device = encoder.patcher.device
            image_states = [ImageStates(torch.from_numpy(each.states_LD.copy()), *each.grid) for each in images]
            sees = isinstance(facts, Reading) and facts.sees
            how: dict[str, Any] = {"embeddings": known, "negative": negative, "images": image_states if sees else ()}
            how["tokens"] = [work.tokens[number] if work.tokens else None for work in works]
            how |= {"writes": works[0].writes, "on_token": hooks.on_step}
            read.append(read_texts(module, own, texts, device, facts, **how))
    if works[0].writes is None:  # otherwise each token was a step
        hooks.on_step(1, 1)
    by_text = list(zip(*read, strict=True))
    if text_set:
        places = [encoder.place for encoder in encoders]
        return tuple(_joined_states(text_set, dict(zip(places, parts, strict=True))) for parts in by_text)
    return tuple(_encoded(parts) for parts in by_text)


def _joined_states(text_set: str, parts: Mapping[int, ReadText]) -> Encoded:
    """Combine the outputs of the available encoders for one text, as the family requires."""
    members = readings_of(text_set)
    assert members is not None, f"no readings are defined for {text_set}"
    kwargs = {
        name: value[0].to("cpu")
        for name, value in text_kwargs(text_set, [parts.get(i) for i in range(len(members))]).items()
    }
    context, pooled = kwargs.pop("context"), kwargs.pop("pooled", None)
    others = {name: value.numpy() for name, value in kwargs.items()}
    return Encoded(context.numpy(), None if pooled is None else pooled.numpy(), others)


def _encoded(parts: Sequence[ReadText]) -> Encoded:
    """Concatenate the outputs of the text encoders for one text."""
    context_LD = torch.cat([part.context_LD.to("cpu") for part in parts], dim=-1)
    pooled = [part.pooled_V.to("cpu") for part in parts if part.pooled_V is not None]
    return Encoded(context_LD.numpy(), torch.cat(pooled).numpy() if pooled else None)


def sample(
    work: SampleParams,
    inputs: TaskInputs,
    diffusion_model: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None = None,
    facts: SamplingFacts = PLAIN_SAMPLING,
) -> Latent:
    """Denoise the latent of `work` from its seed, and from its start latent if it has one. Raises Stopped at a step or
    layer.

    With `division.batch` 1 the two texts are evaluated separately, each with its own length. `facts` are those of the
    model.
    """
    (made,) = sample_batch((work,), (inputs,), diffusion_model, latent, hooks, division, facts)
    assert isinstance(made, Latent), f"a partial run has no decodable latent: {work}"
    return made


def sample_batch(
    works: Sequence[SampleParams],
    inputs: Sequence[TaskInputs],
    diffusion_model: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None = None,
    facts: SamplingFacts = PLAIN_SAMPLING,
    controls: Sequence[ModelPatcher] = (),
    resumed: Sequence[RunState] = (),
    patches_at: PatchesAtStep | None = None,
    adapters: Sequence[ModelPatcher] = (),
    cache_bytes: int = 0,
    silence_1LC: Tensor | None = None,
) -> tuple[Latent | SamplerState | RunState, ...]:
    """`sample` for each of `works`, which differ in their seeds and texts, in one run: `denoise_images`. `controls` are
    the ControlNets of the tasks. Results that another expert continues are `SamplerState`. The run resumes from
    `resumed`, one state for each task, all at one step; if it pauses (`hooks.should_pause`), its results are such
    states. `patches_at`: the patches of the diffusion model change over the steps or from text to text. `adapters` are
    those of the image prompts of the tasks. `cache_bytes` of the device are for patched weights that the next step
    needs again. `silence_1LC` is the latent of silence, for a model of music whose file has none.

    All prompts have one length, and so have all negative prompts. Raises CorruptFile if any latent is not finite.
    """
    work = works[0]
    # a model for one of the texts, and another one for the negative text
    max_batch = 1 if facts.has_unconditional else 0 if division is None else division.batch
    shape_CHW, track = sampled_shape(work, latent), SoundTrack.of(facts.video, work.shape.frames, work.shape.frame_rate)
    cells = latent.sides(work.shape.width, work.shape.height)
    start = start_of(works, inputs, cells)
    if not work.schedule.steps_run:
        return _unsampled(works, start, shape_CHW, latent)
    image_values = image_inputs(works, inputs, facts, latent, cells)
    prompts = _prompts(works, inputs, max_batch != 1, facts, image_values, cells, shape_CHW)
    done = resumed[0].step if resumed else 0
    image_prompts = image_prompts_of(works, inputs, adapters, stop_check(hooks)) if adapters else NO_IMAGE_PROMPTS
    prompts, diffusion_model = image_prompts.added_to(prompts), image_prompts.added_to_model(diffusion_model)
    has_text_loras = any(lora.only for lora in work.loras)
    prompts = with_text_loras(prompts, work) if has_text_loras else prompts
    speaking = controls_of(works, inputs, controls, latent, prompts.cond, stop_check(hooks), done)
    dtype = diffusion_model.compute_dtype
    device = diffusion_model.device
    part = partial_run_of(works, inputs, device, resumed)
    clock, options, extension = StepClock(work.schedule, part), diffusion_model.model_options, None
    if not work.options.is_empty:
        extension = run_extension(work.options, options, diffusion_model.module, facts.model, clock, track)
        hooks, options = extension.limited(hooks), extension.model_options
        max_batch = 1 if extension.texts_apart else max_batch
    part.should_pause = hooks.should_pause
    table = sigma_table(facts.noise.shifted_by(work.schedule.shift), tokens_of(facts, work), work.schedule.steps)
    levels = levels_of(work.schedule, table).tolist() if facts.knows_steps else []
    # all others change the module by themselves, or read more than the inputs of a call
    captures = extension is None and not controls and not adapters and patches_at is None
    with (
        diffusion_model.running(stop_check(hooks), options, captures) as module,
        nullcontext() if extension is None else extension.installed(module),
        scheduled_patches(diffusion_model, patches_at, cache_bytes) as patches,
    ):
        more = {} if silence_1LC is None else {SILENCE: silence_1LC}
        prompts = prepared_prompts(facts, module, prompts, shape_CHW, dtype, device, more)

        def predict_noise(x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor, **kwargs: Tensor) -> Tensor:
            patches.begin_call(work.schedule.first_step + part.done)
            image_prompts.begin_call(part.done, kwargs)
            x_BCHW, context_BLD = x_BCHW.to(dtype), context_BLD.to(dtype)
            if levels:
                assert isinstance(table, FlowTable), f"{facts.model} reads the levels of a step, which only flows have"
                start, end = levels[clock.now : clock.now + 2]
                kwargs[STEP] = step_input((start, end), table.shift, len(x_BCHW))
            residuals = speaking.residuals(module, x_BCHW, timestep_B, context_BLD, kwargs)
            return call_model(facts, module, x_BCHW, timestep_B, context_BLD, kwargs, residuals)

        call = ModelCall(
            predict_noise,
            table,
            facts.prediction,
            options,
            apply_hooks=patches.begin_texts if has_text_loras else None,
            max_batch=max_batch,
        )
        with forgotten_if_failed(part):
            samples_BCHW = denoise_images(
                ImagesToDenoise(work, [each.seed for each in works], shape_CHW, 0 if track is None else track.cells),
                prompts,
                call,
                guider_of(
                    facts, work, prompts.cond, (len(works), *shape_CHW), device, part.guidance, lambda: clock.now
                ),
                device,
                speaking.counting(hooks),
                start,
                FirstFrame.of(facts, work, prompts.cond),
                part,
            )
    _check_finite(samples_BCHW, work)
    if part.paused:
        return run_states(part, work)
    if work.schedule.switch and not work.schedule.low_noise:
        return sampler_states(samples_BCHW, part.memory)
    if track is not None:
        return _latents_with_sound(samples_BCHW, track)
    kept_BCHW = samples_BCHW[:, :, work.shape.leading - work.leading_kept :].contiguous()
    return tuple(Latent(samples_CHW.numpy()) for samples_CHW in kept_BCHW.unbind())


def _check_finite(samples_BCHW: Tensor, work: SampleParams) -> None:
    """Raise CorruptFile for a latent with NaN or infinity."""
    if not torch.isfinite(samples_BCHW).all():
        loras = "".join(f" with LoRA {lora.name!r} at {lora.strength}" for lora in work.loras)
        raise CorruptFile(f"model {work.model.name!r}{loras}: found a latent with NaN or infinity, expected numbers")


def _unsampled(
    works: Sequence[SampleParams], start: StartLatent, shape_CHW: tuple[int, ...], latent: LatentFacts
) -> tuple[Latent, ...]:
    """Return the latents of runs without a step: those that they start from, or latents that are zero for the VAE."""
    found_BCHW = start.latent_BCHW
    if found_BCHW is None:
        found_BCHW = to_model_scale(torch.zeros(len(works), *shape_CHW), latent)
    kept_BCHW = found_BCHW[:, :, works[0].shape.leading - works[0].leading_kept :].contiguous()
    return tuple(Latent(samples_CHW.numpy()) for samples_CHW in kept_BCHW.unbind())


def _latents_with_sound(samples_BCTHW: Tensor, track: SoundTrack) -> tuple[Latent, ...]:
    """Return the latents of videos that were sampled together with their audio."""
    video_BCTHW, sound_BLA = (part.contiguous() for part in track.parted(samples_BCTHW))
    pairs = zip(video_BCTHW.unbind(), sound_BLA.unbind(), strict=True)
    return tuple(Latent(video_CTHW.numpy(), sound_LA.numpy()) for video_CTHW, sound_LA in pairs)


def _prompts(
    works: Sequence[SampleParams],
    inputs: Sequence[TaskInputs],
    matched: bool,
    facts: SamplingFacts,
    image_values: ImageInputs,
    cells: tuple[int, int],
    shape_CHW: tuple[int, ...],
) -> Prompts:
    """Conditions of the batch: prompts, negative prompts and region texts, each with the other inputs of the model,
    for latents of `shape_CHW`."""
    read = [texts_read(work, each, facts) for work, each in zip(works, inputs, strict=True)]
    # repeating a text changes nothing with cross-attention (UNets), but does with joint attention
    count = len(works[0].regions)
    own = [each[: len(each) - count] for each in read]
    # of the prompt and of the negative prompt; a third one is that of a prediction without images
    texts = [_texts(each[:2], matched and not facts.model) for each in own]
    negative = min(2, len(own[0])) - 1
    cond_BLD, uncond_BLD = _stacked([cond for cond, _ in texts]), _stacked([uncond for _, uncond in texts])
    assert cond_BLD is not None, "sampling reads a prompt"
    width, height = works[0].shape.width, works[0].shape.height
    if facts.model:
        model_kwargs = [model_inputs(facts, [each[place] for each in read], works[0]) for place in range(len(read[0]))]
    else:
        pooled = [_stacked([_pooled(each[place]) for each in read]) for place in range(len(read[0]))]
        model_kwargs = [
            micro_conditioning(facts.size_conditions, p, width, height, 0 < n < len(own[0]))
            for n, p in enumerate(pooled)
        ]
    without, without_image_BLD = image_values.without, None
    if len(own[0]) > 2:
        without, without_image_BLD = model_kwargs[2], _stacked_texts([each[2] for each in own])
    model_kwargs = [{**kwargs, **image_values.model_kwargs} for kwargs in model_kwargs]
    if facts.reads_lyrics:
        lyrics_BLD = _stacked_texts([each.read(LYRICS, Encoded) for each in inputs])
        model_kwargs = [{**kwargs, LYRICS: lyrics_BLD} for kwargs in model_kwargs]
    if negative:
        model_kwargs[negative] |= image_values.negative
        if facts.has_unconditional:
            model_kwargs[negative] |= {UNCONDITIONAL: torch.ones(len(works), dtype=torch.bool)}
    if works[0].image is not None and facts.video is not None and not repeats_image(facts):
        first = torch.stack([torch.from_numpy(each.read(IMAGE, Latent).samples_CHW.copy()) for each in inputs])
        beginning = first_frame_inputs(facts.video, first, shape_CHW[1], works[0].image.ends)
        model_kwargs = [{**kwargs, **beginning} for kwargs in model_kwargs]
    cond, places = Condition(cond_BLD, model_kwargs=model_kwargs[0]), range(len(own[0]), len(read[0]))
    uncond = None if uncond_BLD is None else Condition(uncond_BLD, model_kwargs=model_kwargs[negative])
    if facts.learned_negative and works[0].reads_negative:
        uncond = cond  # until the model replaces it
    regional = tuple(
        Condition(_stacked_texts([each[place] for each in read]), model_kwargs=model_kwargs[place]) for place in places
    )
    if not regional:
        return Prompts(cond, uncond, without_image=without, without_image_BLD=without_image_BLD)
    areas = works[0].regions
    drawn = [numbered(REGION_MASK, number) for number, area in enumerate(areas) if area.box is None]
    masks = [[each.read(name, Mask) for name in drawn] for each in inputs]
    return Prompts(cond, uncond, Regions(regional, region_weights(areas, masks, cells)), without, without_image_BLD)


def _stacked_texts(texts: Sequence[Encoded]) -> Tensor:
    """Stack texts of equal length, one per image, to a batch."""
    return torch.stack([torch.from_numpy(text.context_LD.copy()) for text in texts])


def decode(
    sampled: Latent, vae: ModelPatcher, latent: LatentFacts, hooks: RunHooks, division: ExecutionMode | None = None
) -> ImagePixels:
    """Decode a latent to pixels. One step, or one per tile. Raises Stopped at a tile or layer.

    `division.tile` is the tile edge; tiles overlap by a quarter of it. A tile as large as the latent changes nothing.
    """
    image = decode_batch((sampled,), vae, latent, hooks, division)[0]
    assert isinstance(image, ImagePixels), "a video latent is decoded by `decode_batch`"
    return image


def decode_batch(
    sampled: Sequence[Latent],
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None = None,
    frame_rate: float = 0.0,
    seconds: float = 0.0,
    leading: int = 0,
) -> tuple[Output, ...]:
    """`decode` for each of `sampled`, latents of equal size, in one run; video latents become videos, with their audio
    track if they have one, audio latents audio of `seconds`. The first `leading` frames are dropped."""
    return begin_decode_batch(sampled, vae, latent, hooks, division, frame_rate, seconds, leading, HOST)()


def begin_decode_batch(
    sampled: Sequence[Latent],
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None,
    frame_rate: float,
    seconds: float,
    leading: int,
    into: torch.device,
) -> Callable[[], tuple[Output, ...]]:
    """Begin `decode_batch`: images and videos are moved to the device `into`, which may still compute them then.
    Returns a function that moves them on to the host and returns the results."""
    scaled_BC = torch.stack([torch.from_numpy(each.samples_CHW.copy()) for each in sampled])
    if latent.audio is not None:
        rate, peak = latent.audio.samples_per_second, latent.audio.peak
        samples_BC = decoded(scaled_BC, vae, latent, hooks, division)
        return lambda: tuple(_audio(audio_CS, int(seconds * rate), rate, peak) for audio_CS in samples_BC.unbind())
    sounds = _sounds(sampled, vae, hooks)
    # bytes are made on the device: a quarter of what float32 is on the bus, and no passes on the CPU
    levels_BC = decoded(scaled_BC, vae, latent, hooks, division, as_bytes, into)

    def outputs() -> tuple[Output, ...]:
        bytes_BC = levels_BC.cpu()
        if bytes_BC.dim() == 5:
            pairs = zip(bytes_BC.unbind(), sounds, strict=True)
            return tuple(VideoFrames(_own(video_THWC[leading:]), frame_rate, sound) for video_THWC, sound in pairs)
        return tuple(ImagePixels(_own(image_HWC)) for image_HWC in bytes_BC.unbind())

    return outputs


def vae_encode(
    image: ImagePixels,
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    seed: int | None = None,
    division: ExecutionMode | None = None,
    hidden: Mask | None = None,
    shaken: tuple[float, int] = (0.0, 0),
    bright: bool = False,
    black: bool = False,
) -> Latent:
    """Encode pixels to a latent in the scale of the diffusion model: the mean of the VAE posterior or, with `seed`, a
    sample with the noise of that seed. One step, or one per tile; `division.tile` is in latent cells here too. Pixels
    where `hidden` is at least half white become grey, or black with `black`. `shaken` is the standard deviation of
    noise on the pixels, which are in [-1, 1], and its seed; `bright` as in `EncodeImageParams`.

    Raises UnusableField for a size that is not a whole number of latent cells, CorruptFile for a result with NaN or
    infinity, and Stopped at a tile or layer.
    """
    pixels_BCHW = torch.from_numpy(image.pixels_HWC.copy()).permute(2, 0, 1)[None].float()
    # Source: the inference code of Stability-AI/sd3.5, for edges: 255 times an image from 0 to 1, halved, and a half
    pixels_BCHW = pixels_BCHW * 0.5 + 0.5 if bright else pixels_BCHW / 127.5 - 1.0
    strength, own_seed = shaken
    if strength:
        pixels_BCHW = pixels_BCHW + strength * ImageNoise(own_seed).draw(tuple(pixels_BCHW.shape))
    if hidden is not None:
        pixels_BCHW = pixels_BCHW.masked_fill(torch.from_numpy(hidden.values_HW >= HALF), -1.0 if black else 0.0)
    noise = None if seed is None else ImageNoise(seed)
    return _finite_latent(encoded(pixels_BCHW, vae, latent, hooks, noise, division), vae)


def vae_encode_beginning(
    image: ImagePixels,
    frames: int,
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None = None,
    last: ImagePixels | None = None,
) -> Latent:
    """Encode a video of `frames` frames: `image` first, `last` last, the others grey. As `vae_encode`."""
    first_CHW = torch.from_numpy(image.pixels_HWC.copy()).permute(2, 0, 1).float() / 127.5 - 1.0
    video_BCTHW = torch.zeros((1, first_CHW.shape[0], frames, *first_CHW.shape[1:]))
    video_BCTHW[0, :, 0] = first_CHW
    if last is not None:
        video_BCTHW[0, :, -1] = torch.from_numpy(last.pixels_HWC.copy()).permute(2, 0, 1).float() / 127.5 - 1.0
    return _finite_latent(encoded(video_BCTHW, vae, latent, hooks, None, division), vae)


def _finite_latent(samples_BC: Tensor, vae: ModelPatcher) -> Latent:
    if not torch.isfinite(samples_BC).all():
        raise CorruptFile(f"VAE {vae.key}: found a latent with NaN or infinity, expected numbers")
    return Latent(samples_BC[0].contiguous().numpy())


def _texts(inputs: tuple[Encoded, ...], matched: bool) -> tuple[Tensor, Tensor | None]:
    """Prompt and negative prompt of one image; `matched` brings them to one length if possible."""
    contexts = [torch.from_numpy(i.context_LD.copy()) for i in inputs]
    cond_LD, uncond_LD = contexts[0], contexts[1] if len(contexts) > 1 else None
    if uncond_LD is None or not matched:
        return cond_LD, uncond_LD
    return match_lengths(cond_LD, uncond_LD)


def _pooled(text: Encoded) -> Tensor | None:
    return None if text.pooled_V is None else torch.from_numpy(text.pooled_V.copy())


def _stacked(texts: Sequence[Tensor | None]) -> Tensor | None:
    """Stack texts of equal length to a batch; None if there are none."""
    found = [text_LD for text_LD in texts if text_LD is not None]
    assert len(found) in (0, len(texts)), "some images of a batch have inputs that others lack"
    return torch.stack(found) if found else None


def _sounds(sampled: Sequence[Latent], vae: ModelPatcher, hooks: RunHooks) -> tuple[AudioSamples | None, ...]:
    """Return the audio track of each of `sampled`; None for those without, and for VAEs that decode none."""
    latents = [torch.from_numpy(each.sound_LA.copy()) for each in sampled if each.sound_LA is not None]
    sounding = sound_of(vae.module) is not None and len(latents) == len(sampled)
    if not sounding:
        return (None,) * len(sampled)
    with vae.running(stop_check(hooks)) as module:
        decoder = sound_of(module)
        assert decoder is not None, "the module of the patcher"
        samples_BCS = decoder(torch.stack(latents).to(vae.device), vae.compute_dtype).float().cpu()
        rate = decoder.samples_per_second
    return tuple(_audio(samples_CS, samples_CS.shape[1], rate) for samples_CS in samples_BCS.unbind())


def _audio(samples_CS: Tensor, count: int, samples_per_second: int, peak: float = 0.0) -> AudioSamples:
    """The first `count` decoded samples, or all if there are fewer; with a `peak`, scaled to that amplitude."""
    if peak:
        samples_CS = samples_CS.float() * (peak / samples_CS.float().abs().amax().clamp(min=SMALLEST_PEAK))
    return AudioSamples(samples_CS[:, :count].T.float().contiguous().numpy(), samples_per_second)


def _own(levels: Tensor) -> PixelArray:
    """The bytes of one image or video, without those of the rest of its batch."""
    found: PixelArray = (
        levels.numpy() if levels.numel() == levels.untyped_storage().nbytes() else levels.clone().numpy()
    )
    return found
