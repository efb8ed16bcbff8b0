"""The nodes of ComfyUI as nodes of workflows of the pool, where one request cannot say what they ask for. Pure.

A builder gets the inputs of a node, its id as "node_id", and the nodes made so far as "nodes". Kinds of nodes without a
builder here have the same values as in requests: models, LoRAs, texts, samplers, noise levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_image_nodes import tile_fields, warn_of_encoder_tiles, warn_of_vae
from modelpool.actors.http.comfy.comfy_made_nodes import MadeNodes
from modelpool.actors.http.comfy.comfy_node_types import MAX_BATCH, Builder, NodeUnsupported, check_parts, warn
from modelpool.actors.http.comfy.comfy_sampling_nodes import denoised_levels, repeated
from modelpool.actors.http.comfy.comfy_text_nodes import encoded_prompt, warn_of_crop, with_control, with_unread
from modelpool.actors.http.comfy.comfy_values import (
    LAYERS,
    WITH_WHOLE,
    AnyImage,
    AnyLatent,
    BlankLatent,
    BlankSound,
    ChangedText,
    ControlUse,
    GivenSound,
    ImageFile,
    ImageScale,
    InpaintedImage,
    MaskFile,
    NodeImage,
    NodeLatent,
    NodeMask,
    NodeSound,
    NoiseLevels,
    TextValue,
    crop_to_cells,
)
from modelpool.actors.request.image_fields import MAX_PARTS, MAX_REFERENCES

_SIDES = ("positive", "negative")
#: inputs of nodes that encode a text with images, before a dot
_IMAGES = ("image", "image1", "image2", "image3", "images")
#: texts that one conditioning is made of
_MOST_TEXTS = 100


@dataclass(frozen=True, slots=True)
class OperationRow:
    """A node of ComfyUI that is an operation of the pool.

    operation  its name
    result     of NodeImage, NodeMask or NodeLatent
    inputs     inputs of the operation, each with the input of the node that it reads; missing ones are left out
    settings   settings of the operation, each with the input of the node that has its value
    constants  settings that the node has no input for
    """

    operation: str
    result: type[NodeImage | NodeMask | NodeLatent]
    inputs: Mapping[str, str]
    settings: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)

    def build(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the outputs of a node."""
        nodes: MadeNodes = given["nodes"]
        values = {name: given[source] for name, source in self.inputs.items() if given.get(source) is not None}
        settings = {name: given[source] for name, source in self.settings.items() if given.get(source) is not None}
        return (nodes.operate(given["node_id"], self.operation, self.result, values, {**settings, **self.constants}),)


def _sampled(given: Mapping[str, Any]) -> tuple[Any, ...]:
    levels = denoised_levels(given["scheduler"], given["steps"], given["denoise"])
    return (_run(given, given["seed"], levels, given["latent_image"]),)


def _sampled_advanced(given: Mapping[str, Any]) -> tuple[Any, ...]:
    steps, start, end = given["steps"], given["start_at_step"], min(given["end_at_step"], given["steps"])
    levels = NoiseLevels(given["scheduler"], steps, max(0, steps - start))
    seed = given["noise_seed"]
    adds_noise, keeps_noise = given["add_noise"] == "enable", given["return_with_leftover_noise"] == "enable"
    stops = {"last_step": end if end < steps else 0, "adds_noise": adds_noise, "keeps_noise": keeps_noise}
    if start >= end:
        levels = replace(levels, run_steps=0)
    return (_run(given, seed, levels, given["latent_image"], stops),)


def _sampled_by_guider(given: Mapping[str, Any]) -> tuple[Any, ...]:
    guider = given["guider"]
    of_guider = {"model": guider.model, "positive": guider.positive, "negative": guider.negative, "cfg": guider.cfg}
    known = {**of_guider, "sampler_name": given["sampler"], "sound_cfg": guider.sound_cfg}
    known |= {name: given.get(name) for name in ("node_id", "nodes", "warn")}
    return _custom(known, given["noise"], given["sigmas"], given["latent_image"])


def _sampled_by_parts(given: Mapping[str, Any]) -> tuple[Any, ...]:
    noise = given["noise_seed"] if given["add_noise"] else None
    return _custom({**given, "sampler_name": given["sampler"]}, noise, given["sigmas"], given["latent_image"])


def _custom(given: Mapping[str, Any], noise: int | None, levels: NoiseLevels, start: AnyLatent) -> tuple[Any, ...]:
    """Return the outputs of a sampler of parts: a part of noise levels that ends above 0 keeps its noise in the first
    output; the second one is the last prediction without noise."""
    stops = {"last_step": levels.last_step, "adds_noise": noise is not None, "keeps_noise": bool(levels.last_step)}
    made = _run(given, noise or 0, levels, start, stops)
    if not levels.last_step or made is start:
        return made, made
    clean = {**given, "node_id": f"{given['node_id']}/denoised"}
    denoised = _run(clean, noise or 0, levels, start, {**stops, "keeps_noise": False})
    assert isinstance(denoised, NodeLatent), "the result of a run"
    return made, replace(denoised, sampler=given["node_id"])


def _run(
    given: Mapping[str, Any],
    seed: int,
    levels: NoiseLevels,
    start: AnyLatent,
    stops: Mapping[str, Any] = MappingProxyType({}),
) -> AnyLatent:
    """Return the latents of a sampler; its start, if it runs no step."""
    nodes: MadeNodes = given["nodes"]
    if not levels.run_steps:
        if isinstance(start, BlankLatent):
            raise NodeUnsupported("latent_image: empty latents that are not denoised show nothing")
        return start
    return nodes.sample(given, seed, levels, start, stops)


def _disabled_noise(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (None,)


def _split_levels(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return _split(given["sigmas"], given["step"])


def _split_levels_by_share(given: Mapping[str, Any]) -> tuple[Any, ...]:
    levels: NoiseLevels = given["sigmas"]
    end = levels.last_step or levels.steps
    run = end - (levels.steps - levels.run_steps)
    return _split(levels, max(0, run - round(run * given["denoise"])))


def _split(levels: NoiseLevels, step: int) -> tuple[Any, ...]:
    """Return noise levels up to a step, and from it on."""
    first, end = levels.steps - levels.run_steps, levels.last_step or levels.steps
    place = min(first + step, end)
    high = replace(levels, last_step=place if place < levels.steps else 0, run_steps=levels.run_steps if step else 0)
    return high, replace(levels, run_steps=levels.steps - place if place < end else 0)


def _first_level(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return noise levels with another first one."""
    levels, sigma = given["sigmas"], given["sigma"]
    if not levels.sigmas:
        if levels.run_steps != levels.steps:
            raise NodeUnsupported("sigmas: expected all levels of a schedule, or listed ones")
        return (replace(levels, first_sigma=sigma),)
    first = levels.steps - levels.run_steps
    return (replace(levels, sigmas=(*levels.sigmas[:first], sigma, *levels.sigmas[first + 1 :])),)


def _encoded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    nodes: MadeNodes = given["nodes"]
    image, _ = _in_whole_cells(given)
    return (nodes.encode(given["node_id"], image, given["vae"].name),)


def _in_whole_cells(given: Mapping[str, Any]) -> tuple[AnyImage, Any]:
    """Return the part of the image that the VAE encodes (`crop_to_cells`), and the same part of the mask of a node, if
    it has the size of the image: all of an image of a size that is known once it is made."""
    nodes: MadeNodes = given["nodes"]
    image, mask, sizes = given["pixels"], given.get("mask"), given.get("sizes", {})
    crop = crop_to_cells(*sizes["pixels"]) if "pixels" in sizes else None
    if crop is None:
        return image, mask
    part = {"x": crop.x, "y": crop.y, "width": crop.width, "height": crop.height}
    if isinstance(mask, MaskFile) and mask.image == image and mask.channel != "pad":
        mask = replace(mask, image=replace(mask.image, steps=(*mask.image.steps, crop)))
    elif mask is not None and sizes.get("mask") == sizes["pixels"]:
        mask = nodes.operate(f"{given['node_id']}/mask cells", "mask_crop", NodeMask, {"mask": mask}, part)
    if isinstance(image, ImageFile):
        return replace(image, steps=(*image.steps, crop)), mask
    made = nodes.operate(f"{given['node_id']}/cells", "image_crop", NodeImage, {"image": image}, part)
    assert isinstance(made, NodeImage), "the result of the operation"
    return made, mask


def _encoded_in_tiles(given: Mapping[str, Any]) -> tuple[Any, ...]:
    warn_of_encoder_tiles(given)
    return _encoded(given)


def _encoded_for_inpainting(given: Mapping[str, Any]) -> tuple[Any, ...]:
    nodes: MadeNodes = given["nodes"]
    image, mask = _in_whole_cells(given)
    mask = nodes.grown(f"{given['node_id']}/mask", mask, given["grow_mask_by"])
    return (nodes.encode(given["node_id"], image, given["vae"].name, mask),)


def _decoded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    _check_vae(given)
    nodes: MadeNodes = given["nodes"]
    return (nodes.decode(given["node_id"], given["samples"], given["vae"].name),)


def _check_vae(given: Mapping[str, Any]) -> None:
    nodes: MadeNodes = given["nodes"]
    if (model := getattr(given["samples"], "model", "")) in nodes.with_vae:
        warn_of_vae(given, model)


def _decoded_in_tiles(given: Mapping[str, Any]) -> tuple[Any, ...]:
    nodes: MadeNodes = given["nodes"]
    latent = given["samples"]
    size = (latent.width, latent.height) if isinstance(latent, BlankLatent) else latent.size
    tiles = dict(tile_fields(given, size, latent.frames))
    _check_vae(given)
    return (nodes.decode(given["node_id"], latent, given["vae"].name, tiles),)


def _upscaled(given: Mapping[str, Any]) -> tuple[Any, ...]:
    nodes: MadeNodes = given["nodes"]
    return (nodes.upscale(given["node_id"], given["image"], given["upscale_model"]),)


def _saved(given: Mapping[str, Any]) -> tuple[Any, ...]:
    image = given["images"]
    nodes: MadeNodes = given["nodes"]
    if isinstance(image, ImageFile):  # an output is computed
        settings = {"start": 0, "length": 1}
        return (nodes.operate(given["node_id"], "image_from_batch", NodeImage, {"image": image}, settings),)
    return (nodes.as_images(given["node_id"], image),)


def _repeated(given: Mapping[str, Any]) -> tuple[Any, ...]:
    latent = given["samples"]
    if isinstance(latent, NodeLatent):
        check_parts("amount", "images", latent.count * given["amount"], MAX_PARTS * 4)
        nodes: MadeNodes = given["nodes"]
        return (nodes.one_of(given["node_id"], [latent] * given["amount"]),)
    return repeated(given)


def _of_batch(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return some latents of a batch, with the noise of their places in it."""
    latent: AnyLatent = given["samples"]
    start = min(given["batch_index"], latent.count - 1)
    length = min(given["length"], latent.count - start)
    places = replace(latent.places, first=latent.places.first + start)
    if isinstance(latent, BlankLatent):
        return (replace(latent, count=length, places=places),)
    nodes: MadeNodes = given["nodes"]
    return (replace(nodes.pick(given["node_id"], latent, start, length), places=places),)


def _latents_joined(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a batch of both; the second ones get the size of the first ones."""
    first, second = given["samples1"], given["samples2"]
    nodes: MadeNodes = given["nodes"]
    if isinstance(first, BlankLatent) and isinstance(second, BlankLatent):
        check_parts("batch", "images", first.count + second.count, MAX_BATCH)
        return (replace(first, count=first.count + second.count),)
    if isinstance(first, BlankLatent) or isinstance(second, BlankLatent):
        raise NodeUnsupported("samples1, samples2: expected latents of images or of samplers, or two empty ones")
    if first.size != second.size or first.size == (0, 0):
        warn(given, "latents of a batch have one size in ComfyUI; here each keeps its own")
    return (nodes.one_of(given["node_id"], [first, second]),)


def _blank_layers(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if not given["layers"]:
        raise NodeUnsupported("layers: found 0, expected at least 1: the complete image is not decoded")
    size = given["width"], given["height"]
    return (BlankLatent(*size, given["batch_size"], frames=given["layers"], layers=True),)


def _cut(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the layers of an image without the complete image before them."""
    latent, where = given["samples"], (given["dim"], given["index"])
    is_layers = isinstance(latent, NodeLatent) and latent.layers == WITH_WHOLE
    if not is_layers or where != ("t", 1) or given["amount"] < latent.frames:
        found = f"{given['amount']} from {given['index']} along {given['dim']}"
        raise NodeUnsupported(f"samples: found {found}, expected all layers of a sampled image, from 1 along t")
    return (replace(latent, layers=LAYERS),)


def _cut_to_batch(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the layers of an image, each of which is decoded by itself."""
    latent = given["samples"]
    is_layers = isinstance(latent, NodeLatent) and latent.layers
    if not is_layers or (given["dim"], given["slice_size"]) != ("t", 1):
        raise NodeUnsupported("samples, dim, slice_size: expected the layers of a sampled image, t, and 1")
    return (latent,)


def _with_seeds(given: Mapping[str, Any]) -> tuple[Any, ...]:
    latent: AnyLatent = given["samples"]
    return (replace(latent, places=replace(latent.places, is_same=given["seed_behavior"] == "fixed")),)


def _with_noise_mask(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if isinstance(given["samples"], BlankSound | GivenSound | NodeSound):
        return (_sound_with_mask(given),)
    if not isinstance(given["samples"], NodeLatent):
        raise NodeUnsupported("samples: empty latents are regenerated everywhere; expected others")
    return (replace(given["samples"], mask=given["mask"]),)


def _sound_with_mask(given: Mapping[str, Any]) -> Any:
    """Audio of a video that a mask keeps, or has regenerated. Raises NodeUnsupported for a mask of both."""
    nodes: MadeNodes = given["nodes"]
    sound, level = given["samples"], nodes.level_of(given["mask"])
    if level not in (0, 1):
        found = "another mask" if level is None else f"a mask of {level:g}"
        raise NodeUnsupported(f"mask: found {found} for audio of a video, expected SolidMask of 0, which keeps all of "
                              "it, or of 1, which regenerates it")  # fmt: skip
    if not isinstance(sound, BlankSound):
        return replace(sound, is_kept=not level)
    if not level:
        raise NodeUnsupported("samples: found empty latents of audio, and a mask that keeps them; expected audio")
    return sound


def _latent_scaled(given: Mapping[str, Any]) -> tuple[Any, ...]:
    latent, width, height = given["samples"], given["width"], given["height"]
    if isinstance(latent, BlankLatent):
        width = width or round(latent.width * height / latent.height)
        height = height or round(latent.height * width / latent.width)
        return (replace(latent, width=width or latent.width, height=height or latent.height),)
    settings = {"width": width, "height": height, "method": given["upscale_method"], "crop": given["crop"] == "center"}
    nodes: MadeNodes = given["nodes"]
    values = {"samples": latent}
    return (nodes.operate(given["node_id"], "latent_upscale_to_pixels", NodeLatent, values, settings),)


def _latent_scaled_by(given: Mapping[str, Any]) -> tuple[Any, ...]:
    latent, factor = given["samples"], given["scale_by"]
    if isinstance(latent, BlankLatent):
        return (replace(latent, width=round(latent.width * factor), height=round(latent.height * factor)),)
    nodes: MadeNodes = given["nodes"]
    settings = {"factor": factor, "method": given["upscale_method"]}
    return (nodes.operate(given["node_id"], "latent_upscale_by", NodeLatent, {"samples": latent}, settings),)


def _scaled(given: Mapping[str, Any]) -> tuple[Any, ...]:
    width, height, image = given["width"], given["height"], given["image"]
    if not width and not height:
        return (image,)
    crops = given["crop"] == "center"
    if isinstance(image, ImageFile):
        return (_with_step(image, ImageScale(given["upscale_method"], size=(width, height), crops=crops)),)
    settings = {"width": width, "height": height, "method": given["upscale_method"], "crop": crops}
    nodes: MadeNodes = given["nodes"]
    return (nodes.operate(given["node_id"], "image_scale", NodeImage, {"image": image}, settings),)


def _scaled_by_factor(given: Mapping[str, Any]) -> tuple[Any, ...]:
    image, factor = given["image"], given["scale_by"]
    if isinstance(image, ImageFile):
        return (_with_step(image, ImageScale(given["upscale_method"], factor=factor)),)
    nodes: MadeNodes = given["nodes"]
    settings = {"factor": factor, "method": given["upscale_method"]}
    return (nodes.operate(given["node_id"], "image_scale_by", NodeImage, {"image": image}, settings),)


def _with_step(image: ImageFile, step: ImageScale) -> ImageFile:
    return replace(image, steps=(*image.steps, step))


def _inverted(given: Mapping[str, Any]) -> tuple[Any, ...]:
    mask, nodes = given["mask"], given["nodes"]
    if isinstance(mask, MaskFile) and not mask.grown:
        return (replace(mask, inverted=not mask.inverted),)
    return (nodes.operate(given["node_id"], "mask_invert", NodeMask, {"mask": mask}, {}),)


def _grown(given: Mapping[str, Any]) -> tuple[Any, ...]:
    nodes: MadeNodes = given["nodes"]
    return (nodes.grown(given["node_id"], given["mask"], given["expand"]),)


def _mask_of_image(given: Mapping[str, Any]) -> tuple[Any, ...]:
    image, nodes = given["image"], given["nodes"]
    if isinstance(image, ImageFile):
        return (MaskFile(image, given["channel"][0].upper()),)
    settings = {"channel": given["channel"]}
    return (nodes.operate(given["node_id"], "mask_from_image", NodeMask, {"image": image}, settings),)


def _joined(given: Mapping[str, Any]) -> tuple[Any, ...]:
    first, second = given["conditioning_to"], given["conditioning_from"]
    return (_changed(first, "encoded_concat", {"first": first, "second": second}),)


def _averaged(given: Mapping[str, Any]) -> tuple[Any, ...]:
    first, second = given["conditioning_to"], given["conditioning_from"]
    settings = {"strength": given["conditioning_to_strength"]}
    return (_changed(first, "encoded_average", {"first": first, "second": second}, settings),)


def _changed(
    like: TextValue, operation: str, texts: Mapping[str, TextValue], settings: Mapping[str, float] | None = None
) -> TextValue:
    """Return a text that an operation makes; everything else comes from `like`. Raises NodeUnsupported."""
    for text in texts.values():
        if text.is_timed:
            raise NodeUnsupported("conditioning: expected texts for all steps")
        if text.regions or text.references or text.image_prompts:
            raise NodeUnsupported("conditioning: expected texts for the whole image, without images")
    # a graph is no tree: a text that is put together with itself has twice the parts, each time
    parts = sum(1 if text.changed is None else text.changed.parts for text in texts.values())
    check_parts("conditioning", "texts one behind another", parts, _MOST_TEXTS)
    change = ChangedText(operation, tuple(texts.items()), tuple((settings or {}).items()), parts)
    return replace(like, text="", appended=(), is_zero=False, changed=change)


def _with_reference(given: Mapping[str, Any]) -> tuple[Any, ...]:
    latent = given["latent"]
    if latent is None:
        return (given["conditioning"],)
    if not isinstance(latent, NodeLatent) or latent.image is None or latent.mask is not None:
        raise NodeUnsupported("latent: expected the latents of an image, from VAEEncode")
    return (_referring(given["conditioning"], latent.image),)


def _encoded_with_images(given: Mapping[str, Any]) -> tuple[Any, ...]:
    images = [given[name] for name in given if name.partition(".")[0] in _IMAGES and given[name] is not None]
    return (_referring(encoded_prompt(given, bool(images)), *images),)


def _referring(value: TextValue, *images: AnyImage) -> TextValue:
    check_parts("conditioning", "reference images", len(value.references) + len(images), MAX_REFERENCES)
    return value.each(lambda text: replace(text, references=(*text.references, *images)))


def _seen(given: Mapping[str, Any]) -> tuple[Any, ...]:
    warn_of_crop(given)
    return (replace(given["image"], seen_by=given["clip_vision"]),)


def _control(given: Mapping[str, Any]) -> tuple[Any, ...]:
    use = ControlUse(given["control_net"], given["image"], given["strength"], 0.0, 1.0)
    return (with_control(given["conditioning"], use),)


def _control_of_both(given: Mapping[str, Any]) -> tuple[Any, ...]:
    span = given["start_percent"], given["end_percent"]
    use = ControlUse(given["control_net"], given["image"], given["strength"], *span)
    positive, negative = (with_unread(with_control(given[name], use), given, "vae") for name in _SIDES)
    return positive, negative


def _inpaint_conditioning(given: Mapping[str, Any]) -> tuple[Any, ...]:
    nodes: MadeNodes = given["nodes"]
    image, mask = _in_whole_cells(given)
    latent = nodes.encode(given["node_id"], image, given["vae"].name)
    if given["noise_mask"] is not False:
        latent = replace(latent, mask=mask)
    shown = InpaintedImage(image, mask)
    texts = (given[name].each(lambda text: replace(text, inpainted=shown)) for name in _SIDES)
    positive, negative = (with_unread(each, given, "vae") for each in texts)
    return positive, negative, latent


#: builders by the kind of node
WORKFLOW_NODES: Mapping[str, Builder] = MappingProxyType(
    {
        "KSampler": _sampled,
        "KSamplerAdvanced": _sampled_advanced,
        "SamplerCustomAdvanced": _sampled_by_guider,
        "SamplerCustom": _sampled_by_parts,
        "DisableNoise": _disabled_noise,
        "SetFirstSigma": _first_level,
        "SplitSigmas": _split_levels,
        "SplitSigmasDenoise": _split_levels_by_share,
        "VAEEncode": _encoded,
        "VAEEncodeTiled": _encoded_in_tiles,
        "VAEEncodeForInpaint": _encoded_for_inpainting,
        "VAEDecode": _decoded,
        "VAEDecodeTiled": _decoded_in_tiles,
        "LatentFromBatch": _of_batch,
        "LatentBatch": _latents_joined,
        "EmptyQwenImageLayeredLatentImage": _blank_layers,
        "LatentCut": _cut,
        "LatentCutToBatch": _cut_to_batch,
        "LatentBatchSeedBehavior": _with_seeds,
        "InpaintModelConditioning": _inpaint_conditioning,
        "RepeatLatentBatch": _repeated,
        "SetLatentNoiseMask": _with_noise_mask,
        "LatentUpscale": _latent_scaled,
        "LatentUpscaleBy": _latent_scaled_by,
        "ImageScale": _scaled,
        "ImageScaleBy": _scaled_by_factor,
        "ImageUpscaleWithModel": _upscaled,
        "InvertMask": _inverted,
        "GrowMask": _grown,
        "ImageToMask": _mask_of_image,
        "ConditioningConcat": _joined,
        **dict.fromkeys(("ConditioningAverage", "ConditioningAverage "), _averaged),
        "ReferenceLatent": _with_reference,
        "TextEncodeQwenImageEdit": _encoded_with_images,
        "TextEncodeQwenImageEditPlus": _encoded_with_images,
        "TextEncodeJoyImageEdit": _encoded_with_images,
        "CLIPVisionEncode": _seen,
        "ControlNetApply": _control,
        "ControlNetApplyAdvanced": _control_of_both,
        "ControlNetApplySD3": _control_of_both,
        "SaveImage": _saved,
        "PreviewImage": _saved,
        "SaveImageWebsocket": _saved,
    }
)
