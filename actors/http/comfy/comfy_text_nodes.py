"""ComfyUI nodes of conditioning: texts, their areas and combinations, guidance, references and ControlNets. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_node_types import (
    GLIGENS,
    MAX_SIDE,
    STYLES,
    VISION_ENCODERS,
    NodeInput,
    NodeType,
    NodeUnsupported,
    check_parts,
    combo,
    file_stem,
    flag,
    is_one,
    link,
    number,
    only_in_workflows,
    text,
    warn,
    warn_unread,
    whole,
)
from modelpool.actors.http.comfy.comfy_values import (
    BlankLatent,
    BoxText,
    ClipValue,
    ControlUse,
    EncodedImage,
    GligenUse,
    ImageFile,
    ImagePromptUse,
    MaskFile,
    NodeImage,
    RegionUse,
    SeenImage,
    TextValue,
    Unread,
    VideoUse,
)
from modelpool.actors.request.bounds import MAX_PROMPT_CHARACTERS
from modelpool.actors.request.image_fields import MAX_PARTS, MAX_REFERENCES, MAX_REGION
from modelpool.pool.values.core.errors import counted
from modelpool.pool.values.core.refs import MOST_BOXES

#: images that nodes read with a text; the side of an image of Qwen-Image 2.1
_MOST_IMAGES, _QWEN_21_SIDE = 6, 1024
#: texts that one conditioning has one behind another
_MOST_APPENDED = 100
#: pixels of the side of a cell of latents
_CELL = 8
_SIDES = ("positive", "negative")
_CONDITIONING = link("conditioning", "CONDITIONING")
_CONTROL_STRENGTH = number("strength", 1.0, 0.0, 10.0)
_AREA_STRENGTH = number("strength", 1.0, 0.0, MAX_REGION)
_CONTROLLED = (
    link("positive", "CONDITIONING"),
    link("negative", "CONDITIONING"),
    link("control_net", "CONTROL_NET"),
)
#: ComfyUI's names of the modes of a ControlNet with several, and the pool's names of them; others are looked up as they
#: are
_UNION_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "auto": "",
        "openpose": "pose",
        "depth": "depth",
        "hed/pidi/scribble/ted": "scribble",
        "canny/lineart/anime_lineart/mlsd": "canny",
        "normal": "normal",
        "segment": "segment",
        "tile": "tile",
        "repaint": "repaint",
    }
)
_SHARES_OF_STEPS = (number("start_percent", 0.0, 0.0, 1.0), number("end_percent", 1.0, 0.0, 1.0))


def _encoded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (TextValue(given["text"], given["clip"]),)


def _with_guidance(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (given["conditioning"].each(lambda text: replace(text, guidance=given["guidance"])),)


def _without_guidance(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (given["conditioning"].each(lambda text: replace(text, guidance=None)),)


def _with_reference_method(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Models read their reference images as they were trained to."""
    reason = "the model reads its reference images as it was published"
    warn_unread(given, "reference_latents_method", reason, own="offset")
    return (given["conditioning"],)


def _with_area_strength(given: Mapping[str, Any]) -> tuple[Any, ...]:
    value: TextValue = given["conditioning"]
    if value.is_partial:
        regions = tuple(replace(region, strength=given["strength"]) for region in value.regions)
        return (replace(value, regions=regions),)
    if not is_one(given["strength"]):
        raise NodeUnsupported(f"strength: found {given['strength']:g} for a text without an area, expected 1")
    return (value,)


def _with_vision(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """An image that a model varies by its vision encoder, besides those before. Raises NodeUnsupported."""
    value: TextValue = given["conditioning"]
    if not given["strength"]:
        return (value,)
    if given["strength"] < 0:
        raise NodeUnsupported(f"strength: found {given['strength']:g}, expected a number from 0")
    check_parts("conditioning", "images", len(value.seen) + 1, MAX_PARTS)
    numbers = given["strength"], given["noise_augmentation"]
    use = SeenImage(given["clip_vision_output"], *numbers, node=given["node_id"])
    return (value.each(lambda text: replace(text, seen=(*text.seen, use))),)


def _with_read_image(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The image that a model reads next to its latents, which have its size."""
    use = VideoUse(of_user("pixels", given["pixels"]))
    positive, negative = (with_unread(with_video(given[name], use), given, "vae") for name in _SIDES)
    return positive, negative, BlankLatent(0, 0, 1)


def of_user(name: str, image: Any) -> Any:
    """Return an image of the user, or of a node of a workflow. Raises NodeUnsupported for one that is generated, which
    no request without a workflow reads, and for the frames of a video."""
    if image is not None and not isinstance(image, ImageFile | NodeImage):
        raise NodeUnsupported(f"{name}: expected an image of LoadImage")
    if isinstance(image, NodeImage) and image.frames:
        found = counted(image.frames, "frame")
        raise NodeUnsupported(f"{name}: found {found}, expected one image, such as one of ImageFromBatch")
    return image


def with_unread(text_value: TextValue, given: Mapping[str, Any], *names: str) -> TextValue:
    """Return a text with inputs of a node that the run does not read: it is told of where they differ from its own."""
    found = [(name, given[name]) for name in names if name in given]
    kept = [(name, value) for name, value in found if value is not None or name.startswith("clip_vision")]
    noted = tuple(Unread(given["node_id"], name, value) for name, value in kept)
    return text_value.each(lambda each: replace(each, unread=(*each.unread, *noted)))


def with_video(text_value: TextValue, use: VideoUse) -> TextValue:
    """Return a text with what else conditions a run. What was set before is kept where this says nothing."""
    return text_value.each(lambda each: replace(each, video=use if each.video is None else each.video.with_more(use)))


def _set_to_zero(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (given["conditioning"].each(lambda text: replace(text, is_zero=True)),)


def _in_area(given: Mapping[str, Any]) -> tuple[Any, ...]:
    box = tuple(float(given[name]) for name in ("x", "y", "width", "height"))
    return (_as_region(given["conditioning"], given["strength"], box=box, in_shares=False),)


def _in_share(given: Mapping[str, Any]) -> tuple[Any, ...]:
    box = tuple(float(given[name]) for name in ("x", "y", "width", "height"))
    return (_as_region(given["conditioning"], given["strength"], box=box),)


def _in_mask(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (in_mask(given, given["conditioning"]),)


def in_mask(given: Mapping[str, Any], value: TextValue) -> TextValue:
    """Return a text in the mask of a node. Raises NodeUnsupported."""
    warn_unread(given, "set_cond_area", "the text is read for the whole image, and weighted in the mask", own="default")
    return _as_region(value, given["strength"], mask=given["mask"])


def _as_region(value: TextValue, strength: float, **place: Any) -> TextValue:
    """Return a text for a part of the image. Raises NodeUnsupported."""
    if value.regions or value.is_timed:
        raise NodeUnsupported("conditioning: expected a text without an area, for all steps")
    return replace(value, text="", regions=(_region(value, strength, **place),), is_partial=True)


def _region(value: TextValue, strength: float = 1.0, **place: Any) -> RegionUse:
    if value.is_zero or value.appended or value.changed is not None:
        reason = "not one that was set to zero or extended, or made of others"
        raise NodeUnsupported(f"conditioning: expected an encoded text, {reason}")
    return RegionUse(value.text, value.clip, strength=strength, **place)


def _combined(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (combined(given["conditioning_1"], given["conditioning_2"]),)


def with_whole(given: Mapping[str, Any], value: TextValue) -> TextValue:
    """Return a text for parts of the image alone with an empty one for the whole image, which has little weight: the
    pool predicts for a text everywhere."""
    if not value.is_partial:
        return value
    most = max(region.strength for region in value.regions)
    if not most:
        raise NodeUnsupported("conditioning: found texts for parts of the image without a strength")
    factor = MAX_REGION / most
    regions = tuple(replace(region, strength=region.strength * factor) for region in value.regions)
    warn(given, f"positive: texts for parts of the image have {MAX_REGION:g} times the weight of an empty text for the "
                "whole image, which acts where they are not")  # fmt: skip
    return replace(value, regions=regions, is_partial=False)


def combined(first: TextValue, second: TextValue) -> TextValue:
    """The prediction of all texts is their mean, by the strengths of their areas; one without an area counts
    everywhere. Raises NodeUnsupported."""
    if first.is_timed or second.is_timed:
        check_parts("conditioning", "texts", len(first.timed) + len(second.timed) + 2, MAX_PARTS)
        parts = (*first.all_parts, *second.all_parts)
        return replace(parts[0], timed=parts[1:])
    if first.is_partial and not second.is_partial:
        first, second = second, first
    for name in ("clip", "controls", "guidance", "references", "image_prompts", "inpainted", "video", "seen", "gligen"):
        if getattr(first, name) != getattr(second, name):
            raise NodeUnsupported(f"conditioning_1, conditioning_2: found another {name} in each, expected the same")
    if first.is_zero or second.is_zero:
        raise NodeUnsupported("conditioning that is set to zero cannot be combined with another")
    whole_image = () if second.is_partial else (_region(second),)
    # a graph is no tree: a node that is combined with itself has twice the parts, each time
    check_parts("conditioning", "texts for parts of the image", len(first.regions) + 1 + len(second.regions), MAX_PARTS)
    regions = (*first.regions, *whole_image, *second.regions)
    return replace(first, regions=regions, unread=(*first.unread, *second.unread))


def _concatenated(given: Mapping[str, Any]) -> tuple[Any, ...]:
    first, second = given["conditioning_to"], given["conditioning_from"]
    if first.is_timed or second.is_timed:
        raise NodeUnsupported("conditioning_to, conditioning_from: expected texts for all steps")
    if first.regions or second.regions or first.is_zero or second.is_zero or first.clip != second.clip:
        raise NodeUnsupported("conditioning_to, conditioning_from: expected texts of the same text encoder")
    check_parts(
        "conditioning", "texts one behind another", len(first.appended) + len(second.appended) + 2, _MOST_APPENDED
    )
    appended = (*first.appended, second.text, *second.appended)
    characters = len(first.text) + sum(map(len, appended))
    check_parts("conditioning", "characters in texts one behind another", characters, MAX_PROMPT_CHARACTERS)
    return (replace(first, appended=appended, unread=(*first.unread, *second.unread)),)


def _in_part_of_steps(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (in_part_of_steps(given["conditioning"], (given["start"], given["end"])),)


def in_part_of_steps(value: TextValue, span: tuple[float, float]) -> TextValue:
    """Return a text in a share of the steps."""
    return value.each(lambda text: replace(text, span=span))


def _with_reference(given: Mapping[str, Any]) -> tuple[Any, ...]:
    latent = given["latent"]
    if latent is None:
        return (given["conditioning"],)
    if not isinstance(latent, EncodedImage) or latent.mask is not None:
        raise NodeUnsupported("latent: expected the latents of an image, from VAEEncode")
    return (_referring(given["conditioning"], latent.image),)


def _encoded_with_images(given: Mapping[str, Any]) -> tuple[Any, ...]:
    images = [given.get(name) for name in ("image", *(f"image{place}" for place in range(_MOST_IMAGES)))]
    found = [image for image in images if image is not None]
    if not all(isinstance(image, ImageFile) for image in found):
        raise NodeUnsupported("image: expected an image of LoadImage")
    return (_referring(encoded_prompt(given, bool(found)), *found),)


def encoded_prompt(given: Mapping[str, Any], has_images: bool) -> TextValue:
    """Return the text of a node that reads images with it."""
    if has_images and given.get("vae") is None:
        warn(given, "vae: found none; the model reads the images as reference images all the same")
    return with_unread(TextValue(given["prompt"], given["clip"]), given, "vae")


def _encoded_for_joyimage(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return _encoded_with_images({**given, **_listed(given)})


def _encoded_for_qwen_21(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Both texts, and empty latents of a square."""
    if any(image is not None for image in _listed(given).values()):
        raise NodeUnsupported("images: the pool's Qwen-Image 2.1 generates from texts; expected none")
    if (side := given["resolution"]) != _QWEN_21_SIDE:
        raise NodeUnsupported(f"resolution: found {side}, expected {_QWEN_21_SIDE} without images")
    texts = (TextValue(given[name], given["clip"]) for name in ("prompt", "negative_prompt"))
    return (*texts, BlankLatent(side, side, 1))


def _listed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the images of a node that takes as many as are linked, by the names of one that takes some."""
    names = [name for name in given if name.startswith("images.") and given[name] is not None]
    return {f"image{place}": given[name] for place, name in enumerate(names)}


def _referring(value: TextValue, *images: ImageFile) -> TextValue:
    references = (*value.references, *images)
    if len(references) > MAX_REFERENCES:
        raise NodeUnsupported(f"found {counted(len(references), 'reference image')}, expected up to {MAX_REFERENCES}")
    return replace(value, references=references)


def _style_model(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (given["style_model_name"],)


def _vision_model(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (file_stem(given["clip_name"]),)


def warn_of_crop(given: Mapping[str, Any]) -> None:
    """Tell the user of a crop that a vision encoder does not read."""
    warn_unread(given, "crop", "images are prepared as their vision encoder was trained", own="center")


def _seen(given: Mapping[str, Any]) -> tuple[Any, ...]:
    warn_of_crop(given)
    if not isinstance(given["image"], ImageFile):
        raise NodeUnsupported("image: expected an image of LoadImage")
    return (replace(given["image"], seen_by=given["clip_vision"]),)


def _with_style(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if given["strength_type"] != "multiply":
        raise NodeUnsupported(f"strength_type: found {given['strength_type']}, expected multiply")
    value: TextValue = given["conditioning"]
    use = ImagePromptUse(given["style_model"], given["clip_vision_output"], given["strength"])
    check_parts("conditioning", "image prompts", len(value.image_prompts) + 1, MAX_PARTS)
    return (replace(value, image_prompts=(*value.image_prompts, use)),)


def _gligen(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (given["gligen_name"],)


def _with_box(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A text in a box of the image, besides those before, in whole cells of latents. Raises NodeUnsupported."""
    model, places = given["gligen_textbox_model"], {name: given[name] for name in ("x", "y", "width", "height")}
    whole_cells = {name: place // _CELL * _CELL for name, place in places.items()}
    for name, place in places.items():
        if place != whole_cells[name]:
            warn(
                given, f"{name}: found {place}, which is read as {whole_cells[name]}: boxes have whole cells of latents"
            )
    box = BoxText(given["text"], given["clip"], **whole_cells)

    def added(value: TextValue) -> TextValue:
        before = () if value.gligen is None else value.gligen.boxes
        if value.gligen is not None and value.gligen.model != model:
            raise NodeUnsupported(f"gligen_textbox_model: found {model}, expected {value.gligen.model}, as before it")
        check_parts("conditioning", "boxes", len(before) + 1, MOST_BOXES)
        return replace(value, gligen=GligenUse(model, (*before, box)))

    return (given["conditioning_to"].each(added),)


def _control(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (with_control(given["conditioning"], _control_use(given)),)


def _control_of_both(given: Mapping[str, Any]) -> tuple[Any, ...]:
    use = _control_use(given, given["start_percent"], given["end_percent"])
    positive, negative = (with_unread(with_control(given[name], use), given, "vae") for name in _SIDES)
    return positive, negative


def _control_use(given: Mapping[str, Any], start: float = 0.0, end: float = 1.0) -> ControlUse:
    if not isinstance(given["image"], ImageFile):
        raise NodeUnsupported("image: expected an image of LoadImage")
    return ControlUse(given["control_net"], given["image"], given["strength"], start, end)


def with_control(value: TextValue, use: ControlUse) -> TextValue:
    """Return a text with one more ControlNet. Raises NodeUnsupported for too many."""
    check_parts("conditioning", "ControlNets", len(value.controls) + 1, MAX_PARTS)
    return value.each(lambda text: replace(text, controls=(*text.controls, use)))


def _with_mode(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (replace(given["control_net"], mode=_UNION_TYPES.get(given["type"], given["type"])),)


def _inpaint_conditioning(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if not isinstance(given["pixels"], ImageFile) or not isinstance(given["mask"], MaskFile):
        raise NodeUnsupported("pixels, mask: expected an image of LoadImage, and a mask")
    if given["noise_mask"] is False:
        raise NodeUnsupported("noise_mask: found false, expected true")
    positive, negative = (with_unread(given[name], given, "vae") for name in _SIDES)
    return positive, negative, EncodedImage(given["pixels"], given["mask"], vae=given["vae"].name)


def _row(
    name: str, inputs: tuple[NodeInput, ...], build: Any, outputs: tuple[str, ...] = ("CONDITIONING",)
) -> NodeType:
    return NodeType(name, "conditioning", inputs, outputs, build)


def _sides(least: float, most: float, share: bool = False) -> tuple[NodeInput, ...]:
    names = ("width", "height", "x", "y")
    if share:
        return tuple(number(name, 1.0 if place < 2 else 0.0, least, most) for place, name in enumerate(names))
    return tuple(whole(name, 64 if place < 2 else 0, 0, MAX_SIDE) for place, name in enumerate(names))


TEXT_NODES = (
    _row("CLIPTextEncode", (text("text"), link("clip", "CLIP")), _encoded),
    _row("Text to Conditioning", (link("clip", "CLIP"), text("text")), _encoded),
    _row("FluxGuidance", (_CONDITIONING, number("guidance", 3.5, 0.0, 100.0)), _with_guidance),
    _row("FluxDisableGuidance", (_CONDITIONING,), _without_guidance),
    _row(
        "FluxKontextMultiReferenceLatentMethod",
        (
            _CONDITIONING,
            text("reference_latents_method", "offset", choices=("offset", "index", "uxo/uno", "index_timestep_zero")),
        ),
        _with_reference_method,
    ),
    _row("ConditioningSetAreaStrength", (_CONDITIONING, _AREA_STRENGTH), _with_area_strength),
    _row(
        "unCLIPConditioning",
        (
            _CONDITIONING,
            link("clip_vision_output", "CLIP_VISION_OUTPUT"),
            number("strength", 1.0, -10.0, 10.0),
            number("noise_augmentation", 0.0, 0.0, 1.0),
        ),
        _with_vision,
    ),
    _row(
        "InstructPixToPixConditioning",
        (
            link("positive", "CONDITIONING"),
            link("negative", "CONDITIONING"),
            link("vae", "VAE"),
            link("pixels", "IMAGE"),
        ),
        _with_read_image,
        ("CONDITIONING", "CONDITIONING", "LATENT"),
    ),
    _row("ConditioningZeroOut", (_CONDITIONING,), _set_to_zero),
    _row(
        "ConditioningCombine",
        (link("conditioning_1", "CONDITIONING"), link("conditioning_2", "CONDITIONING")),
        _combined,
    ),
    _row(
        "ConditioningConcat",
        (link("conditioning_to", "CONDITIONING"), link("conditioning_from", "CONDITIONING")),
        _concatenated,
    ),
    *(
        _row(
            name,
            (
                link("conditioning_to", "CONDITIONING"),
                link("conditioning_from", "CONDITIONING"),
                number("conditioning_to_strength", 1.0, 0.0, 1.0),
            ),
            only_in_workflows,
        )
        for name in ("ConditioningAverage", "ConditioningAverage ")  # as its name was written in 2023
    ),
    _row("ConditioningSetArea", (_CONDITIONING, *_sides(0, MAX_SIDE), _AREA_STRENGTH), _in_area),
    _row("ConditioningSetAreaPercentage", (_CONDITIONING, *_sides(0.0, 1.0, share=True), _AREA_STRENGTH), _in_share),
    _row(
        "ConditioningSetMask",
        (
            _CONDITIONING,
            link("mask", "MASK"),
            _AREA_STRENGTH,
            combo("set_cond_area", ("default", "mask bounds")),
        ),
        _in_mask,
    ),
    _row(
        "ConditioningSetTimestepRange",
        (_CONDITIONING, number("start", 0.0, 0.0, 1.0), number("end", 1.0, 0.0, 1.0)),
        _in_part_of_steps,
    ),
    _row("ReferenceLatent", (_CONDITIONING, link("latent", "LATENT", is_required=False)), _with_reference),
    _row(
        "TextEncodeQwenImageEdit",
        (
            link("clip", "CLIP"),
            text("prompt"),
            link("vae", "VAE", is_required=False),
            link("image", "IMAGE", is_required=False),
        ),
        _encoded_with_images,
    ),
    _row(
        "TextEncodeQwenImageEditPlus",
        (
            link("clip", "CLIP"),
            text("prompt"),
            link("vae", "VAE", is_required=False),
            *(link(name, "IMAGE", is_required=False) for name in ("image1", "image2", "image3")),
        ),
        _encoded_with_images,
    ),
    _row("LotusConditioning", (), lambda given: (TextValue("", ClipValue("")),)),
    _row(
        "TextEncodeJoyImageEdit",
        (
            link("clip", "CLIP"),
            text("prompt"),
            link("vae", "VAE", is_required=False),
            *(link(f"images.image{place}", "IMAGE", is_required=False) for place in range(_MOST_IMAGES)),
        ),
        _encoded_for_joyimage,
    ),
    _row(
        "TextEncodeQwenImage21",
        (
            link("clip", "CLIP"),
            text("prompt"),
            text("negative_prompt"),
            whole("resolution", _QWEN_21_SIDE, 0, 4096),
            link("vae", "VAE", is_required=False),
            *(link(f"images.image_{place}", "IMAGE", is_required=False) for place in range(1, 17)),
        ),
        _encoded_for_qwen_21,
        ("CONDITIONING", "CONDITIONING", "LATENT"),
    ),
    _row("CLIPVisionLoader", (text("clip_name", choices=VISION_ENCODERS),), _vision_model, ("CLIP_VISION",)),
    _row(
        "CLIPVisionEncode",
        (
            link("clip_vision", "CLIP_VISION"),
            link("image", "IMAGE"),
            combo("crop", ("center", "none"), is_required=False),
        ),
        _seen,
        ("CLIP_VISION_OUTPUT",),
    ),
    _row("GLIGENLoader", (text("gligen_name", choices=GLIGENS),), _gligen, ("GLIGEN",)),
    _row(
        "GLIGENTextBoxApply",
        (
            link("conditioning_to", "CONDITIONING"),
            link("clip", "CLIP"),
            link("gligen_textbox_model", "GLIGEN"),
            text("text"),
            *(whole(name, 64, _CELL, MAX_SIDE) for name in ("width", "height")),
            *(whole(name, 0, 0, MAX_SIDE) for name in ("x", "y")),
        ),
        _with_box,
    ),
    _row("StyleModelLoader", (text("style_model_name", choices=STYLES),), _style_model, ("STYLE_MODEL",)),
    _row(
        "StyleModelApply",
        (
            _CONDITIONING,
            link("style_model", "STYLE_MODEL"),
            link("clip_vision_output", "CLIP_VISION_OUTPUT"),
            number("strength", 1.0, 0.0, 10.0),
            combo("strength_type", ("multiply", "attn_bias")),
        ),
        _with_style,
    ),
    _row(
        "SetUnionControlNetType",
        (link("control_net", "CONTROL_NET"), text("type", "auto", choices=tuple(_UNION_TYPES))),
        _with_mode,
        ("CONTROL_NET",),
    ),
    _row(
        "ControlNetApply",
        (_CONDITIONING, link("control_net", "CONTROL_NET"), link("image", "IMAGE"), _CONTROL_STRENGTH),
        _control,
    ),
    _row(
        "ControlNetApplyAdvanced",
        (
            *_CONTROLLED,
            link("image", "IMAGE"),
            _CONTROL_STRENGTH,
            *_SHARES_OF_STEPS,
            link("vae", "VAE", is_required=False),
        ),
        _control_of_both,
        ("CONDITIONING", "CONDITIONING"),
    ),
    _row(
        "ControlNetApplySD3",
        (*_CONTROLLED, link("vae", "VAE"), link("image", "IMAGE"), _CONTROL_STRENGTH, *_SHARES_OF_STEPS),
        _control_of_both,
        ("CONDITIONING", "CONDITIONING"),
    ),
    _row(
        "InpaintModelConditioning",
        (
            link("positive", "CONDITIONING"),
            link("negative", "CONDITIONING"),
            link("vae", "VAE"),
            link("pixels", "IMAGE"),
            link("mask", "MASK"),
            flag("noise_mask", True, is_required=False),
        ),
        _inpaint_conditioning,
        ("CONDITIONING", "CONDITIONING", "LATENT"),
    ),
)
