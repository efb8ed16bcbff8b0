"""Fields of requests from the values of ComfyUI's nodes: LoRAs, texts, regions and noise levels. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_families import family_of
from modelpool.actors.http.comfy.comfy_node_types import NodeUnsupported, file_stem
from modelpool.actors.http.comfy.comfy_values import (
    CELL_SIDE,
    AdapterValue,
    BlankLatent,
    BlankSound,
    ClipValue,
    ControlUse,
    GivenSound,
    GuideUse,
    ImagePromptUse,
    LoraUse,
    ModelSampling,
    ModelValue,
    NodeSound,
    RegionUse,
    SeenImage,
    TextValue,
    VaeValue,
)
from modelpool.actors.http.service.clip_layers import layers_left_out
from modelpool.pool.values.core.shift_by_size import ShiftBySize

#: multiple of the sides of an image that models read as patches, in pixels
PATCHES = 16
#: why options are not read
NO_GUIDANCE, OF_UNETS = "cfg 1 is no guidance", "they are of UNets alone"
#: options that change guidance
GUIDANCE_OPTIONS = ("cfg_zero", "rescale_cfg", "cfg_norm", "fresca", "apg", "tcfg", "perp_neg")
#: the frame rate that ComfyUI's models of videos with audio read without LTXVConditioning
_USUAL_RATE = 25.0
#: fields of requests that have other names in nodes
_NODE_NAMES: Mapping[str, str] = MappingProxyType(
    {"time_signature": "timesignature", "key_scale": "keyscale", "lyrics_language": "language"}
)
#: ComfyUI's classes of transformers with other names of attention layers: UNetTemporalAttentionMultiply finds none of
#: them, so that the node changes nothing
_OTHER_ATTENTION = ("WAN", "HunyuanVideo", "Flux", "QwenImage", "GenmoMochi")
#: ComfyUI's classes of transformers with blocks of one kind, of which its nodes skip those that they call double
_BLOCKS_OF_ONE_KIND = ("WAN", "QwenImage", "SD3", "LTX", "GenmoMochi")
#: ComfyUI's class of models that read the words of T5 and one padding token, and the least padding and length that mean
#: that
_UNPADDED, _OWN_PADDING = "Chroma", (1, 0)
#: ComfyUI's classes of models with ControlNets that it loads as patches, and their titles
_PATCHED: Mapping[str, str] = MappingProxyType({"ZImage": "Z-Image", "QwenImage": "Qwen-Image"})
#: patches of the latents of a small and of a large image, between which ModelSamplingFlux interpolates, and the side of
#: a patch in pixels; and the exponents that Flux dev has there. Source: the configuration of Flux dev's scheduler
_SHIFT_TOKENS, _PATCH_SIDE, _FLUX_EXPONENTS = (256, 4096), 16, (0.5, 1.15)


def lora_fields(use: LoraUse, clip: ClipValue) -> dict[str, Any]:
    """Return a LoRA of a request; the text encoders `clip` may come from a node before it."""
    on_text = use.text_strength if use in clip.loras else 0.0
    fields = model_lora_fields(use)
    return fields if on_text == use.strength and not use.merge else {**fields, "text_strength": on_text}


def model_lora_fields(use: LoraUse) -> dict[str, Any]:
    """Return a LoRA, or a model that is merged, of a run that encodes no text."""
    fields: dict[str, Any] = {"name": use.name, "strength": use.strength}
    return {**fields, **_merge_fields(use)}


def text_lora_fields(use: LoraUse) -> dict[str, Any]:
    """Return a LoRA, or a model that is merged, of text encoders."""
    return {"name": use.name, "strength": use.text_strength, **({"merge": use.merge} if use.merge else {})}


def _merge_fields(use: LoraUse) -> dict[str, Any]:
    if not use.merge:
        return {}
    return {"merge": use.merge} | ({"blocks": use.blocks} if use.blocks else {})


def padding_of(text: TextValue, family: str) -> tuple[int, int] | None:
    """Return the least padding and length of T5's tokens, where they differ from the family's. Raises
    NodeUnsupported for families that read no more than their own."""
    padding = text.clip.padding
    if padding is None or (padding == _OWN_PADDING and family_of(family).comfyui == _UNPADDED):
        return None
    if family_of(family).comfyui != _UNPADDED:
        found = f"min_padding {padding[0]} and min_length {padding[1]} with {family or 'this model'}"
        raise NodeUnsupported(f"T5TokenizerOptions: found {found}, expected a model of {_UNPADDED}")
    return padding


def plain_text(text: TextValue, family: str) -> str:
    """Return the text of a request without a workflow. Raises NodeUnsupported, as `prompt_text`."""
    if padding_of(text, family):
        raise NodeUnsupported("T5TokenizerOptions: another padding than that of the model needs a workflow")
    return prompt_text(text, family)


def is_one_image(text: TextValue, family: str) -> bool:
    """Whether a model varies one image as it is: the field `image` of a request."""
    varies = family_of(family).varies_images
    return varies and len(text.seen) == 1 and (text.seen[0].strength, text.seen[0].noise) == (1.0, 0.0)


def seen_fields(use: SeenImage, model: str, family: str) -> dict[str, Any]:
    """Return an image that `model` varies, or reads next to a text, as an image prompt of a request, without the image.
    A model that varies images has its vision encoder in its file."""
    noise = 0.0 if family_of(family).sees_states else use.noise
    fields: dict[str, Any] = {"model": model, "strength": use.strength, "noise": noise}
    encoder = use.image.seen_by
    is_other = not family_of(family).varies_images and encoder != file_stem(model)
    return {**fields, "encoder": encoder} if is_other and encoder else fields


def seen_warnings(text: TextValue, family: str) -> Iterator[str]:
    """Yield the noise on embeddings of images that a model reads without noise."""
    for use in text.seen if family_of(family).sees_states else ():
        if use.noise:
            yield (
                f"node {use.node}: noise_augmentation: found {use.noise:g}, which is not read: {family} reads "
                f"embeddings without noise"
            )


def check_seen(positive: TextValue, negative: TextValue, model: str, family: str) -> None:
    """Raise NodeUnsupported for images of unCLIPConditioning that a model does not vary."""
    if negative.seen:
        raise NodeUnsupported("negative: found an image of unCLIPConditioning, expected it in positive alone")
    if positive.seen and not family_of(family).sees_images:
        found = f"found an image for model {model!r} ({family or 'an unknown family'})"
        expected = "one that varies images or reads embeddings of images, such as Stable Diffusion 2.1 unCLIP"
        raise NodeUnsupported(f"unCLIPConditioning: {found}, expected {expected}")


def prompt_text(text: TextValue, family: str) -> str:
    """Return a text with those that are appended to it, which CLIP reads on their own. Raises NodeUnsupported."""
    if text.appended and not family_of(family).clip_only:
        raise NodeUnsupported("ConditioningConcat: expected a model whose text encoders are CLIP's")
    return " BREAK ".join((text.text, *text.appended))


def region_fields(region: RegionUse, size: tuple[int, int]) -> dict[str, Any]:
    """Return a region of a request for an image of `size`, with its mask as a value of nodes. Raises
    NodeUnsupported."""
    fields = {"prompt": region.text, "strength": region.strength}
    if region.mask is not None:
        return {**fields, "mask": region.mask}
    factors = (*size, *size) if region.in_shares else (1, 1, 1, 1)
    left, top, width, height = (round(side * factor) for side, factor in zip(region.box, factors, strict=True))
    width, height = min(width, size[0] - left), min(height, size[1] - top)
    if width < 1 or height < 1:
        raise NodeUnsupported(f"area: found one outside of the image of {size[0]}x{size[1]}")
    return {**fields, "box": (left, top, width, height)}


def shift_of(sampling: ModelSampling, family: str, size: tuple[Any, Any]) -> float:
    """Return the shift that a node sets for images of `size`; 0 if it is the one that the model has by itself."""
    if sampling.size is None:
        return sampling.shift
    if family_of(family).is_guided_by_default and (sampling.exponents, sampling.size) == (_FLUX_EXPONENTS, size):
        return 0.0
    width, height = sampling.size
    by_size = ShiftBySize(_SHIFT_TOKENS, sampling.exponents)
    try:
        return math.exp(by_size.exponent(width * height // _PATCH_SIDE**2))
    except OverflowError:
        raise NodeUnsupported(
            f"max_shift, base_shift: found {sampling.exponents} for {width}x{height}, expected a finite shift"
        ) from None


def whole_cells(width: int, height: int) -> dict[str, int]:
    """Return the sides of an image as a request has them: parts of a cell of 8 pixels are cut off, as latents do."""
    return {
        name: max(CELL_SIDE, side // CELL_SIDE * CELL_SIDE) for name, side in (("width", width), ("height", height))
    }


def image_guidance(positive: TextValue, negative: TextValue, cfg: float, family: str) -> dict[str, float]:
    """Return the guidance by the images that a model reads: none where both texts have them, and as much as by the text
    where the negative one has no images: the negative prediction then reads neither text nor images. Nothing if
    a node set it, and for families without."""
    if positive.video is not None and "image_cfg" in positive.video.fields():
        return {}
    if positive.video is not None and positive.video.image is not None and family_of(family).is_guided_by_image:
        has_image = negative.video is not None and negative.video.image is not None
        return {"image_cfg": 1.0 if has_image or cfg == 1 else cfg}
    if cfg == 1 or not positive.references or not family_of(family).is_guided_by_references:
        return {}
    return {"image_cfg": 1.0 if negative.references else cfg}


def as_edited(text: TextValue, family: str) -> TextValue:
    """Return a text with the image that a model edits where a request has it: models that are guided by a reference
    image read it as that. Raises NodeUnsupported."""
    video = text.video
    if video is None or video.image is None:
        return text
    if not family_of(family).edits_reference:
        return text
    if text.references:
        raise NodeUnsupported("InstructPixToPixConditioning: found reference images next to it, expected one image")
    return replace(text, references=(video.image,), video=replace(video, image=None))


def acting_options(model: ModelValue, cfg: float, family: str) -> dict[str, Any]:
    """Return the options of a run that act: options of guidance do nothing with cfg 1, some families have guidance that
    is normed by itself, and some no attention that nodes scale, or no single blocks that nodes skip. Raises
    NodeUnsupported."""
    found = dict(model.options)
    if model.guided_by and not family_of(family).has_second:
        raise NodeUnsupported(
            f"model_negative: found {model.guided_by!r} next to {family or 'this model'}, expected a model with a "
            "second one, such as Ideogram 4"
        )
    for name in GUIDANCE_OPTIONS if cfg == 1 else ():
        found.pop(name, None)
    norm = found.get("cfg_norm", {})
    if norm.get("pre_cfg") and not (family_of(family).is_normed and norm["strength"] == 1):
        expected = "false, or a strength of 1 with a model that is scaled to the whole norm by itself, such as Lumina 2"
        raise NodeUnsupported(f"CFGNorm, pre_cfg: found true with {family or 'this model'}, expected {expected}")
    if family_of(family).is_normed:
        found.pop("cfg_norm", None)
    if family_of(family).is_a(*_OTHER_ATTENTION):
        found.pop("attention_scale", None)
    if family_of(family).is_a(*_BLOCKS_OF_ONE_KIND) and found.get("slg", {}).get("single"):
        found["slg"] = {**found["slg"], "single": ()}
    return found


def samples_sound(family: str) -> bool:
    """Whether models of a family sample the audio of a video with its frames."""
    return family_of(family).samples_sound


def sound_fields(
    text: TextValue, cfg: float, sound_cfg: float | None, family: str, blank: BlankSound | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields and the options of a run of latents with audio: the frame rate, on which its length depends,
    and its guidance: as the frames, or with the scale `sound_cfg`. `blank`: the empty audio that it starts from. Raises
    NodeUnsupported."""
    if not samples_sound(family):
        raise NodeUnsupported("latent_image: found frames with audio, which the model does not sample together")
    rate = _USUAL_RATE if text.video is None else text.video.fields().get("frame_rate", _USUAL_RATE)
    if blank is not None and blank.rate != rate:
        found = f"{blank.rate:g} of the empty audio, and {rate:g} of the text"
        raise NodeUnsupported(f"frame_rate: found {found}, expected one rate: the audio is as long as the frames")
    scale = cfg if sound_cfg is None else sound_cfg
    if cfg == 1 and scale != 1:
        raise NodeUnsupported(f"video_cfg, audio_cfg: found 1 and {scale:g}, expected no guidance, or that of frames")
    # ComfyUI scales guided predictions by nothing
    return {"frame_rate": rate}, {} if cfg == 1 else {"sound": {"cfg": scale, "rescale": 0.0}}


def is_guided(family: str) -> bool:
    """Whether images guide the videos of models of a family at frames of them."""
    return family_of(family).is_guided_by_frames


def guide_warnings(node_id: str, guides: tuple[GuideUse, ...], model: str) -> Iterator[str]:
    """Yield what images that guide a video are said to have, and a run has not: another VAE, and a place behind the
    frames."""
    for guide in guides:
        if guide.vae not in ("", model):
            yield (f"node {node_id}: vae: found the one of {guide.vae!r} for an image that guides; the VAE of "
                   f"model {model!r} encodes it")  # fmt: skip
        if guide.is_added and guide.is_first:
            yield (f"node {node_id}: the image of LTXVAddGuide at frame 0 takes the place of the first frame; ComfyUI "
                   "has it behind the frames")  # fmt: skip


def encoder_warning(vae: VaeValue, model: ModelValue) -> str:
    """Return the warning if audio of the user has another VAE than the model that samples; "" for the same."""
    expected = f"the VAE of model {model.name!r} encodes it"
    if vae.name not in ("", model.name):
        return f"audio_vae: found the one of {vae.name!r} for the audio; {expected}"
    is_other = vae.file and model.has_vae
    return f"audio_vae: found vae_name {vae.file[:100]}, which is not read; {expected}" if is_other else ""


def given_sound_warnings(
    node_id: str, sound: NodeSound | GivenSound, model: ModelValue, has_all_noise: bool
) -> Iterator[str]:
    """Yield what audio that a run is given does not do in it. Raises NodeUnsupported for audio that a run would change
    a little."""
    if isinstance(sound, GivenSound) and (warning := encoder_warning(sound.vae, model)):
        yield f"node {node_id}: {warning}"
    if sound.is_kept:
        return
    if not has_all_noise:
        raise NodeUnsupported("latent_image: found audio of LTXVAudioVAEEncode in a run of some of the noise levels: "
                              "expected SetLatentNoiseMask with a mask of 0, which keeps it")  # fmt: skip
    yield (f"node {node_id}: latent_image: the audio of LTXVAudioVAEEncode does not act: the run begins with noise "
           "alone; SetLatentNoiseMask with a mask of 0 keeps it")  # fmt: skip


def silent_warnings(node_id: str, model: str, family: str) -> Iterator[str]:
    """Yield what a run of frames without audio has besides, by a model that samples both."""
    if samples_sound(family):
        yield (f"node {node_id}: latent_image: found frames without audio: model {model!r} samples them with audio, "
               "which the video has; LTXVConcatAVLatent adds it")  # fmt: skip


def option_warnings(node_id: str, model: ModelValue, cfg: float, family: str) -> Iterator[str]:
    """Yield what options ask for that a family does by itself, or that needs guidance, and is not read."""
    options = dict(model.options)
    strength = options.get("cfg_norm", {}).get("strength", 1.0)
    if strength != 1 and (cfg == 1 or family_of(family).is_normed):
        own = NO_GUIDANCE if cfg == 1 else f"the guidance of model {model.name!r} is normed by itself, with 1"
        yield f"node {node_id}: CFGNorm: found strength {strength:g}, which is not read: {own}"
    is_told = "pre_cfg" not in options.get("cfg_norm", {})
    left_out = [
        name for name in GUIDANCE_OPTIONS if cfg == 1 and name in options and (name != "cfg_norm" or not is_told)
    ]
    if left_out:
        yield f"node {node_id}: found options of guidance ({', '.join(left_out)}), which are not read: {NO_GUIDANCE}"
    if "attention_scale" in options and family_of(family).is_a(*_OTHER_ATTENTION):
        yield f"node {node_id}: found factors of attention, which model {model.name!r} does not read: {OF_UNETS}"


def negative_warnings(node_id: str, positive: TextValue, negative: TextValue, family: str) -> Iterator[str]:
    """Yield what only the negative text of a run says besides its text: the run has one value of it, of positive; and
    that it is read with reference images although it has none, by families without guidance by them."""
    guided = positive.video is not None and "image_cfg" in positive.video.fields()
    guided |= family_of(family).is_guided_by_references
    if positive.references and not negative.references and not guided:
        yield f"node {node_id}: negative: found no reference images, those of positive are read with both texts"
    fields = [{} if text.video is None else {**text.video.fields(), **text.video.images()}
              for text in (positive, negative)]  # fmt: skip
    own = [{**found, "guidance": text.guidance, "inpainted image": text.inpainted}
           for found, text in zip(fields, (positive, negative), strict=True)]  # fmt: skip
    ours, others = own
    expected = {**ours, "image": None} if "image_cfg" in ours else ours
    names = [_NODE_NAMES.get(name, name) for name, value in others.items() if value not in (None, expected.get(name))]
    if names:
        yield f"node {node_id}: negative: found another {', '.join(names)} than positive, which is not read"


def controls_of(model: ModelValue, text: TextValue, family: str) -> tuple[ControlUse, ...]:
    """Return the ControlNets of a run: patches of its model, and ones of its text. Raises NodeUnsupported for patches
    of models that have none here."""
    if model.controls and not family_of(family).is_a(*_PATCHED):
        found = f"found {model.controls[0].net.name!r} on {family or 'this model'}"
        raise NodeUnsupported(
            f"model_patch: {found}, expected a ControlNet of {' or '.join(_PATCHED.values())}: the pool reads no other "
            "patches"
        )
    return (*model.controls, *text.controls)


def image_prompts_of(model: ModelValue, text: TextValue, family: str) -> tuple[ImagePromptUse, ...]:
    """Return the image prompts of a run: of its model, and of its text, with the names of their files. Raises
    NodeUnsupported for a preset that models of the family do not have, and for blocks of another one."""
    found = (*(_named(use, family) for use in model.image_prompts), *text.image_prompts)
    if found and text.seen:
        raise NodeUnsupported(
            "unCLIPConditioning: found it next to an IP-Adapter or a style model, expected one of them"
        )
    return found


def _named(use: ImagePromptUse, family: str) -> ImagePromptUse:
    is_xl = family_of(family).has_blocks_of_xl
    is_first = family_of(family).is_a("SD15")
    if use.blocks_of_xl:
        if not is_xl and not is_first:
            raise NodeUnsupported("weight_type: found one of the attentions of Stable Diffusion 1 and XL, expected "
                                  f"linear for {family or 'this model'}")  # fmt: skip
        use = replace(use, blocks=use.blocks_of_xl if is_xl else use.blocks)
    elif use.blocks and not is_xl:
        found = ", ".join(name for name, _ in use.blocks)
        raise NodeUnsupported(f"weight_type: found one of block {found} of Stable Diffusion XL, expected linear for "
                              f"{family or 'this model'}")  # fmt: skip
    adapter = use.model
    assert isinstance(adapter, AdapterValue), "image prompts of models are IP-Adapters"
    if adapter.for_xl is None:
        return replace(use, model=adapter.name)
    name = adapter.for_xl if is_xl else adapter.name if is_first else ""
    if not name:
        raise NodeUnsupported(f"preset: found one without a file for {family or 'this model'}, expected "
                              "IPAdapterModelLoader with the name of a file")  # fmt: skip
    return replace(use, model=name)


def image_prompt_fields(use: ImagePromptUse) -> dict[str, Any]:
    """Return an image prompt of a request without its image and mask."""
    found: dict[str, Any] = {"model": use.model, "strength": use.strength}
    if (use.start, use.end) != (0, 1):
        found |= {"start": use.start, "end": use.end, "shares_of": "noise"}
    return found | ({"blocks": dict(use.blocks)} if use.blocks else {})


def clip_skip(text: TextValue, family: str) -> int:
    """Return the layers that are skipped besides those that the family skips. Raises NodeUnsupported."""
    if text.clip.last_layer is None:
        return 0
    by_family = layers_left_out(family)
    skipped = -text.clip.last_layer - 1 - by_family
    if skipped < 0:
        raise NodeUnsupported(f"stop_at_clip_layer: found {text.clip.last_layer}, expected {-1 - by_family} or less")
    return skipped


def makes_videos(family: str) -> bool:
    """Whether models of this family read the frames of a video as one latent."""
    return family_of(family).reads_frames


def blank_for(blank: BlankLatent, family: str) -> BlankLatent:
    """Return empty latents as models of a family read them: empty latents of an image are one frame of a video."""
    is_image = blank.width and not (blank.frames or blank.seconds or blank.layers)
    return replace(blank, frames=1) if is_image and makes_videos(family) else blank


def reads_guidance(family: str) -> bool:
    """Whether models of a family read the scale of FluxGuidance; as far as is known, for one without a name."""
    return not family or family_of(family).reads_guidance


def reads_image_instead(family: str) -> bool:
    """Whether models of a family read an image in the place of noise, and estimate what it shows."""
    return family_of(family).reads_image_instead


def guidance_warning(node_id: str, guidance: float, model: str) -> str:
    """Return the warning about a guidance scale that a model does not read."""
    return f"node {node_id}: the guidance {guidance:g} is not read: model {model!r} has no guidance as an input"


def unread_warnings(
    texts: Iterable[TextValue], model: str, family: str, size: tuple[int, int], seconds: float = 0.0
) -> Iterator[str]:
    """Yield warnings for settings of nodes that differ from the run. In a run, the VAE of the model encodes images,
    vision encoders see the first and the last image of a video, and sizes and seconds next to a text are the result's
    ((0, 0) and 0 if they are not known)."""
    own = {"width": size[0], "target_width": size[0], "height": size[1], "target_height": size[1], "duration": seconds}
    for text in texts:
        seen = () if text.video is None else (text.video.image, text.video.last_image)
        for each in text.unread:
            found, reason = each.value, ""
            if found is None:
                if not family_of(family).sees_first_image:
                    continue
                found, reason = "none", "the model sees the image that the video begins with"
            elif each.name == "vae" and found.name not in ("", model):
                found, reason = f"the one of {found.name!r}", f"the VAE of model {model!r} is"
            elif each.name.startswith("clip_vision") and found not in seen:
                found, reason = "another image", "the model sees the image that the video begins or ends with"
            elif each.name in own and found != own[each.name]:
                shown = f", {own[each.name]:g}" if own[each.name] else ""
                what = "number of seconds" if each.name == "duration" else "size"
                found, reason = f"{found:g}", f"the model receives the {what} of the result{shown}"
            if reason:
                yield f"node {each.node}: {each.name}: found {found}, which is not read: {reason}"


def check_guidance(text: TextValue, cfg: float, family: str) -> None:
    """Raise NodeUnsupported for classifier-free guidance beside the guidance scale that a model reads."""
    if cfg != 1 and text.guidance is not None and reads_guidance(family):
        raise NodeUnsupported(f"cfg: found {cfg:g}, expected 1 with FluxGuidance")


def has_distilled_guidance(family: str) -> bool:
    """Whether models of a family read the guidance scale as an input."""
    return family_of(family).is_guided_by_default
