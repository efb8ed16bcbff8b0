"""Every input of every node is read, told of in a warning, or refused: a change of it, to any other legal value, is
another request, a warning with its name, or a refusal. Inputs that cannot matter are listed here, each with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import pytest

from modelpool.actors.http.comfy.comfy_pack_numbers import PACK_NUMBERS
from modelpool.actors.http.comfy.comfy_pack_switches import PACK_SWITCHES
from modelpool.actors.http.comfy.comfy_pack_texts import PACK_TEXTS
from tests.actors.http.comfy.every_setting import (
    MAKING,
    PROVIDERS,
    SUBJECT,
    Maker,
    Setting,
    changes_of,
    meaning,
)
from tests.tiers import InRotation


def _batch(make: Maker, place: int) -> list[Any]:
    return make.add("RepeatLatentBatch", samples=make.sampled(seed=place), amount=4)


def _images(make: Maker, place: int) -> list[Any]:
    return make.add("VAEDecode", samples=_batch(make, place), vae=[make.model(), 2])


def _instructed(make: Maker, place: int, has_image: bool = True) -> list[Any]:
    text = make.text(place)
    if not has_image:
        return text
    given = {"positive": text, "negative": text, "vae": [make.model(), 2], "pixels": make.image()}
    return make.add("InstructPixToPixConditioning", **given)


def _empty(make: Maker, place: int) -> list[Any]:
    return make.add("CLIPTextEncode", clip=[make.model(place), 1], text="")


def _row(make: Maker, place: int) -> Any:
    return {"on": True, "lora": ("light", "dark")[place], "strength": 0.5}


def _rows(make: Maker, place: int) -> Any:
    return [{"name": ("light", "dark")[place], "strength": 0.5, "active": True}]


def _word(make: Maker, place: int) -> list[Any]:
    return make.add("PrimitiveString", value=("red", "old")[place])


def _masks(make: Maker, place: int) -> list[Any]:
    return make.add("ImageToMask", image=_images(make, place), channel="red")


def _region(make: Maker, place: int) -> Any:
    return {"x": 8, "y": 8, "width": 24 + place, "height": 16}


def _other(slot: int) -> Any:
    """A part of another model than the one of a pipe, and of that one."""
    return lambda make, place: [make.model(1 - place), slot]


_LOADED = {"optional_controlnet_stack": None, "lora_name": "light", "resolution": "width x height (custom)"}
_OVERRIDES = {"model_override": _other(0), "clip_override": _other(1), "vae_override": None}
_PIPE_PARTS = {"model": _other(0), "vae": _other(2), "clip": _other(1)}
_WIDE = {"width": 128, "height": 64}
_SEAMS = {"seam_fix_mode": "Band Pass", "seam_fix_width": 32, "seam_fix_denoise": 0.5, "tile_width": 64,
          "tile_height": 64, "upscale_by": 4.0, "steps": 8, "denoise": 0.5}  # fmt: skip


def _large(make: Maker, place: int) -> list[Any]:
    return make.add("ImageScale", image=make.image(place), width=256, height=192, upscale_method="area", crop="center")


def _each(kinds: tuple[str, ...], values: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return dict.fromkeys(kinds, values)


#: values of inputs, or what provides their links, with which a change of any input has an effect; None: it is missing
BASE: Mapping[str, Mapping[str, Any]] = {
    "T5TokenizerOptions": {"min_padding": 1, "min_length": 0},
    "CLIPTextEncodeSD3": {"t5xxl": ""},
    "RebatchImages": {"images": _images},
    **_each(("PrimitiveFloat", "FloatConstant", "JWFloat", "easy float"), {"value": 3.0}),
    "StringSubstring": {"string": "a red fox jumps", "start": 2, "end": 9},
    "StringTrim": {"string": "  a fox  ", "mode": "Both"},
    "CaseConverter": {"string": "a Red fox", "mode": "UPPERCASE"},
    "StringReplace": {"string": "a fox", "find": "fox", "replace": "hare"},
    "Text Find and Replace": {"text": "a fox", "find": "fox", "replace": "hare"},
    "StringContains": {"string": "a Fox", "substring": "Fox"},
    "StringCompare": {"string_a": "Fox", "string_b": "Fox", "mode": "Equal"},
    "RegexReplace": {"string": "a.fox\nA fox", "regex_pattern": "^a.", "replace": "the ", "case_insensitive": True},
    "RegexMatch": {"string": "no\nA\nfox", "regex_pattern": "^a.fox$", "multiline": True, "dotall": True},
    "ComfyMathExpression": {"expression": "a+b+c+d+e+f+g+h"},
    "MathExpression|pysssss": {"expression": "a + b * c"},
    "SimpleMath+": {"value": "a + b"},
    "Text Concatenate": {"delimiter": "-", "text_a": " a", "text_b": "b", "text_c": "c", "text_d": "d"},
    "Text Random Line": {"text": "a\nb\nc\nd\ne\nf", "seed": 5},
    "StringConstantMultiline": {"string": "a\nb"},
    **_each(("GetImageSize", "GetImageSize+"), {}),
    "ScaleROPE": {"scale_x": 2.0},
    "ContextWindowsManual": {"dim": 2, "cond_retain_index_list": "0", "latent_retain_index_list": ""},
    "SDXL Empty Latent Image (rgthree)": {"dimensions": "1024 x 512"},
    **_each(("SplitSigmas", "SplitSigmasDenoise"), {"step": 3, "denoise": 0.5}),
    "ManualSigmas": {"sigmas": "1, 0.5, 0"},
    "IPAdapterAdvanced": {"image_negative": None},
    "PerpNegGuider": {"empty_conditioning": _empty},
    "DualCFGGuider": {
        "cond1": _instructed, "cond2": _instructed,
        "negative": lambda make, place: _instructed(make, place, has_image=False),
    },
    "Image Resize": {"supersample": "false", "mode": "rescale"},
    **_each(("CosmosImageToVideoLatent", "CosmosPredict2ImageToVideoLatent"), {"end_image": None}),
    "WanVaceToVideo": {"control_video": None, "control_masks": None},
    "ImageResizeKJv2": {"mask": None, **_WIDE},
    "UltimateSDUpscale": _SEAMS,
    "UltimateSDUpscaleNoUpscale": {**_SEAMS, "upscaled_image": _large},
    "UltimateSDUpscaleCustomSample": {**_SEAMS, "custom_sampler": None, "custom_sigmas": None},
    "ConditioningSetArea": {"width": 32, "height": 16, "x": 8, "y": 8},
    "ConditioningSetAreaPercentage": {"width": 0.5, "height": 0.25, "x": 0.125, "y": 0.125},
    **_each(("LatentFromBatch", "LatentBatchSeedBehavior"), {"samples": _batch, "length": 2}),
    "LatentBatch": {"samples1": _batch, "samples2": lambda make, place: make.sampled(seed=9 + place)},
    "LatentUpscale": _WIDE,
    "ImageScale": {"width": 96, "height": 80},
    "ImageScaleBy": {"scale_by": 1.3},
    "ImageScaleToTotalPixels": {"megapixels": 0.011, "resolution_steps": 3},
    "KSamplerAdvanced": {"steps": 10, "start_at_step": 2, "end_at_step": 8},
    "ImagePadForOutpaint": {"left": 16, "feathering": 10},
    "ImageCrop": {"width": 24, "height": 16, "x": 8, "y": 8},
    "GrowMask": {"expand": 4},
    "SaveAnimatedWEBP": {"lossless": False},
    "CLIPMergeSimple": {"ratio": 0.5},
    "VHS_VideoCombine": {"format": "video/h264-mp4"},
    "Efficient Loader": {"lora_name": "light"},
    "Power Lora Loader (rgthree)": {
        "lora_1": _row, "lora_2": _row, **{f"lora_{place}": None for place in range(3, 100)},
    },
    "Lora Loader Stack (rgthree)": {f"lora_0{place}": "light" for place in range(1, 5)},
    **_each(("LoraLoader|pysssss", "Load Lora", "Lora Loader"), {"lora_name": "light"}),
    "CR Load LoRA": {"lora_name": "light", "switch": "On"},
    "CR LoRA Stack": {f"{name}_{place}": value for place in (1, 2, 3)
                      for name, value in (("switch", "On"), ("lora_name", "light"))},
    "LoRA Stacker": {
        "input_mode": "advanced", "lora_count": 1, "model_str_1": 0.5,
        **{f"lora_name_{place}": "light" for place in (1, 2)},
        **{f"{name}_{place}": None for place in range(3, 51) for name in ("lora_name", "lora_wt", "model_str",
                                                                          "clip_str")},
    },
    "Lora Loader (LoraManager)": {"loras": _rows},
    "Lora Stacker (LoraManager)": {"loras": _rows},
    "Prompt (LoraManager)": {f"trigger_words{place}": _word for place in range(1, 5)},
    "LoraTagLoader": {"text": "a fox <lora:light:0.5>"},
    "KSampler (Efficient)": {"sampler_state": None},
    "KSampler Adv. (Efficient)": {"script": None, "steps": 10, "start_at_step": 2, "end_at_step": 8},
    "easy loraStack": {"mode": "advanced", "num_loras": 1, "lora_1_model_strength": 0.5, "toggle": True,
                       **{f"lora_{place}_name": "light" for place in (1, 2)}},
    "DiffusionModelLoaderKJ": {"extra_state_dict": None},
    "KSampler (WAS)": {"seed": lambda make, place: make.add("Seed", seed=place)},
    "ImageCropV2": {"crop_region": _region},
    **_each(("easy a1111Loader", "easy comfyLoader"), _LOADED),
    "easy fullLoader": {**_LOADED, **_OVERRIDES},
    "easy preSampling": {"latent": None},
    "easy kSampler": {"model": _other(0)},
    "easy fullkSampler": {**_PIPE_PARTS, "positive": None, "xyPlot": None, "image": None},
    "ttN pipeLoader": {**_OVERRIDES, **{f"lora{place}_name": "light" for place in (1, 2, 3)}},
    "ttN pipeKSampler": {"xyPlot": None, "lora_name": "light", "optional_latent": None, "upscale_method": "bilinear",
                         **{f"optional_{name}": value for name, value in _PIPE_PARTS.items()}},
    "ImageResizeKJ": {"get_image_size": None, "width_input": None, "height_input": None, **_WIDE},
    "GetImageRangeFromBatch": {"images": _images, "masks": _masks, "start_index": 1, "num_frames": 2},
    "ImageFromBatch+": {"image": _images, "start": 1, "length": 2},
    "Image Save": {"extension": "jpg"},
    "Save Image (LoraManager)": {"file_format": "jpeg"},
    **_each(("Image Saver", "Image Saver Simple", "Save Image w/Metadata"), {"extension": "jpg"}),
    "LayerUtility: SaveImagePlus": {"format": "jpg"},
    **_each(("ControlNetLoaderAdvanced", "DiffControlNetLoaderAdvanced"),
            {"timestep_keyframe": None, "tk_optional": None}),
    **_each(("ACN_AdvancedControlNetApply", "ACN_AdvancedControlNetApply_v2"), dict.fromkeys(
        ("mask_optional", "timestep_kf", "latent_kf_override", "weights_override"))),
    "ImageResize+": {"width": 40, "height": 48, "method": "fill / crop"},
    "ImageCrop+": {"width": 24, "height": 16, "position": "top-left", "x_offset": 4, "y_offset": 4},
    "MaskFromRGBCMYBW+": {"remove_isolated_pixels": 0, "fill_holes": False},
    "MaskBlur+": {"amount": 6}, "MaskSmooth+": {"amount": 4}, "ImpactGaussianBlurMask": {"kernel_size": 3},
    **_each(("GetImagesFromBatchIndexed", "ReverseImageBatch", "ImageBatchRepeatInterleaving", "VHS_DuplicateImages"),
            {"images": _images, "indexes": "1, 2", "repeats": 2, "multiply_by": 2}),
    "ImageSelector": {"images": _images, "selected_indexes": "1,3"},
    "VHS_SplitImages": {"images": _images, "split_index": 2},
    "VHS_SelectEveryNthImage": {"images": _images, "select_every_nth": 2, "skip_first_images": 1},
    "ImageExpandBatch+": {"image": _images, "size": 7}, "MaskExpandBatch+": {"mask": _masks, "size": 7},
    "MaskFromBatch+": {"mask": _masks, "start": 1, "length": 2},
    "Colored Image (mtb)": {"color": "#102030", "foreground_image": None, "foreground_mask": None},
}  # fmt: skip

#: kinds of nodes of which one warning tells that none of their settings is read
TOLD_AS_A_WHOLE = (
    "TomePatchModel", "EasyCache", "LazyCache", "TorchCompileModel", "TorchCompileModelAdvanced", "ModelComputeDtype",
    "PathchSageAttentionKJ", "ModelPatchTorchSettings", "RenormCFG", "LatentApplyOperationCFG",
    "LatentOperationTonemapReinhard", "LatentOperationSharpen", "QwenImage21Cache", "ModelAttentionBackend",
)  # fmt: skip
#: nodes that need what the pool does not have: refused, whatever their settings are
REFUSED = ("TextGenerate", "TextGenerateLTX2Prompt")
#: nodes that compute texts and numbers: their own tests compare them with formulas
COMPUTED = (
    *(kind.name for kind in (*PACK_TEXTS, *PACK_NUMBERS)),
    "ReplaceText",
    "RegexExtract",
    "ComfyMathExpression",
    "CustomCombo",
    "JsonExtractString",
    "StringFormat",
    "TruncateText",
    "Text Concatenate",
    "Text Find and Replace Input",
)
#: nodes that are accepted next to certain others alone, or with one set of links: `test_comfy_examples` and their own
#: tests have such workflows, and this test has none
NOT_TRIED = (
    "TriggerWord Toggle (LoraManager)", "Text Parse Tokens", "Power Prompt (rgthree)",
    "Power Prompt - Simple (rgthree)",
    "Image Saver Metadata", "ImageConcatMulti", "ImageBatchMulti",
    "unCLIPConditioning", "TextEncodeJoyImageEdit", "TextEncodeQwenImage21", "EmptyQwenImageLayeredLatentImage",
    "LatentCut", "LatentCutToBatch", "SetFirstSigma", "StableCascade_EmptyLatentImage",
    "StableCascade_StageB_Conditioning", "StableCascade_StageC_VAEEncode", "ModelSamplingStableCascade",
    "StableCascade_CheckpointLoader //Inspire",
    "ResizeImageMaskNode", "SaveImageAdvanced", "ModelPatchLoader",
    "QwenImageDiffsynthControlnet", "ZImageFunControlnet", "WanFunControlToVideo", "WanAnimateToVideo",
    "SaveAudioAdvanced", "LoadVideo", "GetVideoComponents", "DualModelGuider", "ConditioningTimestepsRange",
    "ConditioningSetProperties", "ConditioningSetPropertiesAndCombine", "PairConditioningSetProperties",
    "PairConditioningSetPropertiesAndCombine", "LoadAudio", "Wan22FunControlToVideo", "LTXVEmptyLatentAudio",
    "LTXVConcatAVLatent", "LTXVSeparateAVLatent", "LTXVAudioVAEDecode", "LTXVAudioVAELoader", "LTXAVTextEncoderLoader",
    "LTXVDualCFGGuider", "LatentUpscaleModelLoader", "LTXVLatentUpsampler", "LTXVImgToVideoInplace", "LTXVAddGuide",
    "LTXVAudioVAEEncode", "LTXVFreezeLatent", "LTXVReferenceAudio", "LTXVCropGuides",
    "WanCameraEmbedding", "WanCameraImageToVideo", "WanTrackToVideo", "WanMoveTrackToVideo", "GenerateTracks",
    "WanMoveConcatTrack", "WanMoveTracksFromCoords", "GetICLoRAParameters",
    "CR Multi-ControlNet Stack", "CR Apply Multi-ControlNet",
    "ImpactKSamplerBasicPipe", "VHS_LoadVideo", "VHS_GetImageCount", "VHS_GetLatentCount", "VHS_GetMaskCount",
    "GetLatentSizeAndCount", "ConditioningMultiCombine", "VHS_LoadAudioUpload",
)  # fmt: skip
#: nodes that pass one of their inputs on: the others say nothing
SWITCHES = (
    *("ComfySwitchNode", "LazySwitchKJ", "Switch any [Crystools]", "Any Switch (rgthree)"),
    *(kind.name for kind in PACK_SWITCHES),
)
#: nodes that give the size, or the number, of images: with a loaded image they are values, and read nothing later
SIZES = (
    *("GetImageSize", "GetImageSize+", "GetImageSizeAndCount", "easy imageSizeBySide", "easy imageSizeByLongerSide"),
    *("Get resolution [Crystools]", "Image or Latent Size (rgthree)", "LayerUtility: GetImageSize"),
)
_SAVERS = ("Image Saver", "Image Saver Simple", "Save Image w/Metadata")
#: inputs that cannot matter, by the reason: of a kind of node, or of all ("*"), and the values, or all
CANNOT_MATTER: Mapping[str, tuple[tuple[str, str, tuple[Any, ...]], ...]] = {
    "models of the pool have their text and vision encoders: names of files are not read (guides/http.md)": (
        *((kind.name, given.name, ()) for kind in MAKING if "cliploader" in kind.name.lower() for given in kind.inputs),
        ("CLIPVisionLoader", "clip_name", ()),
        ("*", "clip_vision", ()),
    ),
    "files have the names of the pool": (
        ("*", "filename_prefix", ()), ("*", "save_prefix", ()), ("Image Save", "filename_delimiter", ()),
        ("Image Save", "filename_number_padding", ()), ("Save Image (LoraManager)", "add_counter_to_filename", ()),
    ),
    "it is where something is computed, or shown": (
        ("*", "noise_device", ()), ("KSampler (Efficient)", "preview_method", ()), ("Text to Console", "label", ()),
        *((f"{name}MultiGPU", "device", ()) for name in ("UNETLoader", "VAELoader", "CheckpointLoaderSimple")),
        ("KSampler Adv. (Efficient)", "preview_method", ()),
        ("ImageResizeKJv2", "device", ()), ("VAELoaderKJ", "device", ()), ("ColorMatch", "multithread", ()),
        ("LoadImageOutput", "upload", ()), ("LoadImageOutput", "refresh", ()),
    ),
    "the image, the latent or the size has it already": (
        ("ResolutionSelector", "multiple", (128,)), ("ImageResizeKJv2", "height", (0,)),
        ("ImageResizeKJ", "height", (0,)), ("ImageResizeKJ", "divisible_by", (0, 1)),
        *(("LatentUpscaleFactor _O", name, (1.0,)) for name in ("WidthFactor", "HeightFactor")),
        ("LatentUpscaleFactorSimple _O", "factor", (1.0,)),
    ),
    "an empty text is no setting": (
        *(("Image Save", name, ("",)) for name in ("filename_number_start", "overwrite_mode", "embed_workflow")),
        *((kind, name, ("",)) for name in ("filename", "time_format")
          for kind in ("Image Saver", "Image Saver Simple", "Save Image w/Metadata")),
        ("LayerUtility: SaveImagePlus", "timestamp", ("",)), ("SkipLayerGuidanceDiT", "single_layers", ("",)),
    ),
    "the ControlNet is the one of the model that is sampled": (
        ("DiffControlNetLoader", "model", ()), ("DiffControlNetLoaderAdvanced", "model", ()),
    ),
    "these levels and samplers are of no model": (("SDTurboScheduler", "model", ()), ("SamplerSASolver", "model", ())),
    "a warning calls it vae": tuple(
        (f"ACN_AdvancedControlNetApply{ending}", "vae_optional", ()) for ending in ("", "_v2")
    ),
    "it is passed on": tuple(
        (f"ACN_AdvancedControlNetApply{ending}", "model_optional", ()) for ending in ("", "_v2")
    ),
    "a warning calls it cfg": (("DualCFGGuider", "cfg_conds", ()),),
    "another setting switches it off": (
        ("HyperTile", "scale_depth", ()), ("Image Resize", "resize_width", ()), ("Image Resize", "resize_height", ()),
        ("ImageResizeKJv2", "pad_color", ()), ("VAEDecodeTiled", "temporal_size", ()),
        ("VAEDecodeTiled", "temporal_overlap", ()), ("RescaleCFG", "multiplier", ()),
        ("SaveVideo", "format.codec.encoding", ()), ("SaveVideo", "format.codec.crf", ()),
        *(("KSampler //Inspire", f"variation_{name}", ()) for name in ("seed", "method")),
        *(("easy loraStack", f"lora_{place}_{name}", ()) for place in range(1, 11) for name in (
            "strength", *(("model_strength", "clip_strength", "name") if place > 1 else ()))),
        *(("LoRA Stacker", f"{name}_{place}", ()) for place in range(1, 51) for name in (
            "lora_wt", *(("model_str", "clip_str", "lora_name") if place > 1 else ()))),
    ),
    "a model that reads pixels needs no VAE for them": (("ControlNetApplyAdvanced", "vae", ("none",)),),
    "models without a vision encoder see no image; of others there is a warning": (
        *(("*", f"clip_vision_{name}", ("none",)) for name in ("output", "start_image", "end_image")),
    ),
    "a text for a part of the image alone has its weight alone": (
        *((kind, "strength", ()) for kind in ("ConditioningSetArea", "ConditioningSetAreaPercentage",
                                             "ConditioningSetMask")),
    ),
    "empty latents are zeros of any method, side and size in another": (
        *((kind, "upscale_method", ()) for kind in ("LatentUpscaleBy", "LatentUpscale", "LatentUpscaleFactor _O",
                                                   "LatentUpscaleFactorSimple _O")),
        *((kind, "crop", ()) for kind in ("LatentUpscaleFactor _O", "LatentUpscaleFactorSimple _O")),
        ("LatentUpscale", "crop", ()), ("LatentUpscale", "samples", ()), ("LatentFlip", "flip_method", ()),
        ("Latent Upscale by Factor (WAS)", "mode", ()), ("Latent Upscale by Factor (WAS)", "align", ()),
        ("LatentBatch", "samples2", ()),
    ),
    "one image is put together with nothing": (("IPAdapterAdvanced", "combine_embeds", ()),),
    "the adapter is found by its preset": (("IPAdapterUnifiedLoader", "ipadapter", ()),),
    "an image that fits into one tile has none": (
        ("VAEDecodeTiled", "tile_size", ()), ("VAEDecodeTiled", "overlap", ()),
    ),
    "both are the same": (
        ("SetUnionControlNetType", "type", ("",)), ("ImageResize+", "multiple_of", (1,)),
        ("MaskBlur+", "amount", (7,)), ("MaskSmooth+", "amount", (5,)),
        ("easy imageToMask", "channel", ("blue",)),  # of the test's image
        ("ImageResizeKJv2", "divisible_by", (0, 1)), ("SaveVideo", "format", ("mp4",)),
        ("SaveVideo", "codec", ("h264",)), ("SaveVideo", "format.codec", ("h264",)),
        ("CreateVideo", "bit_depth", ("8",)), ("CreateVideo", "codec", ("auto", "h264")),
        ("VHS_VideoCombine", "format", ("video/nvenc_h264-mp4",)), ("StringCompare", "mode", ()),
        ("StringCompare", "case_sensitive", ()), ("StringContains", "case_sensitive", ()),
        ("StringContains", "substring", ("",)), ("RegexMatch", "regex_pattern", ("",)),
        ("RegexReplace", "case_insensitive", ()), ("RegexReplace", "dotall", ()), ("RegexReplace", "count", ()),
        ("Text Random Line", "seed", ()), ("ImageScaleToTotalPixels", "resolution_steps", ()),
    ),
    "images are shown, or saved: test_pack_pipes": (("*", "image_output", ("Save", "Preview", "Hide/Save")),),
    "it is about images that are sent, which is refused": (("*", "link_id", ()),),
    "it has no loss": (
        ("SaveAnimatedPNG", "compress_level", ()), ("Image Save", "optimize_image", ()),
        *((kind, "optimize_png", ()) for kind in _SAVERS),
    ),
    "a file that is no webp": (
        *((kind, "lossless_webp", ()) for kind in (*_SAVERS, "Image Save", "Save Image (LoraManager)")),
    ),
    "the editor shows it": (
        *(("Image Save", name, ()) for name in ("show_history", "show_history_by_prefix", "show_previews")),
        *((kind, "show_preview", ()) for kind in _SAVERS), ("LayerUtility: SaveImagePlus", "preview", ()),
    ),
    "it is about what is written next to the image": (
        *((kind, name, ()) for kind in _SAVERS for name in ("download_civitai_data", "easy_remix")),
    ),
    "a text without choices": (("Prompt (LoraManager)", "seed", ()),),
    "what no node reads is not made": (("KSampler (Efficient)", "vae_decode", ()),
                                      ("KSampler Adv. (Efficient)", "vae_decode", ())),
    "a batch that is not split": (("RebatchImages", "batch_size", (65, 4096, 64)),),
}  # fmt: skip


def cannot_matter(kind: str, name: str, value: Any) -> bool:
    """Whether a change of an input is listed with a reason."""
    return any(
        which in (kind, "*") and each == name and (not values or value in values)
        for rows in CANNOT_MATTER.values()
        for which, each, values in rows
    )


#: inputs that change nothing of one family: its other model has the same schedule, a latent of the same size the same
#: shift, and cfg 1 is no guidance
SAME = frozenset(
    {
        *(("Wan 2.1 image-to-video", kind, "model") for kind in ("BasicScheduler", "BetaSamplingScheduler")),
        *(("Stable Diffusion 1", kind, "latent") for kind in ("ModelSamplingLTXV", "LTXVScheduler")),
        ("Flux dev", "DualCFGGuider", "style"),
        ("Qwen-Image", "CFGNorm", "pre_cfg"),
    }
)


def dropped(kind: Any, setting: Setting, most: int) -> Iterator[tuple[Any, ...]]:
    """Yield the inputs of a kind of node that are dropped in silence: name, value, and what happened. Of each input, so
    many values are tried."""
    base = BASE.get(kind.name, {})
    first, changes = changes_of(kind, setting, base, {})
    before = meaning(first, setting)
    if before.refusal:
        yield kind.name, before.refusal
        return
    tried: dict[str, int] = {}
    for name, value, graph in changes:
        is_same = (setting.family, kind.name, name) in SAME
        if is_same or tried.get(name, 0) >= most or cannot_matter(kind.name, name, value):
            continue
        tried[name] = tried.get(name, 0) + 1
        if not meaning(graph, setting).tells(name, before):
            yield kind.name, name, value


#: what nodes are used with: the first of these in which a node may be is enough in the usual tests
FIRST = tuple(Setting("Stable Diffusion 1", latent=latent) for latent in ("blank", "encoded", "sampled"))
FIRST = (*FIRST, Setting("Chroma"))
ALL = (
    *FIRST,
    Setting("Stable Diffusion 1", latent="encoded", denoise=0.5),
    Setting("Stable Diffusion 1", latent="sampled", denoise=0.5, text="both"),
    Setting("Stable Diffusion 1", text="negative"),
    Setting("Stable Diffusion 1", cfg=1.0),
    *(Setting(family) for family in ("Stable Diffusion XL", "Qwen-Image", "Wan 2.1 image-to-video", "ACE-Step 1.5")),
    Setting("Flux dev", cfg=1.0),
)
LEFT_OUT = (*TOLD_AS_A_WHOLE, *REFUSED, *SWITCHES, *SIZES, *COMPUTED, *NOT_TRIED)
TRIED = [kind for kind in MAKING if kind.name not in LEFT_OUT]
#: changes of empty latents change nothing: nodes that change latents have others
CHANGING = ("LatentCrop", "LatentRotate", "LatentComposite", "LatentCompositeMasked", "LatentAdd", "LatentSubtract",
            "LatentMultiply", "LatentInterpolate", "LatentBlend")  # fmt: skip


def test_every_input_is_read_or_told_of_or_refused(in_rotation: InRotation) -> None:
    """Dropped before: the VAE of another model, methods of scaling, seeds of second passes, the model of a scheduler,
    sizes next to texts, tiles of encoders, images of vision encoders, and more."""
    wrong = []
    for kind in in_rotation(TRIED, attrgetter("name")):
        for setting in FIRST[1:] if kind.name in CHANGING else FIRST:
            found = list(dropped(kind, setting, most=1))
            if not any(isinstance(each, tuple) and len(each) == 2 for each in found):
                break
        wrong += found
    assert not wrong, wrong


@pytest.mark.nightly(usually="tests/actors/http/comfy/test_every_setting.py")
@pytest.mark.parametrize("setting", ALL, ids=str)
def test_every_input_is_read_in_every_setting(setting: Setting) -> None:
    kinds = [kind for kind in TRIED if setting.latent != "blank" or kind.name not in CHANGING]
    wrong = [each for kind in kinds for each in dropped(kind, setting, most=4) if len(each) == 3]
    assert not wrong, wrong


def test_nodes_of_which_no_setting_is_read_say_so() -> None:
    setting, silent = FIRST[0], []
    for kind in MAKING:
        if kind.name not in (*TOLD_AS_A_WHOLE, *REFUSED):
            continue
        found = meaning(changes_of(kind, setting, {}, {})[0], setting)
        is_told = found.refusal or any(SUBJECT in each or "LatentApplyOperationCFG" in each for each in found.warnings)
        if not is_told:
            silent.append(kind.name)
    assert not silent


def test_each_listed_reason_is_of_an_input_that_exists() -> None:
    known = {(kind.name, given.name) for kind in MAKING for given in kind.inputs}
    names = {name for _, name in known}
    listed = [(which, name) for rows in CANNOT_MATTER.values() for which, name, _ in rows]
    gone = [each for each in listed if each not in known and not (each[0] == "*" and each[1] in names)]
    assert not gone
    assert set(BASE) <= {kind.name for kind in MAKING}
    assert "LATENT" in PROVIDERS
