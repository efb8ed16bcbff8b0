"""ComfyUI nodes that sample: latents, noise, noise levels, guiders and samplers. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from statistics import NormalDist
from typing import Any

from modelpool.actors.http.comfy.comfy_node_types import (
    MAX_BATCH,
    MAX_SEED,
    MAX_SIDE,
    NO_NEGATIVE_BOXES,
    SAMPLER_NAMES,
    SCHEDULE_NAMES,
    Builder,
    NodeInput,
    NodeType,
    NodeUnsupported,
    combo,
    flag,
    link,
    node_row,
    number,
    only_in_workflows,
    sound_latent,
    warn,
    whole,
)
from modelpool.actors.http.comfy.comfy_request_fields import GUIDANCE_OPTIONS
from modelpool.actors.http.comfy.comfy_text_nodes import with_video, with_whole
from modelpool.actors.http.comfy.comfy_values import (
    BlankLatent,
    EncodedImage,
    GuiderValue,
    LatentValue,
    ModelSampling,
    ModelValue,
    NoiseLevels,
    SampledLatent,
    SamplerValue,
    ScaledLatent,
    TextValue,
    VideoUse,
    is_first_frame,
)
from modelpool.pool.inference.sampling.sampler_names import MAX_STEPS
from modelpool.pool.values.core.errors import counted

_SIZE = (whole("width", 512, 16, MAX_SIDE), whole("height", 512, 16, MAX_SIDE))
_BLANK = (*_SIZE, whole("batch_size", 1, 1, MAX_BATCH))
_UPSCALE = combo("upscale_method", ("nearest-exact", "bilinear", "area", "bicubic", "bislerp"))
_ON_OFF = ("enable", "disable")
#: the size of images with levels around `mu`, and bounds of logits. Source: diffusers' Ideogram4Pipeline
_SIZE_OF_MEAN, _LEAST_LOGIT, _MOST_LOGIT = 512 * 512, -7.5, 9.0
#: the largest scale of the last steps of Ideogram 4 without CFGOverride
_LAST_SCALE = 3.0
_CFG = number("cfg", 8.0, 1.0, 100.0)
_TEXTS = (link("positive", "CONDITIONING"), link("negative", "CONDITIONING"))
_SAMPLING = (
    whole("steps", 20, 1, MAX_STEPS),
    _CFG,
    combo("sampler_name", SAMPLER_NAMES),
    combo("scheduler", SCHEDULE_NAMES),
    *_TEXTS,
    link("latent_image", "LATENT"),
)
_MODEL, _SIGMAS = link("model", "MODEL"), link("sigmas", "SIGMAS")
#: the levels of Stable Diffusion: betas from start to end over 1,000 steps, linear in their root. SD Turbo and SDXL
#: Turbo were distilled at every hundredth step. Source: the configurations of both models
_BETAS, _TRAINED_STEPS, _TURBO_STEPS = (0.00085, 0.012), 1000, 10


def _blank(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (BlankLatent(given["width"], given["height"], given["batch_size"]),)


def repeated(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return empty latents, repeated. Raises NodeUnsupported."""
    latent, amount = given["samples"], given["amount"]
    if not isinstance(latent, BlankLatent):
        raise NodeUnsupported("samples: expected empty latents")
    if latent.count * amount > MAX_BATCH:
        raise NodeUnsupported(f"amount: found {latent.count * amount} images, expected up to {MAX_BATCH}")
    return (replace(latent, count=latent.count * amount),)


def _with_noise_mask(given: Mapping[str, Any]) -> tuple[Any, ...]:
    latent = given["samples"]
    if not isinstance(latent, EncodedImage):
        raise NodeUnsupported("samples: expected the latents of an image, from VAEEncode")
    return (replace(latent, mask=given["mask"]),)


def _scaled(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (ScaledLatent(_sampled_input(given), given["scale_by"], method=given["upscale_method"]),)


def _scaled_to(given: Mapping[str, Any]) -> tuple[Any, ...]:
    latent = _sampled_input(given)
    scale = scale_to(latent, given["width"], given["height"])
    return (ScaledLatent(latent, scale, method=given["upscale_method"]),)


def scale_to(latent: SampledLatent, width: int, height: int) -> float:
    """Return the factor by which images of `latent` get a size. Raises NodeUnsupported if it is unknown, or not the
    same for both sides."""
    start = latent.start
    if not isinstance(start, BlankLatent):
        raise NodeUnsupported("expected images that began with empty latents; scale others by a factor")
    if not width or not height:
        return max(width / start.width, height / start.height)
    factors = width / start.width, height / start.height
    if factors[0] != factors[1]:
        raise NodeUnsupported(
            f"width, height: found the factors {factors[0]:g} and {factors[1]:g}, expected equal ones"
        )
    return factors[0]


def _sampled_input(given: Mapping[str, Any]) -> SampledLatent:
    return complete_latent(given["samples"])


def complete_latent(latent: object) -> SampledLatent:
    """Return the latents of a sampler that ran to the end. Raises NodeUnsupported."""
    if not isinstance(latent, SampledLatent):
        raise NodeUnsupported("samples: expected the latents of a sampler")
    if latent.stopped_at is not None:
        raise NodeUnsupported(f"samples: node {latent.node_id} stops at step {latent.stopped_at}: noise is left")
    return latent


def _ksampler(given: Mapping[str, Any]) -> tuple[Any, ...]:
    levels = denoised_levels(given["scheduler"], given["steps"], given["denoise"])
    return (_sampled(given, given["seed"], levels, given["latent_image"]),)


def denoised_levels(schedule: str, steps: int, denoise: float) -> NoiseLevels:
    """Return the levels of `steps` steps at the end of a schedule that is longer the less is denoised; of none for
    0."""
    if denoise <= 0:
        return NoiseLevels(schedule, steps, 0)
    whole_steps = steps if denoise > 0.9999 else int(steps / denoise)
    if whole_steps > MAX_STEPS:
        raise NodeUnsupported(
            f"denoise: {counted(steps, 'step')} at {denoise:g} need a schedule of {whole_steps}, over {MAX_STEPS}"
        )
    return NoiseLevels(schedule, whole_steps, steps)


def _ksampler_advanced(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A sampler may stop early with the noise that is left, if another one continues."""
    steps, start, end = given["steps"], given["start_at_step"], min(given["end_at_step"], given["steps"])
    leaves_noise = given["return_with_leftover_noise"] == "enable"
    if start >= end and isinstance(given["latent_image"], SampledLatent):
        raise NodeUnsupported(f"start_at_step: found {start}, expected less than the last step, {end}")
    if start >= end:
        levels = NoiseLevels(given["scheduler"], steps, 0)
        return (_sampled(given, given["noise_seed"], levels, given["latent_image"]),)
    if end < steps and not leaves_noise:
        raise NodeUnsupported(f"end_at_step: found {end} without leftover noise, expected at least steps, {steps}")
    stopped_at = end if end < steps else None
    if given["add_noise"] == "disable":
        return (replace(_continued(given), stopped_at=stopped_at, node_id=given["node_id"]),)
    levels = NoiseLevels(given["scheduler"], steps, steps - start)
    sampled = _sampled(given, given["noise_seed"], levels, given["latent_image"])
    return (replace(sampled, stopped_at=stopped_at),)


def _continued(given: Mapping[str, Any]) -> SampledLatent:
    """Return the run that a sampler without new noise continues. Raises NodeUnsupported if it is not the same run."""
    before = given["latent_image"]
    if not isinstance(before, SampledLatent) or before.stopped_at != given["start_at_step"]:
        raise NodeUnsupported("add_noise: found disable, expected enable, or latents of a sampler that stopped there")
    if given["model"] != before.model:
        other = f"found {given['model'].name} after {before.model.name} in node {before.node_id}"
        raise NodeUnsupported(f"model: {other}, expected the same: the pool runs no refiner")
    names = {"sampler_name": "sampler", "scheduler": "schedule"}
    for name in ("positive", "negative", "steps", "cfg", "sampler_name", "scheduler"):
        expected = getattr(before, names.get(name, name))
        found = sampler_value(given[name]) if name == "sampler_name" else given[name]
        if found != expected:
            raise NodeUnsupported(f"{name}: expected that of node {before.node_id}, which this node continues")
    return before


def _seed_of_noise(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (given["noise_seed"],)


def _sampler_name(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (SamplerValue(given["sampler_name"]),)


def _basic_levels(given: Mapping[str, Any]) -> tuple[Any, ...]:
    levels = denoised_levels(given["scheduler"], given["steps"], given["denoise"])
    return (replace(levels, model=given["model"]),)


def _turbo_levels(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if given["denoise"] <= 0:
        return (NoiseLevels("normal", given["steps"], 0),)
    first = _TURBO_STEPS - int(_TURBO_STEPS * given["denoise"])
    stride = _TRAINED_STEPS // _TURBO_STEPS
    trained = [_TRAINED_STEPS - 1 - stride * place for place in range(first, min(first + given["steps"], _TURBO_STEPS))]
    if not trained:
        raise NodeUnsupported(f"denoise: found {given['denoise']:g}, expected at least {1 / _TURBO_STEPS:g}")
    return (NoiseLevels("", len(trained), len(trained), tuple(_level_of(step) for step in trained)),)


def _level_of(trained_step: int) -> float:
    """Return the noise level (sigma) of a training step of Stable Diffusion."""
    low, high = map(math.sqrt, _BETAS)
    kept = 1.0
    for step in range(trained_step + 1):
        kept *= 1 - (low + (high - low) * step / (_TRAINED_STEPS - 1)) ** 2
    return math.sqrt((1 - kept) / kept)


def _basic_guider(given: Mapping[str, Any]) -> tuple[Any, ...]:
    positive: TextValue = given["conditioning"]
    return (GuiderValue(given["model"], positive, TextValue("", positive.clip, is_zero=True), 1.0),)


def _cfg_guider(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (GuiderValue(given["model"], given["positive"], given["negative"], given["cfg"]),)


def _dual_guider(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Guidance by a text and by images: of a model that reads an image next to its latents (InstructPix2Pix), or
    reference images (OmniGen 2). From the predictions n, c2 and c1, style regular is n + b * (c2 - n) + a * (c1 - c2)
    with a as cfg_conds and b as cfg_cond2_negative; nested puts c2 + a * (c1 - c2) in the place of c2, which is regular
    with a * b as a, unless an option of the model changes it. With the same text as cond2 and negative, c2 is n, and
    the guidance is by the text alone."""
    first, second, negative = given["cond1"], given["cond2"], given["negative"]
    image_cfg = given["cfg_cond2_negative"]
    is_changed = bool(dict(given["model"].options).keys() & set(GUIDANCE_OPTIONS))
    nested = given["style"] == "nested" and is_changed
    cfg = given["cfg_conds"] * (image_cfg if given["style"] == "nested" and not nested else 1.0)
    if second == negative:
        if is_changed:
            raise NodeUnsupported("cond2, negative: found the same text on a model with changed guidance: CFGGuider "
                                  "guides by one text")  # fmt: skip
        return (GuiderValue(given["model"], first, negative, cfg),)
    images = [_images_of(text) for text in (first, second, negative)]
    if not images[0] or images[0] != images[1] or images[2]:
        raise NodeUnsupported(
            "cond1, cond2, negative: expected the same image of InstructPixToPixConditioning, or the same images of "
            "ReferenceLatent, in cond1 and cond2, and none in negative; or the same text as cond2 and negative"
        )
    alike = [replace(text, video=None, references=()) == negative for text in (first, second)]
    if not any(alike):
        raise NodeUnsupported("negative: expected the text of cond1 or of cond2: only the image differs between them")
    if cfg == 1 and image_cfg != 1:
        raise NodeUnsupported(f"cfg_conds: found 1 with cfg_cond2_negative {image_cfg:g}, expected a number above 1: "
                              "the pool guides by an image next to guidance by a text")  # fmt: skip
    others = VideoUse(
        others=(("image_cfg", image_cfg),),
        prompt_without_image=not alike[1] and image_cfg != 1,
        nested=nested and image_cfg != 1,
    )
    return (GuiderValue(given["model"], with_video(first, others), replace(second, video=None), cfg),)


def _images_of(text: TextValue) -> tuple[Any, ...]:
    """Return the image that a model reads next to its latents, if any, and its reference images."""
    beside = () if text.video is None or text.video.image is None else (text.video.image,)
    return (*beside, *text.references)


def _perpendicular_guider(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Guidance from an empty text. Nothing that changes the other texts acts on it: they are texts alone."""
    model, empty = given["model"], given["empty_conditioning"]
    if empty.text.strip() or empty != TextValue(empty.text, empty.clip):
        raise NodeUnsupported("empty_conditioning: expected an empty text of CLIPTextEncode")
    for name in ("positive", "negative"):
        found: TextValue = given[name]
        if found != TextValue(found.text, empty.clip, regions=found.regions, appended=found.appended):
            expected = "a text of the same text encoder as empty_conditioning, with regions or another text behind it"
            raise NodeUnsupported(f"{name}: expected {expected}: what else is applied to it would act on all three")
    if given["cfg"] == 1:
        raise NodeUnsupported("cfg: found 1, expected another one: the pool reads one text then")
    if "perp_neg" in dict(model.options):
        raise NodeUnsupported("model: perp_neg is set by a node before this one")
    model = replace(model, options=(*model.options, ("perp_neg", {"scale": given["neg_scale"]})))
    return (GuiderValue(model, given["positive"], given["negative"], given["cfg"]),)


def _second_guider(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Guidance away from what a second model predicts without a text: it is a part of the model of the pool."""
    model, second, negative = given["model"], given["model_negative"], given["negative"]
    if second != ModelValue(second.name):
        raise NodeUnsupported("model_negative: expected a model as it is loaded, without LoRAs, options and patches")
    if negative is not None and not (negative.is_zero or negative == TextValue("", negative.clip)):
        raise NodeUnsupported("negative: expected none, an empty text, or ConditioningZeroOut: no text is read")
    warn(
        given,
        f"model_negative: found {second.name}, which is not read: the pool guides {model.name} by the second model "
        "that it was assembled with; one without a second model predicts both",
    )
    if "cfg_override" not in dict(model.options) and given["cfg"] > _LAST_SCALE:
        warn(given, f"cfg: found {given['cfg']:g}, which is {_LAST_SCALE:g} in the last of every 16 steps")
    positive = given["positive"]
    negative = TextValue("", positive.clip, is_zero=True)
    return (GuiderValue(replace(model, guided_by=second.name), positive, negative, given["cfg"]),)


def _second_levels(given: Mapping[str, Any]) -> tuple[NoiseLevels]:
    """Levels of which the logarithm of the noise relative to the image is at even quantiles of a normal distribution.
    Source: diffusers' Ideogram4Pipeline, with the mean of half the logarithm of the size."""
    normal = NormalDist(sigma=given["std"])
    mean = given["mu"] + 0.5 * math.log(given["width"] * given["height"] / _SIZE_OF_MEAN)
    steps = given["steps"]
    logits = [_MOST_LOGIT, *(mean + normal.inv_cdf(1.0 - step / steps) for step in range(1, steps))]
    levels: list[float] = []
    for logit in logits:
        level = 1.0 / (1.0 + math.exp(-min(max(logit, _LEAST_LOGIT), _MOST_LOGIT)))
        levels.append(level if not levels else min(level, levels[-1] * (1.0 - 1e-6)))
    return (NoiseLevels("", steps, steps, tuple(levels)),)


def _sampled_by_guider(given: Mapping[str, Any]) -> tuple[Any, ...]:
    guider: GuiderValue = given["guider"]
    of_guider = {"model": guider.model, "positive": guider.positive, "negative": guider.negative, "cfg": guider.cfg}
    known = {"node_id": given["node_id"], "warn": given.get("warn"), "sound_cfg": guider.sound_cfg}
    sampled = _sampled(
        {**of_guider, **known, "sampler_name": given["sampler"]},
        given["noise"],
        given["sigmas"],
        given["latent_image"],
    )
    return sampled, sampled


def _sampled_by_parts(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if not given["add_noise"]:
        raise NodeUnsupported("add_noise: found false, expected true")
    named = {**given, "sampler_name": given["sampler"]}
    sampled = _sampled(named, given["noise_seed"], given["sigmas"], given["latent_image"])
    return sampled, sampled


def _sampled(given: Mapping[str, Any], seed: int, levels: NoiseLevels, start: LatentValue) -> SampledLatent:
    model, positive, negative = with_levels(given["model"], levels), given["positive"], given["negative"]
    if levels.model is not None and levels.model.name != model.name:
        raise NodeUnsupported(f"sigmas: they are of {levels.model.name}, expected those of {model.name}")
    if isinstance(start, EncodedImage) and start.vae not in ("", model.name):
        raise NodeUnsupported(f"vae: it is of {start.vae}, expected that of {model.name}")
    if isinstance(start, SampledLatent):
        raise NodeUnsupported("latent_image: expected empty, encoded or scaled latents, found those of a sampler")
    if not levels.run_steps and isinstance(start, ScaledLatent):
        raise NodeUnsupported("denoise: found 0 for the latents of another sampler, expected a number above 0")
    if not levels.run_steps and isinstance(start, EncodedImage) and start.hides:
        raise NodeUnsupported("denoise: found 0 for an image without its masked part, expected a number above 0")
    if isinstance(start, BlankLatent) and 0 < levels.run_steps < levels.steps:
        raise NodeUnsupported("latent_image: empty latents are denoised completely; expected denoise 1")
    if isinstance(start, BlankLatent) and start.guides and not is_first_frame(start.guides):
        raise NodeUnsupported("latent_image: found images that guide a video, which is a part of a workflow")
    if levels.sigmas and not isinstance(start, BlankLatent):
        raise NodeUnsupported("sigmas: the levels of this scheduler are for empty latents")
    positive = with_whole(given, positive)
    if (positive.prior is not None) != (isinstance(start, BlankLatent) and start.stage == "b"):
        raise NodeUnsupported(
            "positive, latent_image: expected a text of StableCascade_StageB_Conditioning with the latents of stage B"
        )
    _check_texts(positive, negative, given["cfg"])
    texts = (("positive", positive.clip), ("negative", negative.clip), *(("region", r.clip) for r in positive.regions))
    # regions have the same text encoder as a rule: its LoRAs are compared once
    known, compared = frozenset(model.loras), set[int]()
    for name, clip in texts:
        # stage B of Stable Cascade reads the texts of stage C
        if clip.name not in ("", model.name) and positive.prior is None:
            raise NodeUnsupported(f"{name}: its text encoder is of {clip.name}, expected that of {model.name}")
        if id(clip.loras) in compared:
            continue
        compared.add(id(clip.loras))
        if not known.issuperset(clip.loras):
            raise NodeUnsupported(f"{name}: its text encoder has LoRAs that the model does not have")
    if given["cfg"] != 1 and positive.clip.loras != negative.clip.loras:
        raise NodeUnsupported("negative: the LoRAs of its text encoder must be those of positive")
    return SampledLatent(
        model=model,
        positive=positive,
        negative=negative,
        seed=seed,
        steps=levels.steps,
        run_steps=levels.run_steps,
        cfg=given["cfg"],
        sampler=sampler_value(given["sampler_name"]),
        schedule=levels.schedule,
        start=start,
        node_id=given["node_id"],
        sigmas=levels.sigmas,
        beta=levels.beta,
        sound_cfg=given.get("sound_cfg"),
    )


def with_levels(model: ModelValue, levels: NoiseLevels) -> ModelValue:
    """Return a model with the noise levels of the one that a schedule was made for."""
    return model if levels.model is None else replace(model, sampling=levels.model.sampling)


def sampler_value(chosen: str | SamplerValue) -> SamplerValue:
    """Return a sampler that is chosen by its name, or by a node."""
    return SamplerValue(chosen) if isinstance(chosen, str) else chosen


def _check_texts(positive: TextValue, negative: TextValue, cfg: float) -> None:
    """Raise NodeUnsupported for texts that a request cannot have."""
    if positive.is_timed or negative.is_timed:
        raise NodeUnsupported("positive, negative: texts for parts of the steps are a workflow of several runs")
    if positive.is_zero or (negative.is_zero and cfg != 1):
        raise NodeUnsupported("conditioning that is set to zero is only supported as negative with cfg 1")
    if negative.is_partial:
        raise NodeUnsupported("positive, negative: expected a text without an area besides those with one")
    if negative.regions:
        raise NodeUnsupported("negative: expected one text; areas are only supported in positive")
    if positive.controls != negative.controls and negative.controls:
        raise NodeUnsupported("negative: its ControlNets must be those of positive")
    if positive.gligen is not None:
        raise NodeUnsupported("positive: texts in boxes are a part of a workflow")
    if negative.gligen is not None and cfg != 1:
        raise NodeUnsupported(NO_NEGATIVE_BOXES)
    for name in ("references", "image_prompts"):
        if getattr(negative, name) and getattr(negative, name) != getattr(positive, name):
            raise NodeUnsupported(f"negative: its {name} must be those of positive")


def _shifted(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (replace(given["model"], sampling=ModelSampling(given["shift"])),)


def _shifted_as(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if given["sampling"] != "flow":
        raise NodeUnsupported(f"sampling: found {given['sampling']}, expected flow: no model of the pool has it")
    return _shifted(given)


def _shifted_by_size(given: Mapping[str, Any]) -> tuple[Any, ...]:
    exponents = given["base_shift"], given["max_shift"]
    sampling = ModelSampling(exponents=exponents, size=(given["width"], given["height"]))
    return (replace(given["model"], sampling=sampling),)


_row = partial(node_row, category="sampling")


def _latent(name: str, inputs: tuple[NodeInput, ...], build: Builder) -> NodeType:
    return node_row(name, inputs, build, "LATENT", category="latent")


SAMPLING_NODES = (
    *(_latent(name, _BLANK, _blank) for name in ("EmptyLatentImage", "EmptySD3LatentImage", "EmptyFlux2LatentImage")),
    _latent("RepeatLatentBatch", (link("samples", "LATENT"), whole("amount", 1, 1, MAX_BATCH)), repeated),
    _latent(
        "LatentFromBatch",
        (link("samples", "LATENT"), whole("batch_index", 0, 0, 63), whole("length", 1, 1, 64)),
        only_in_workflows,
    ),
    _latent("LatentBatch", (link("samples1", "LATENT"), link("samples2", "LATENT")), only_in_workflows),
    _latent(
        "LatentBatchSeedBehavior",
        (link("samples", "LATENT"), combo("seed_behavior", ("random", "fixed"))),
        only_in_workflows,
    ),
    _latent("SetLatentNoiseMask", (sound_latent("samples"), link("mask", "MASK")), _with_noise_mask),
    _latent("LatentUpscaleBy", (link("samples", "LATENT"), _UPSCALE, number("scale_by", 1.5, 1.0, 8.0)), _scaled),
    _latent(
        "LatentUpscale",
        (
            link("samples", "LATENT"),
            _UPSCALE,
            whole("width", 512, 0, MAX_SIDE),
            whole("height", 512, 0, MAX_SIDE),
            combo("crop", ("disabled", "center")),
        ),
        _scaled_to,
    ),
    _row("ModelSamplingSD3", (_MODEL, number("shift", 3.0, 0.01, 100.0)), _shifted, "MODEL"),
    _row(
        "ModelSamplingAuraFlow",
        (
            _MODEL,
            number("shift", 1.73, 0.01, 100.0),
            combo("sampling", ("flow", "img_to_img_velocity"), is_required=False),
        ),
        _shifted_as,
        "MODEL",
    ),
    _row(
        "ModelSamplingFlux",
        (_MODEL, number("max_shift", 1.15, 0.0, 100.0), number("base_shift", 0.5, 0.0, 100.0), *_SIZE),
        _shifted_by_size,
        "MODEL",
    ),
    _row(
        "KSampler",
        (_MODEL, whole("seed", 0, 0, MAX_SEED), *_SAMPLING, number("denoise", 1.0, 0.0, 1.0)),
        _ksampler,
        "LATENT",
    ),
    _row(
        "KSamplerAdvanced",
        (
            _MODEL,
            combo("add_noise", _ON_OFF),
            whole("noise_seed", 0, 0, MAX_SEED),
            *_SAMPLING,
            whole("start_at_step", 0, 0, 10000),
            whole("end_at_step", 10000, 0, 10000),
            combo("return_with_leftover_noise", _ON_OFF),
        ),
        _ksampler_advanced,
        "LATENT",
    ),
    _row("DisableNoise", (), only_in_workflows, "NOISE"),
    _latent(
        "EmptyQwenImageLayeredLatentImage",
        (*_SIZE, whole("layers", 3, 0, 64), whole("batch_size", 1, 1, MAX_BATCH)),
        only_in_workflows,
    ),
    _latent(
        "LatentCut",
        (
            link("samples", "LATENT"),
            combo("dim", ("x", "y", "t")),
            whole("index", 0, -MAX_SIDE, MAX_SIDE),
            whole("amount", 1, 1, MAX_SIDE),
        ),
        only_in_workflows,
    ),
    _latent(
        "LatentCutToBatch",
        (link("samples", "LATENT"), combo("dim", ("t", "x", "y")), whole("slice_size", 1, 1, MAX_SIDE)),
        only_in_workflows,
    ),
    _row("SetFirstSigma", (_SIGMAS, number("sigma", 136.0, 0.0, 20_000.0)), only_in_workflows, "SIGMAS"),
    _row("SplitSigmas", (_SIGMAS, whole("step", 0, 0, 10000)), only_in_workflows, "SIGMAS", "SIGMAS"),
    _row(
        "SplitSigmasDenoise",
        (_SIGMAS, number("denoise", 1.0, 0.0, 1.0)),
        only_in_workflows,
        "SIGMAS",
        "SIGMAS",
    ),
    _row("RandomNoise", (whole("noise_seed", 0, 0, MAX_SEED),), _seed_of_noise, "NOISE"),
    _row("KSamplerSelect", (combo("sampler_name", SAMPLER_NAMES),), _sampler_name, "SAMPLER"),
    _row(
        "BasicScheduler",
        (
            _MODEL,
            combo("scheduler", SCHEDULE_NAMES),
            whole("steps", 20, 1, MAX_STEPS),
            number("denoise", 1.0, 0.0, 1.0),
        ),
        _basic_levels,
        "SIGMAS",
    ),
    _row(
        "SDTurboScheduler",
        (_MODEL, whole("steps", 1, 1, _TURBO_STEPS), number("denoise", 1.0, 0.0, 1.0)),
        _turbo_levels,
        "SIGMAS",
    ),
    _row("BasicGuider", (_MODEL, link("conditioning", "CONDITIONING")), _basic_guider, "GUIDER"),
    _row(
        "DualCFGGuider",
        (
            _MODEL,
            *(link(name, "CONDITIONING") for name in ("cond1", "cond2", "negative")),
            number("cfg_conds", 8.0, 1.0, 100.0),
            number("cfg_cond2_negative", 8.0, 1.0, 100.0),
            combo("style", ("regular", "nested"), is_required=False),
        ),
        _dual_guider,
        "GUIDER",
    ),
    _row("CFGGuider", (_MODEL, *_TEXTS, _CFG), _cfg_guider, "GUIDER"),
    _row(
        "DualModelGuider",
        (
            _MODEL,
            link("positive", "CONDITIONING"),
            link("model_negative", "MODEL"),
            link("negative", "CONDITIONING", is_required=False),
            number("cfg", 7.0, 0.0, 100.0),
        ),
        _second_guider,
        "GUIDER",
    ),
    _row(
        "Ideogram4Scheduler",
        (
            whole("steps", 20, 1, 200),
            whole("width", 1024, 256, 8192),
            whole("height", 1024, 256, 8192),
            number("mu", 0.0, -10.0, 10.0),
            number("std", 1.75, 0.1, 5.0),
        ),
        _second_levels,
        "SIGMAS",
    ),
    _row(
        "PerpNegGuider",
        (
            _MODEL,
            *_TEXTS,
            link("empty_conditioning", "CONDITIONING"),
            _CFG,
            number("neg_scale", 1.0, 0.0, 100.0),
        ),
        _perpendicular_guider,
        "GUIDER",
    ),
    _row(
        "SamplerCustomAdvanced",
        (
            link("noise", "NOISE"),
            link("guider", "GUIDER"),
            link("sampler", "SAMPLER"),
            _SIGMAS,
            link("latent_image", "LATENT"),
        ),
        _sampled_by_guider,
        "LATENT",
        "LATENT",
    ),
    _row(
        "SamplerCustom",
        (
            _MODEL,
            flag("add_noise", True),
            whole("noise_seed", 0, 0, MAX_SEED),
            _CFG,
            *_TEXTS,
            link("sampler", "SAMPLER"),
            _SIGMAS,
            link("latent_image", "LATENT"),
        ),
        _sampled_by_parts,
        "LATENT",
        "LATENT",
    ),
)
