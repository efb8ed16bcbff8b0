"""Converts the bodies of A1111's txt2img and img2img to requests of the pool. Pure, except that images are decoded."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from modelpool.actors.http.a1111.a1111_upscalers import scaling_fields, scaling_note
from modelpool.actors.http.service.caller_images import CallerImages
from modelpool.actors.http.service.clip_layers import skipped_by_layer
from modelpool.actors.request.bounds import (
    MAX_ENTRIES,
    MAX_LORAS,
    MAX_NAME_CHARACTERS,
    MAX_PROMPT_CHARACTERS,
    check_characters,
    over_bound,
    reworded,
)
from modelpool.actors.request.field_table import SIZE_STEP
from modelpool.actors.request.image_decoding import MAX_SIDE
from modelpool.actors.request.image_fields import Pixels
from modelpool.actors.request.lora_fields import LoraChoice, parse_lora
from modelpool.actors.request.other_names import unknown_field
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.strict import Strict, WrongValue
from modelpool.pool.inference.sampling.sampler_names import READS_ETA, resolve_sampler
from modelpool.pool.values.core.errors import UserError, counted, unusable_field
from modelpool.pool.values.core.sampling_facts import Guidance, Prediction, SamplingFacts

if TYPE_CHECKING:
    from PIL.Image import Image

#: most images of one call
MAX_IMAGES = 100
#: keys of the options that are used; others are accepted and have no effect
MODEL_OPTION, CLIP_OPTION = "sd_model_checkpoint", "CLIP_stop_at_last_layers"
#: fields of features that the pool does not have, with the values that do not ask for them
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "styles": (None, [], ()),
    "subseed_strength": (None, 0),
    "seed_resize_from_h": (None, 0, -1),
    "seed_resize_from_w": (None, 0, -1),
    "restore_faces": (None, False),
    "tiling": (None, False),
    "script_name": (None, "", "None"),
    "hr_checkpoint_name": (None, "", "Use same checkpoint"),
    "hr_sampler_name": (None, "", "Use same sampler"),
    "hr_scheduler": (None, "", "Use same scheduler"),
    "hr_prompt": (None, ""),
    "hr_negative_prompt": (None, ""),
    "refiner_checkpoint": (None, "", "None"),
    "infotext": (None, ""),
}
#: fields of the web UI that change images there and not here, with the values that change nothing, or that clients send
#: with every call
_NOT_READ: Mapping[str, tuple[Any, ...]] = {
    "s_tmin": (0,),
    "s_tmax": (0,),
    "s_min_uncond": (0,),
    "disable_extra_networks": (False,),
    "image_cfg_scale": (0, 1, 1.5),
    "initial_noise_multiplier": (0, 1),
    "mask_blur_x": (4,),
    "mask_blur_y": (4,),
    "firstphase_width": (0,),
    "firstphase_height": (0,),
    "firstpass_image": ("",),
    "latent_mask": ("",),
    "hr_additional_modules": ("", [], ["Use same choices"]),
}
#: fields about the area of a mask, with the values that mean what the pool does: it regenerates from the whole image
_OF_MASKS: Mapping[str, tuple[Any, ...]] = {"inpaint_full_res": (False, 0), "inpainting_fill": (1,)}
#: fields of the web UI that mean nothing here, or nothing without another one that is refused
_WITHOUT_EFFECT = frozenset(
    (
        *("subseed", "do_not_save_samples", "do_not_save_grid", "save_images", "comments", "force_task_id"),
        *("override_settings_restore_afterwards", "refiner_switch_at", "script_args", "include_init_images"),
        *("mask_round", "init_latent", "inpaint_full_res_padding"),
    )
)
#: fields of a unit of the ControlNet extension that are used, and what they are called here
_UNIT_NAMES: Mapping[str, str] = {"input_image": "image", "mask_image": "mask", "guidance": "guidance_end"}
#: fields of a unit that ask for what the pool does not have, with the values that do not
_UNIT_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "control_mode": (0, "Balanced"),
    "guess_mode": (False,),
    "hr_option": (0, "Both", "HiResFixOption.BOTH"),
    "advanced_weighting": ([],),
    "effective_region_mask": ("",),
    "loopback": (False,),
    "ipadapter_input": ("", []),
    "batch_images": ("", []),
    "input_mode": (0, "simple"),
    "union_control_type": ("Unknown",),
    "image_fg": ("", {}),
    "mask_image_fg": ("", {}),
}
#: fields of a unit about preprocessors, memory and files of the web UI
_UNIT_WITHOUT_EFFECT = frozenset(
    (
        *("resize_mode", "low_vram", "lowvram", "processor_res", "threshold_a", "threshold_b", "pixel_perfect"),
        *("save_detected_map", "use_preview_as_input", "generated_image", "output_dir", "is_ui", "pulid_mode"),
        *("inpaint_crop_input_image", "batch_mask_dir", "batch_image_dir", "batch_input_gallery", "batch_modifiers"),
        *("batch_mask_gallery", "batch_image_files", "animatediff_batch"),
    )
)
#: the ways of fitting a control image to the size that crop it at its centre, as the pool does
_UNIT_CROPS = (1, "Crop and Resize", "Scale to Fit (Inner Fit)", "INNER_FIT")
#: difference of two proportions that is rounding
_SAME_PROPORTIONS = 0.02
#: <lora:NAME>, <lora:NAME:STRENGTH> and so on in a prompt
_LORA = re.compile(r"<lora:([^<>]+)>")
#: words in square brackets; the image has the warning about prompts that change over the steps
_WEAKENED = re.compile(r"(?<!\\)\[([^\[\]|:]{1,200})\]")
#: characters of such a text in a message, which ends with the problem
_MOST_SHOWN = 200
#: unknown names in a message
_MOST_NAMED = 20
#: fields of requests, by which errors name what a caller has set
_NAMES: Mapping[str, str] = {
    "cfg": "cfg_scale",
    "negative": "negative_prompt",
    "strength": "denoising_strength",
    "clip_skip": "CLIP_stop_at_last_layers",
    "hires.scale": "hr_scale",
    "hires.strength": "denoising_strength",
    "hires.steps": "hr_second_pass_steps",
    "hires.upscaler": "hr_upscaler",
}
#: between the errors of one message
_ALSO = "; also "
#: difference of two scales that is rounding
_SAME_SCALE = 0.01
_NO_SCHEDULE = (None, "", "automatic", "Automatic")
_JUST_RESIZE, _CROP_AND_RESIZE = 0, 1


class ImageCall(Strict):
    """The fields of txt2img and img2img that are used."""

    prompt: str = ""
    negative_prompt: str = ""
    seed: Annotated[int, Field(ge=-1, le=2**64 - MAX_IMAGES - 1)] = -1
    sampler_name: str | None = None
    sampler_index: str | None = None
    scheduler: str | None = None
    batch_size: Annotated[int, Field(ge=1, le=MAX_IMAGES)] = 1
    n_iter: Annotated[int, Field(ge=1, le=MAX_IMAGES)] = 1
    eta: float | None = None
    s_churn: float | None = None
    s_noise: float | None = None
    steps: int = 20
    cfg_scale: float = 7.0
    #: of Forge: the guidance of distilled models, the shift of other flows
    distilled_cfg_scale: float | None = None
    #: of no web UI; clients send it all the same
    shift: float | None = None
    hr_cfg: float | None = None
    hr_distilled_cfg: float | None = None
    width: int = 512
    height: int = 512
    denoising_strength: float | None = None
    enable_hr: bool = False
    hr_scale: float = 2.0
    hr_resize_x: Annotated[int, Field(ge=0, le=MAX_SIDE)] = 0
    hr_resize_y: Annotated[int, Field(ge=0, le=MAX_SIDE)] = 0
    hr_second_pass_steps: Annotated[int, Field(ge=0)] = 0
    hr_upscaler: str | None = None
    init_images: tuple[str, ...] = ()
    mask: str | None = None
    mask_blur: Annotated[float, Field(ge=0, le=64)] = 4
    inpainting_mask_invert: Annotated[int, Field(ge=0, le=1)] | bool = 0
    resize_mode: Annotated[int, Field(ge=0, le=3)] = 0
    override_settings: Annotated[dict[str, Any], Field(max_length=MAX_ENTRIES)] = Field(default_factory=dict)
    alwayson_scripts: Annotated[dict[str, Any], Field(max_length=MAX_ENTRIES)] = Field(default_factory=dict)
    send_images: bool = True


class ControlUnit(Strict):
    """The fields of a unit of the ControlNet extension that are used."""

    enabled: bool = True
    model: str = "None"
    module: str = "none"
    image: Any = None
    mask: Any = None
    weight: float = 1.0
    guidance_start: float = 0.0
    guidance_end: float = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a user that txt2img and img2img use. An empty model is the only one of the pool."""

    model: str = ""
    clip_layers: int = 1
    #: settings that a user has set, and that have no effect
    unread: tuple[str, ...] = ()

    def changed(self, values: Mapping[str, Any]) -> Options:
        """Return these options with those in `values`. Raises UnusableField."""
        chosen = {name: value for name, value in values.items() if value is not None}
        model, layers = chosen.get(MODEL_OPTION, self.model), chosen.get(CLIP_OPTION, self.clip_layers)
        if not isinstance(model, str):
            raise unusable_field(MODEL_OPTION, model, "the name of a model")
        check_characters(MODEL_OPTION, model, MAX_NAME_CHARACTERS)
        if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
            raise unusable_field(CLIP_OPTION, layers, "a whole number from 1")
        return Options(model_name(model), layers, self.unread)


def model_name(title: str) -> str:
    """Return the name of a model by its title: without a hash in brackets, and without the ending of its file."""
    # white space is not part of the pattern, which would be tried from each of its characters
    name = re.sub(r"\[[0-9a-f]*\]$", "", title.strip()).rstrip()
    return name.removesuffix(".safetensors").removesuffix(".ckpt")


def unread_settings(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of settings of the web UI that have no effect here, as far as a message names them."""
    names = (
        name for name, value in values.items() if value not in (None, "") and name not in (MODEL_OPTION, CLIP_OPTION)
    )
    return tuple(name[:_MOST_SHOWN] for name, _ in zip(names, range(_MOST_NAMED), strict=False))


def settings_warning(field: str, names: Iterable[str]) -> str:
    """Return a message about settings in `field` that have no effect."""
    return f"{field}: found {', '.join(names)}, not used; expected {MODEL_OPTION} or {CLIP_OPTION}"


def not_read(body: Mapping[str, Any], call: ImageCall) -> list[str]:
    """Return a message for each field in the body of `call` that has no effect on its images, though it is unknown, or
    would have one in the web UI."""
    known = {*ImageCall.model_fields, *_NEUTRAL, *_NOT_READ, *_OF_MASKS, *_WITHOUT_EFFECT}
    has_mask = call.mask is not None and bool(call.init_images)
    unused = {**_NOT_READ, **(_OF_MASKS if has_mask else {})}
    found = [
        str(unusable_field(name, _shown(body[name]), _no_effect(name)))
        for name, neutral in unused.items()
        if body.get(name) is not None and body[name] not in neutral
    ]
    unknown = [name for name in body if name not in known][:_MOST_NAMED]
    found += [f"{unknown_field('field', name[:_MOST_SHOWN], known)} It is not used." for name in unknown]
    if settings := unread_settings(call.override_settings):
        found.append(settings_warning("override_settings", settings))
    if call.mask is not None and not call.init_images:
        found.append("mask: not used: expected an image in init_images")
    if call.enable_hr and call.init_images:
        found.append("enable_hr: not used: a second pass follows an image that is generated from text alone")
    return [*found, *_second_pass_notes(call), *_weakened(call)]


def _second_pass_notes(call: ImageCall) -> Iterator[str]:
    """Yield what the second pass of a call does in another way than the web UI, or than its size says."""
    if not call.enable_hr or call.init_images:
        return
    if note := scaling_note(call.hr_upscaler):
        yield f"hr_upscaler: {note}"
    for name, side in (("hr_resize_x", call.hr_resize_x), ("hr_resize_y", call.hr_resize_y)):
        if side % SIZE_STEP:
            yield f"{name}: found {side}, which the image has in whole cells of {SIZE_STEP} pixels"


def _shown(value: Any) -> Any:
    is_long = isinstance(value, str) and len(value) > _MOST_SHOWN
    return f"{value[:_MOST_SHOWN]}..." if is_long else value


def _no_effect(name: str) -> str:
    if name in _OF_MASKS:
        return f"{_OF_MASKS[name][0]!r}: the masked area is regenerated from the whole image, at its size"
    return "no value: it has no effect here"


def _weakened(call: ImageCall) -> Iterator[str]:
    """Yield a message for each text with words in square brackets, which weaken them in the web UI alone."""
    for name, text in (("prompt", call.prompt), ("negative_prompt", call.negative_prompt)):
        if (match := _WEAKENED.search(text)) is not None:
            expected = f"({match[1][:_MOST_SHOWN]}:0.91): square brackets are text here, and weaken no words"
            yield f"{name}: found {match[0][:_MOST_SHOWN]!r}, expected {expected}"


def parse_call(body: Mapping[str, Any], is_img2img: bool) -> ImageCall:
    """Parse a body. Fields that are not used are left to `not_read`. Raises UserError, also for features that the pool
    does not have.
    """
    for name, neutral in _NEUTRAL.items():
        if name in body and body[name] not in neutral:
            raise unusable_field(name, body[name], "no value: the pool does not have this feature")
    known = {name: value for name, value in body.items() if name in ImageCall.model_fields and value is not None}
    call = ImageCall(**known)
    if call.batch_size * call.n_iter > MAX_IMAGES:
        raise unusable_field("batch_size, n_iter", call.batch_size * call.n_iter, f"up to {MAX_IMAGES} images")
    if is_img2img and len(call.init_images) != 1:
        raise unusable_field("init_images", counted(len(call.init_images), "image"), "one image")
    _check_second_guidance(call)
    if call.resize_mode not in (_JUST_RESIZE, _CROP_AND_RESIZE):
        raise unusable_field("resize_mode", call.resize_mode, "0 (just resize) or 1 (crop and resize)")
    return call


def _check_second_guidance(call: ImageCall) -> None:
    """Raise UnusableField for a second pass with another guidance than the first."""
    if not call.enable_hr:
        return
    for name, own, usual in (
        ("hr_cfg", call.hr_cfg, call.cfg_scale),
        ("hr_distilled_cfg", call.hr_distilled_cfg, call.distilled_cfg_scale),
    ):
        if own is not None and own != usual:
            first = "" if usual is None else f"{usual}, that of the first pass, or "
            raise unusable_field(name, own, f"{first}no value")


def without_loras(prompt: str, steps: int) -> tuple[str, tuple[LoraChoice, ...]]:
    """Split a prompt into its text and its LoRAs, which A1111 writes as <lora:NAME:STRENGTH>, with its words for
    strengths, steps and blocks. `steps` is the length of the schedule. Raises UserError."""
    check_characters("prompt", prompt, MAX_PROMPT_CHARACTERS)
    loras = []
    texts = _LORA.findall(prompt)
    if len(texts) > MAX_LORAS:
        raise over_bound("prompt", f"{counted(len(texts), 'text')} <lora:...>", f"up to {MAX_LORAS}")
    for text in texts:
        try:
            loras.append(LoraChoice(**parse_lora(text, steps)))
        except UserError as error:
            shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
            raise reworded(error, f"prompt: <lora:{shown}>: {error}") from None
    return _LORA.sub("", prompt).strip(), tuple(loras)


def requests_of(
    call: ImageCall,
    model: str,
    clip_layers: int,
    images: CallerImages,
    facts: SamplingFacts | None = None,
    family: str = "",
) -> list[GenerateRequest]:
    """Return a request for each image, with seeds that count up. `facts` and the title of the `family` are the model's,
    if they are known. Raises UserError."""
    prompt, loras = without_loras(call.prompt, call.steps)
    fields: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "negative": call.negative_prompt,
        "loras": loras,
        "steps": call.steps,
        "cfg": call.cfg_scale,
        "sampler": call.sampler_name or call.sampler_index or "euler",
        "schedule": None if call.scheduler in _NO_SCHEDULE else call.scheduler,
        "width": call.width,
        "height": call.height,
        "clip_skip": skipped_by_layer(clip_layers, family),
        "controls": _controls(call.alwayson_scripts, images),
    }
    if call.shift is not None:
        fields["shift"] = call.shift
    by_scale = _by_scale(call, facts)
    fields |= by_scale
    noise = {"eta": call.eta, "s_churn": call.s_churn, "s_noise": call.s_noise}
    fields |= {name: value for name, value in noise.items() if value is not None}
    if call.enable_hr and not call.init_images:
        strength = 0.7 if call.denoising_strength is None else call.denoising_strength
        steps = call.hr_second_pass_steps or None
        scaling = scaling_fields(call.hr_upscaler)
        fields["hires"] = {"scale": _hires_scale(call), "strength": strength, "steps": steps, **scaling}
    if call.init_images:
        fields.update(_start_image(call, images))
    seed = secrets.randbits(32) if call.seed == -1 else call.seed
    try:
        first = GenerateRequest(**fields, seed=seed)
        # clients send an eta with every call, which the web UI passes only to samplers that have one
        if resolve_sampler(first.sampler)[0] not in READS_ETA:
            first = first.model_copy(update={"eta": None})
    except UserError as problem:
        raise in_its_words(problem, by_scale) from None
    others = range(1, call.batch_size * call.n_iter)
    return [first, *(first.model_copy(update={"seed": seed + place}) for place in others)]


def _by_scale(call: ImageCall, facts: SamplingFacts | None) -> dict[str, float]:
    """Return the field that Forge's scale for distilled models sets. As in Forge, it is the guidance of models that are
    distilled with one, and the shift of other flows, unless the call has a shift. Models without either have no use for
    it, such as Flux schnell with its even levels."""
    if call.distilled_cfg_scale is None or facts is None:
        return {}
    guidance = Guidance.CLASSIFIER_FREE if facts.defaults is None else facts.defaults.guidance
    if guidance is Guidance.DISTILLED:
        return {"cfg": call.distilled_cfg_scale}
    is_even = facts.noise.shift == 1.0 and facts.noise.shift_by_size is None
    has_shift = facts.prediction is Prediction.FLOW and facts.noise.takes_shift
    if call.shift is not None or not has_shift or (is_even and guidance is Guidance.NONE):
        return {}
    return {"shift": call.distilled_cfg_scale}


def _hires_scale(call: ImageCall) -> float:
    """Return the scale of the second pass, which a size may give. Raises UnusableField for other proportions."""
    wanted = (call.hr_resize_x, call.width), (call.hr_resize_y, call.height)
    scales = [size / side for size, side in wanted if size and side > 0]
    if not scales:
        return call.hr_scale
    if max(scales) - min(scales) > _SAME_SCALE:
        found, expected = f"{call.hr_resize_x}x{call.hr_resize_y}", f"the proportions of {call.width}x{call.height}"
        raise unusable_field("hr_resize_x, hr_resize_y", found, expected)
    return scales[0]


def in_its_words(problem: UserError, by_scale: Iterable[str] = ()) -> UserError:
    """Return an error about fields of a request with the names of these fields in this interface. `by_scale` are the
    fields that `distilled_cfg_scale` has set."""
    names = {**_NAMES, **dict.fromkeys(by_scale, "distilled_cfg_scale")}
    parts = []
    for part in str(problem).split(_ALSO):
        name, colon, rest = part.partition(": ")
        parts.append(f"{names[name]}: {rest}" if colon and name in names else part)
    text = _ALSO.join(parts)
    return problem if text == str(problem) else reworded(problem, text)


def _start_image(call: ImageCall, images: CallerImages) -> dict[str, Any]:
    size = (call.width, call.height)
    image = images.decode("init_images", call.init_images[0]).on_white()
    if call.resize_mode == _JUST_RESIZE and image.size != size:
        image = _resized(call, image)
    found = {"image": image, "strength": 0.75 if call.denoising_strength is None else call.denoising_strength}
    if call.mask is not None:
        from PIL import ImageFilter, ImageOps

        mask = _resized(call, images.decode("mask", call.mask).as_mask())
        mask = ImageOps.invert(mask) if call.inpainting_mask_invert else mask
        found["mask"] = mask.filter(ImageFilter.GaussianBlur(call.mask_blur)) if call.mask_blur else mask
        found["image"] = _resized(call, image)
    return found


def _resized(call: ImageCall, image: Image) -> Image:
    """Return an image, or a mask, at the size of the call: stretched, or cropped in the middle, as `resize_mode` says.
    Raises UnusableField."""
    from PIL import ImageOps

    _check_sides(call)
    size = (call.width, call.height)
    return image.resize(size) if call.resize_mode == _JUST_RESIZE else ImageOps.fit(image, size)


def _check_sides(call: ImageCall) -> None:
    """Check the size before an image is resized to it. Raises UnusableField."""
    GenerateRequest(model="any", prompt="", width=call.width, height=call.height)


def _controls(scripts: Mapping[str, Any], images: CallerImages) -> list[dict[str, Any]]:
    """Return the enabled units of the ControlNet extension; other extensions are refused. Raises UserError."""
    controls: list[dict[str, Any]] = []
    for name, script in scripts.items():
        if script is None or (isinstance(script, Mapping) and script.get("args", []) is None):
            continue
        units = script.get("args") if isinstance(script, Mapping) else None
        if not isinstance(units, list):
            raise unusable_field(f"alwayson_scripts.{name}", script, '{"args": [...]}')
        if name.lower() != "controlnet":
            if any(units):
                raise unusable_field("alwayson_scripts", name, "ControlNet: the pool has no other extension")
            continue
        for number, unit in enumerate(units):
            if unit is not None and (control := _control(f"alwayson_scripts.{name}.args.{number}", unit, images)):
                controls.append(control)
    return controls


def _control(place: str, given: Any, images: CallerImages) -> dict[str, Any] | None:
    """Return the ControlNet of the unit at `place`; None if it asks for none. Raises UserError that names the place."""
    unit = _parse_unit(place, given)
    if not unit.enabled:
        return None
    if unit.module.lower() not in ("none", ""):
        expected = '"none": control images are preprocessed by the caller'
        raise unusable_field(f"{place}.module", unit.module, expected)
    if unit.model in ("None", ""):
        return None
    # a canvas, on which masks are drawn, has both
    canvas: Mapping[str, Any] = unit.image if isinstance(unit.image, Mapping) else {"image": unit.image}
    source, mask = canvas.get("image"), unit.mask or canvas.get("mask")
    control: dict[str, Any] = {"model": model_name(unit.model), "strength": unit.weight}
    control |= {"start": unit.guidance_start, "end": unit.guidance_end}
    control |= {"image": images.decode(f"{place}.image", source).on_white()} if source else {}
    return control | ({"mask": images.decode(f"{place}.mask", mask).as_mask()} if mask else {})


def _parse_unit(place: str, given: Any) -> ControlUnit:
    """Parse a unit. Raises UserError for an unknown field, and for a feature that the pool does not have; a unit that
    is not enabled may ask for anything."""
    if not isinstance(given, Mapping):
        raise unusable_field(place, given, "a table for each unit")
    values = {_UNIT_NAMES.get(name, name): value for name, value in given.items() if value is not None}
    used = {name: values[name] for name in ControlUnit.model_fields if name in values}
    try:
        unit = ControlUnit(**used)
    except WrongValue as problem:
        raise problem.within(place) from None
    if not unit.enabled:
        return unit
    known = {*ControlUnit.model_fields, *_UNIT_NAMES, *_UNIT_NEUTRAL, *_UNIT_WITHOUT_EFFECT}
    for name, value in values.items():
        if name not in known:
            raise unknown_field(f"field of {place}", name[:_MOST_SHOWN], known)
        if name in _UNIT_NEUTRAL and value not in _UNIT_NEUTRAL[name]:
            raise unusable_field(f"{place}.{name}", value, "no value: the pool does not have this feature")
    return unit


def fitting_warnings(call: ImageCall, requests: Sequence[GenerateRequest]) -> list[str]:
    """Return a message for each control image of `requests` that the pool crops, though its unit asks for another way
    of fitting it to the size; and for each unit with an image and without a model, which does nothing."""
    found = []
    controls = iter(requests[0].controls)
    for name, script in call.alwayson_scripts.items():
        units = script.get("args") if isinstance(script, Mapping) and name.lower() == "controlnet" else None
        for number, given in enumerate(units or ()):
            unit = None if given is None else _parse_unit(name, given)
            if unit is None or not unit.enabled:
                continue
            if unit.model in ("None", ""):
                if unit.image.get("image") if isinstance(unit.image, Mapping) else unit.image:
                    place = f"alwayson_scripts.{name}.args.{number}.model"
                    found.append(f"{place}: found {unit.model!r}, expected a ControlNet: the unit is not used")
                continue
            mode, image = given.get("resize_mode"), next(controls).image
            if mode is None or mode in _UNIT_CROPS or not isinstance(image, Pixels):
                continue
            height, width = image.pixels.shape[:2]
            if abs(width * call.height / (height * call.width) - 1) > _SAME_PROPORTIONS:
                shown = f"an image of {width}x{height} for {call.width}x{call.height} pixels"
                place = f"alwayson_scripts.{name}.args.{number}.resize_mode"
                found.append(f"{place}: found {mode!r} and {shown}, which is cropped at its centre")
    return found
