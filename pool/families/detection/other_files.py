"""Decide which files are something else than a model: ControlNets, adapters, LoRAs, embeddings, upscalers, states of
trainers. Torch-free and pure.

Such files share keys with the model that they are for, so this table is asked first, by everything that recognises
files: `recognise_diffusion`, `modelpool inspect`, the registry and the loaders. At most one row fits a file, except
rows of `UNCERTAIN`, which are asked last, for files with some keys of a kind only.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from modelpool.pool.families.detection.file_kinds import FileKind
from modelpool.pool.weights.keymaps.adapter_keys import looks_like_lora

#: prefix of a ControlNet's keys in files that contain more
CONTROL_PREFIX = "control_model."
_MODEL_PREFIX = "model.diffusion_model."


class KeyNames:
    """The names of the tensors of a file, and quick tests of them."""

    def __init__(self, keys: Collection[str]) -> None:
        self.keys = keys if isinstance(keys, set | frozenset | Mapping) else frozenset(keys)
        self._sorted = sorted(self.keys)

    def has(self, beginning: str) -> bool:
        """Return whether a key begins so."""
        place = bisect_left(self._sorted, beginning)
        return place < len(self._sorted) and self._sorted[place].startswith(beginning)

    def matches(self, pattern: re.Pattern[str]) -> bool:
        """Return whether a key matches `pattern` from its beginning."""
        return any(pattern.match(key) for key in self._sorted)


Test = Callable[[KeyNames], bool]


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A kind of file that is no model.

    title  for users, with an article
    kind   for the registry; None for what nothing here uses
    fits   whether a file with these keys is one
    runs   whether this version uses such files
    """

    title: str
    kind: FileKind | None
    fits: Test
    runs: bool = True


@dataclass(frozen=True, slots=True)
class ControlSigns:
    """The keys of a kind of ControlNet that runs, without prefix: all keys of one set of `signs`, and none that begins
    with one of `without`.

    models  that it is for
    """

    models: str
    signs: tuple[frozenset[str], ...]
    without: tuple[str, ...] = ()

    def fit(self, names: KeyNames) -> bool:
        """Return whether a file with these names (without prefix) is of this kind."""
        is_signed = any(all(key in names.keys for key in sign) for sign in self.signs)
        return is_signed and not any(names.has(beginning) for beginning in self.without)


def _signs(models: str, *signs: tuple[str, ...], without: tuple[str, ...] = ()) -> ControlSigns:
    return ControlSigns(models, tuple(map(frozenset, signs)), without)


_BLOCKS, _HINT = "controlnet_blocks.0.weight", "controlnet_cond_embedding.conv_in.weight"
#: parts of ControlNets of UNets that are other networks: ControlNet-XS, SparseCtrl, Control-LoRA
_OTHER_UNET_CONTROLS = (
    *(
        "control_to_base_for_conv_in.",
        "down_blocks.0.base_to_ctrl.",
        "down_blocks.0.motion_modules.",
        "lora_controlnet",
    ),
)
#: the kinds of ControlNets that run; `pool.inference.controlnets.controlnet_kinds` has what runs them
CONTROL_SIGNS: Mapping[str, ControlSigns] = {
    "flux_xlabs": _signs(
        "Flux, of XLabs",
        (_BLOCKS, "input_hint_block.0.weight", "double_blocks.0.img_attn.qkv.weight"),
        (_BLOCKS, "input_hint_block.conv_in.weight", "context_embedder.weight"),
    ),
    "flux": _signs(
        "Flux", (_BLOCKS, "controlnet_x_embedder.weight", "x_embedder.weight", "context_embedder.weight"),
        without=("input_hint_block.",),
    ),
    "sd3": _signs("Stable Diffusion 3", (_BLOCKS, "pos_embed_input.proj.weight")),
    "qwen_image": _signs(
        "Qwen-Image", (_BLOCKS, "controlnet_x_embedder.weight", "img_in.weight", "txt_in.weight"),
        without=("input_hint_block.",),
    ),
    "qwen_image_blockwise": _signs(
        "Qwen-Image, of DiffSynth",
        ("img_in.weight", "controlnet_blocks.0.x_rms.weight", "controlnet_blocks.0.y_rms.weight"),
    ),
    "hunyuan_dit": _signs("HunyuanDiT", (_BLOCKS, "input_block.weight", "text_embedding_padding")),
    "z_image": _signs("Z-Image", ("control_all_x_embedder.2-1.weight", "control_layers.0.before_proj.weight")),
    "sdxl_union": _signs(
        "Stable Diffusion XL, with several modes", (_HINT, "task_embedding", "spatial_ch_projs.weight")
    ),
    "unet": _signs(
        "Stable Diffusion 1, 2 and XL",
        (_HINT, "conv_in.weight"),
        ("input_hint_block.0.weight", "input_blocks.0.0.weight"),
        without=("task_embedding", _BLOCKS, *_OTHER_UNET_CONTROLS),
    ),
    "t2i": _signs(
        "UNets (T2I-Adapter)",
        ("adapter.conv_in.weight", "adapter.body.0.resnets.0.block1.weight"),
        ("adapter.body.0.in_conv.weight", "adapter.body.0.resnets.0.block1.weight"),
        ("conv_in.weight", "body.0.block1.weight"),
        ("body.0.in_conv.weight", "body.0.body.0.block1.weight"),
    ),
    "cascade": _signs(
        "Stable Cascade C", ("backbone.0.0.weight", "backbone.1.0.block.0.0.weight", "projections.0.0.weight")
    ),
}  # fmt: skip


def control_kind(keys: Collection[str]) -> str | None:
    """Return the name in `CONTROL_SIGNS` of the ControlNet with these keys (without prefix); None if there is none that
    runs."""
    names = KeyNames(keys)
    return next((name for name, signs in CONTROL_SIGNS.items() if signs.fit(names)), None)


def _any(*beginnings: str, without: tuple[str, ...] = ()) -> Test:
    return lambda names: any(map(names.has, beginnings)) and not any(map(names.has, without))


def _all(*beginnings: str, without: tuple[str, ...] = ()) -> Test:
    return lambda names: all(map(names.has, beginnings)) and not any(map(names.has, without))


def _pattern(pattern: str) -> Test:
    compiled = re.compile(pattern)
    return lambda names: names.matches(compiled)


def _control(name: str) -> Test:
    signs = CONTROL_SIGNS[name]

    def fits(names: KeyNames) -> bool:
        # a checkpoint that contains a ControlNet, too, is a checkpoint
        if names.has(_MODEL_PREFIX):
            return False
        if names.has(CONTROL_PREFIX):
            bare = {key.removeprefix(CONTROL_PREFIX) for key in names.keys if key.startswith(CONTROL_PREFIX)}
            return signs.fit(KeyNames(bare))
        return signs.fit(names)

    return fits


def _is_embedding(names: KeyNames) -> bool:
    """Vectors for one or several text encoders, or under any name: a single tensor as wide as a text encoder."""
    if not names.keys:
        return False
    if _ENCODER_NAMES.issuperset(names.keys):
        return True
    # checkpoints have been seen with the vectors of an embedding that a training tool left
    if len(names.keys) <= _MOST_VECTORS and (names.has("emb_params") or names.has("string_to_param")):
        return True
    if len(names.keys) != 1 or not isinstance(names.keys, Mapping):
        return False
    ((key, shape),) = names.keys.items()
    is_rows = len(shape) in (1, 2) and shape[-1] in _TEXT_WIDTHS and (len(shape) == 1 or shape[0] <= _MOST_ROWS)
    return is_rows and not key.endswith((".weight", ".bias"))


#: tensors of a file that is an embedding
_MOST_VECTORS = 16
#: the names of the vectors of an embedding for several text encoders
_ENCODER_NAMES = frozenset({"clip_l", "clip_g", "clip_h", "t5xxl"})
#: widths of the tokens of text encoders that read embeddings, and the most rows of a published one
_TEXT_WIDTHS, _MOST_ROWS = frozenset({768, 1024, 1280, 2048, 4096}), 1024

_IP_ADAPTER = ("image_proj.", "ip_adapter.", "ip_adapter_proj_model.")
#: the first layer of a UNet, in both namings
_UNET_INPUT = ("conv_in.", "input_blocks.0.0.")
_PULID = ("pulid_encoder.", "pulid_ca.")
_T2I = ("adapter.body.", "body.0.block1.", "body.0.body.0.block1.")
_UPSCALER = ("conv_first.weight", "model.0.weight", "body.0.weight", "module.conv_first.", "module.model.0.weight")
_ANY_CONTROL = ("controlnet_", "control_all_x_embedder.", "input_hint_block.", CONTROL_PREFIX, "control_img_in.")

_CONTROLS = tuple(
    OtherFile(
        "a T2I-Adapter" if name == "t2i" else f"a ControlNet for {each.models}", FileKind.CONTROLNET, _control(name)
    )
    for name, each in CONTROL_SIGNS.items()
)


def _not_running(title: str, fits: Test, kind: FileKind | None = None) -> OtherFile:
    return OtherFile(title, kind, fits, runs=False)


#: at most one row fits a file. Sources: the files of the authors that titles name, and diffusers 0.42.1
OTHER_FILES: tuple[OtherFile, ...] = (
    # adapters that read images, of which FaceID contains a LoRA
    _not_running("a PuLID face adapter", _any(*_PULID)),
    _not_running("a PhotoMaker face adapter", _any("id_encoder.", without=(*_PULID, *_IP_ADAPTER))),
    OtherFile("an IP-Adapter", FileKind.IMAGE_PROMPT, _any(*_IP_ADAPTER, without=(*_PULID, "redux_up."))),
    OtherFile("a Redux style model", FileKind.IMAGE_PROMPT, _any("redux_up.")),
    # ControlNets and their relatives
    *_CONTROLS,
    _not_running(
        "a ControlNet of Stable Cascade C that reads latents or faces", _all("backbone.0.weight", "projections.0.0."),
        FileKind.CONTROLNET,
    ),
    _not_running(
        "a ControlNet-XS", _any("control_to_base_for_conv_in.", "down_blocks.0.base_to_ctrl.", "ctrl_conv_in."),
        FileKind.CONTROLNET,
    ),
    _not_running(
        "a SparseCtrl ControlNet",
        _all("down_blocks.0.motion_modules.", "controlnet_cond_embedding."), FileKind.CONTROLNET,
    ),
    _not_running("a Control-LoRA", _any("lora_controlnet"), FileKind.CONTROLNET),
    _not_running("a ControlNet-LLLite", _any("lllite_"), FileKind.CONTROLNET),
    _not_running(
        "a ControlNet for Sana", _all(_BLOCKS, "input_block.weight", "caption_norm.weight"), FileKind.CONTROLNET
    ),
    _not_running(
        "a ControlNet for Cosmos", _all("control_blocks.", "patch_embed_base."), FileKind.CONTROLNET
    ),
    _not_running(
        "a ControlNet for PixArt",
        _any(
            *("controlnet_blocks.0.transformer_block.", "controlnet_blocks.0.copied_block."),
            *("controlnet.0.copied_block.", "controlnet.controlnet_blocks.0."),
        ),
        FileKind.CONTROLNET,
    ),
    _not_running("a Fun ControlNet for Qwen-Image", _any("control_img_in."), FileKind.CONTROLNET),
    _not_running("a ControlNet for Wan", _any("controlnet_patch_embedding."), FileKind.CONTROLNET),
    _not_running(
        "a ControlNet for HunyuanDiT in its published naming", _all("after_proj_list.", "before_proj."),
        FileKind.CONTROLNET,
    ),
    _not_running(
        "the control module of Wan VACE, without its model",
        _any("vace_blocks.0.", "vace_patch_embedding.", without=("blocks.0.", "patch_embedding.", "time_embedding.")),
    ),
    _not_running("a T2I style adapter", _all("style_embedding", "transformer_layes.")),
    _not_running("a T2I co-adapter fuser", _any("spatial_feat_mapping.")),
    # other networks beside a UNet
    OtherFile("a GLIGEN model", FileKind.GLIGEN, _any("position_net.linears.0.", without=_UNET_INPUT)),
    _not_running(
        "a GLIGEN model that reads something else than texts in boxes",
        _any("position_net.", without=("position_net.linears.0.", *_UNET_INPUT)), FileKind.GLIGEN,
    ),
    *(_not_running("a UNet with a GLIGEN model in it", _all("position_net.", one)) for one in _UNET_INPUT),
    _not_running(
        "an AnimateDiff motion module",
        _any(
            *("down_blocks.0.motion_modules.", "module.down_blocks.0.motion_modules."),
            without=("controlnet_cond_embedding.", "conv_in."),
        ),
    ),
    _not_running(
        "a UNet with the motion modules of AnimateDiff",
        _all("down_blocks.0.motion_modules.", "conv_in.", "conv_out.", without=("controlnet_cond_embedding.",)),
    ),
    _not_running("a hypernetwork", _pattern(r"(?:\d{3,4}\.[01]|hypernet\w*)\.(?:linear|\d)"), FileKind.HYPERNETWORK),
    # models that share the keys of another one, and read more
    _not_running(
        "FramePack, a relative of Hunyuan Video", _all("clean_x_embedder.", "context_embedder.token_refiner."),
        FileKind.DIFFUSION_MODEL,
    ),
    _not_running(
        "a world model of Sana", _all("plucker_embedder.", "attention_y_norm.weight"), FileKind.DIFFUSION_MODEL
    ),
    # texts
    OtherFile("a textual inversion embedding", FileKind.EMBEDDING, _is_embedding),
    _not_running(
        "text connectors of LTX-2, without their model",
        _any(
            *("text_embedding_projection.", "video_embeddings_connector.", "audio_embeddings_connector."),
            *("model.diffusion_model.video_embeddings_connector.", "text_proj_in.", "video_connector."),
            without=("transformer_blocks.0.", "model.diffusion_model.transformer_blocks.0.", "vae.", "text_encoders."),
        ),
    ),
    _not_running("the vision part of a language model (mmproj)", _any("v.patch_embd.", "v.blk.0.")),
    # images to images, and what sees them
    OtherFile("an upscaler", FileKind.UPSCALER, _any(*_UPSCALER, without=_T2I)),
    _not_running("the safety checker of Stable Diffusion", _all("concept_embeds", "vision_model.")),
    OtherFile("an upscaler of latents", FileKind.UPSCALER, _all("initial_conv.", "upsampler.", "final_conv.")),
    _not_running("a SAM 3 segmentation model", _any("detector.backbone.vision_backbone.trunk.")),
    _not_running("an RT-DETR v4 detector", _any("encoder.pan_blocks.")),
    _not_running("a Depth Anything 3 model", _any("backbone.embeddings.patch_embeddings.projection.")),
    # files of trainers
    _not_running("the state of an optimizer", _any("state.0.exp_avg", "optimizer_states.", "optimizer.state.")),
)  # fmt: skip

#: for files with some keys of a kind; the first match wins
UNCERTAIN: tuple[OtherFile, ...] = (
    OtherFile("a ControlNet", FileKind.CONTROLNET, _any(CONTROL_PREFIX, without=(_MODEL_PREFIX,))),
    _not_running(
        "a ControlNet in the naming of diffusers", _any("controlnet_cond_embedding."), FileKind.CONTROLNET
    ),
    _not_running("a ControlNet for Z-Image", _any("control_all_x_embedder."), FileKind.CONTROLNET),
    _not_running(
        "a ControlNet for a transformer", _any("controlnet_blocks.", "pos_embed_input."), FileKind.CONTROLNET
    ),
    _not_running("a T2I-Adapter", _any(*_T2I), FileKind.CONTROLNET),
    _not_running(
        "a ControlNet of a kind that is not known here",
        _any(*_ANY_CONTROL, without=(CONTROL_PREFIX, _MODEL_PREFIX)), FileKind.CONTROLNET,
    ),
)  # fmt: skip

LORA = OtherFile("a LoRA", FileKind.LORA, lambda names: looks_like_lora(names.keys))
#: kinds of files that contain a LoRA, or have keys that end as a LoRA's
_ASKED_BEFORE_LORAS = frozenset({FileKind.IMAGE_PROMPT})

_DIFFUSERS_VAE = "a VAE in the naming of diffusers, one part of a model folder"
#: files with one component of a model folder that the table of families does not know
FOLDER_PARTS: tuple[tuple[str, str], ...] = (
    ("down_blocks.0.resnets.0.norm1.weight", "a UNet in the naming of diffusers, one part of a model folder"),
    ("decoder.up_blocks.0.resnets.0.norm1.weight", _DIFFUSERS_VAE),
    ("transformer_blocks.0.attn.to_q.weight", "a transformer in the naming of diffusers, one part of a model folder"),
    ("decoder.conv_in.weight", "a VAE on its own"),
    ("first_stage_model.decoder.conv_in.weight", "a VAE on its own"),
    ("vision_model.head.probe", "a SigLIP model, of a size that is not known here"),
    *((f"{level}head.weight", "a SigLIP text encoder on its own") for level in ("text_model.", "")),
    ("embeddings.patch_embedding.", "a vision encoder on its own"),
    ("text_model.encoder.layers.0.", "a CLIP text encoder on its own"),
    ("encoder.block.0.layer.0.SelfAttention.", "a T5 text encoder on its own"),
    ("decoder.conv_in.conv.weight", "a VAE on its own"),
    *((f"{half}.{part}.", _DIFFUSERS_VAE) for half in ("decoder", "encoder") for part in ("mid_block", "up_blocks.0")),
    ("encoder.down_blocks.0.", _DIFFUSERS_VAE),
)


def other_file(keys: Collection[str]) -> OtherFile | None:
    """Return the kind of the file with `keys` (or shapes by key, from which more follows), if it is no model: asked
    before anything looks for a model in it."""
    names = KeyNames(keys)
    found = next((each for each in OTHER_FILES if each.fits(names)), None)
    if found is not None and found.kind in _ASKED_BEFORE_LORAS:
        return found
    if LORA.fits(names):
        return LORA
    return found or next((each for each in UNCERTAIN if each.fits(names)), None)


def folder_part(keys: Collection[str]) -> str | None:
    """Return which component of a model folder a file with `keys` is."""
    names = KeyNames(keys)
    return next((title for beginning, title in FOLDER_PARTS if names.has(beginning)), None)
