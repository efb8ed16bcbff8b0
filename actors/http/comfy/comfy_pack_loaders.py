"""Custom nodes that load models and LoRAs, stack LoRAs, encode texts with LoRAs in them, and sample. Pure.

They are here under their own names, with what their public descriptions say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_custom_nodes import check_weights, clip_of_files, with_loras
from modelpool.actors.http.comfy.comfy_node_types import (
    ANY,
    LORAS,
    MAX_SEED,
    MODELS,
    SAMPLER_NAMES,
    SCHEDULE_NAMES,
    TEXT_ENCODERS,
    VAES,
    Builder,
    NodeInput,
    NodeUnsupported,
    check_parts,
    combo,
    file_stem,
    flag,
    link,
    node_row,
    number,
    text,
    warn,
    warn_unread,
    whole,
)
from modelpool.actors.http.comfy.comfy_pack_switches import Route
from modelpool.actors.http.comfy.comfy_pack_texts import has_choices
from modelpool.actors.http.comfy.comfy_sampling_nodes import SAMPLING_NODES
from modelpool.actors.http.comfy.comfy_values import ClipValue, LoraUse, ModelValue, TextValue, VaeValue
from modelpool.actors.http.comfy.comfy_workflow_nodes import WORKFLOW_NODES
from modelpool.actors.request.bounds import MAX_LORAS
from modelpool.pool.inference.sampling.sampler_names import MAX_STEPS

_NONE = "None"
_OWN_CHOICE = "the pool decides about dtypes, devices and kernels of attention itself"
_STRENGTH = (1.0, -100.0, 100.0)
#: slots of stacks of LoRAs
_STACKED, _EFFICIENT_SLOTS, _EASY_SLOTS = 3, 50, 10
#: a LoRA in a text, with its strengths
_TAG = re.compile(r"<lora:([^:<>]+)(?::([^:<>]*))?(?::([^<>]*))?>")
_KSAMPLER: Builder = next(row.build for row in SAMPLING_NODES if row.name == "KSampler")


def _checkpoint(given: Mapping[str, Any]) -> tuple[Any, ...]:
    name = given["ckpt_name"]
    return ModelValue(name, has_vae=True), ClipValue(name), VaeValue(name)


def _named_checkpoint(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*_checkpoint(given), given["ckpt_name"])


def _model(given: Mapping[str, Any]) -> tuple[Any, ...]:
    extra = given.get("extra_model_name")
    if extra not in (None, "", "none", _NONE) or given.get("extra_state_dict"):
        raise NodeUnsupported("extra_model_name, extra_state_dict: expected none: the pool reads a model from one file")
    for name in ("weight_dtype", "compute_dtype", "dequant_dtype", "patch_dtype"):
        warn_unread(given, name, _OWN_CHOICE, own="default")
    for name in ("patch_cublaslinear", "patch_on_device", "enable_fp16_accumulation"):
        warn_unread(given, name, _OWN_CHOICE, own=False)
    warn_unread(given, "sage_attention", _OWN_CHOICE, own="disabled")
    warn_unread(given, "attention_override", _OWN_CHOICE, own="none")
    return (ModelValue(given["model_name"]),)


def _vae(given: Mapping[str, Any]) -> tuple[Any, ...]:
    warn_unread(given, "weight_dtype", _OWN_CHOICE, own="bf16")
    return (VaeValue("", given["vae_name"]),)


def _use(name: str, strength: float, text_strength: float) -> tuple[LoraUse, ...]:
    return () if name in ("", _NONE) else (LoraUse(file_stem(name), strength, text_strength),)


def _lora(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A model and its text encoder with a LoRA, unless it is switched off."""
    is_on = given.get("switch", "On") == "On"
    uses = _use(given["lora_name"], given["strength_model"], given["strength_clip"]) if is_on else ()
    return with_loras(given["model"], given["clip"], uses)


def _helped_lora(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*_lora(given), "")


def _named_lora(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*_lora(given), given["lora_name"])


def _stack(given: Mapping[str, Any]) -> tuple[LoraUse, ...]:
    """Return the LoRAs of a stack that is linked. Raises NodeUnsupported for anything else, and for too many."""
    found = given.get("lora_stack") or given.get("optional_lora_stack") or ()
    if not isinstance(found, tuple) or not all(isinstance(each, LoraUse) for each in found):
        raise NodeUnsupported("lora_stack: expected a link to a stack of LoRAs")
    check_parts("lora_stack", "LoRAs", len(found), MAX_LORAS)
    return found


def _stacked(given: Mapping[str, Any]) -> tuple[Any, ...]:
    uses: tuple[LoraUse, ...] = ()
    for place in range(1, _STACKED + 1):
        if given[f"switch_{place}"] == "On":
            uses += _use(given[f"lora_name_{place}"], given[f"model_weight_{place}"], given[f"clip_weight_{place}"])
    return (*_stack(given), *uses), ""


def _stacked_efficiently(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The first LoRAs, as many as the node counts, with one strength each ("simple"), or with two."""
    uses: tuple[LoraUse, ...] = ()
    for place in range(1, given["lora_count"] + 1):
        names = ("lora_wt",) * 2 if given["input_mode"] == "simple" else ("model_str", "clip_str")
        uses += _use(given[f"lora_name_{place}"], *(given[f"{name}_{place}"] for name in names))
    return ((*_stack(given), *uses),)


def _stacked_easily(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The first LoRAs, as many as the node counts, with one strength each ("simple"), or with two; none, if the node is
    switched off: then the stack that is linked is not passed on either, which a warning says."""
    before = _stack(given)
    if not given["toggle"]:
        if before:
            warn(given, "optional_lora_stack: not used: toggle is false, and the stack is empty")
        return ((),)
    uses: tuple[LoraUse, ...] = ()
    for place in range(1, given["num_loras"] + 1):
        names = ("strength",) * 2 if given["mode"] == "simple" else ("model_strength", "clip_strength")
        uses += _use(given[f"lora_{place}_name"], *(given[f"lora_{place}_{name}"] for name in names))
    check_parts("lora_stack", "LoRAs", len(before) + len(uses), MAX_LORAS)
    return ((*before, *uses),)


def _model_of_file(given: Mapping[str, Any]) -> tuple[Any, ...]:
    warn_unread(given, "weight_dtype", _OWN_CHOICE, own="default")
    return (ModelValue(given["unet_name"]),)


def _unstacked(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*with_loras(given["model"], given.get("clip"), _stack(given)), "")


def _rows(value: Any) -> list[Any]:
    """Return the rows of a table of the editor, which wraps them in files of the API."""
    found = value.get("__value__") if isinstance(value, dict) else value
    if value not in (None, "") and not isinstance(found, list | tuple):
        raise NodeUnsupported(f"loras: found {str(value)[:60]}, expected a list of LoRAs")
    return list(found or ())


def _managed_uses(given: Mapping[str, Any]) -> tuple[LoraUse, ...]:
    """Return the LoRAs of the rows of a node that are switched on. Raises NodeUnsupported."""
    uses = []
    for row in _rows(given.get("loras")):
        if not isinstance(row, dict) or not isinstance(row.get("name"), str):
            raise NodeUnsupported(f"loras: found {str(row)[:100]!r}, expected a table with a name")
        if not row.get("active", True):
            continue
        try:
            strength = float(row.get("strength", 1.0))
            uses.append(LoraUse(file_stem(row["name"]), strength, float(row.get("clipStrength", strength))))
        except (TypeError, ValueError):
            raise NodeUnsupported(f"loras: found {str(row)[:100]!r}, expected numbers as strengths") from None
    check_parts("loras", "LoRAs", len(uses), MAX_LORAS)
    return tuple(uses)


def _shown(uses: tuple[LoraUse, ...]) -> str:
    return " ".join(f"<lora:{use.name}:{use.strength:g}>" for use in uses)


def _managed(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A model with LoRAs, and two texts: words of the LoRAs, which the pool does not know, and their names."""
    uses = (*_stack(given), *_managed_uses(given))
    if uses:
        warn(given, "trigger_words: an empty text: the pool does not know the words of a LoRA; write them in the text")
    return *with_loras(given["model"], given.get("clip"), uses), "", _shown(uses)


def _managed_stack(given: Mapping[str, Any]) -> tuple[Any, ...]:
    own = _managed_uses(given)
    if own:
        warn(given, "trigger_words: an empty text: the pool does not know the words of a LoRA; write them in the text")
    return (*_stack(given), *own), "", _shown(own)


def _words_of_managed(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the texts of a node are before a workflow is compiled: its models are made then."""
    return None, None, ""


def _toggled(given: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """The words that are switched on: rows of the editor, else all that are linked."""
    words = given.get("trigger_words") or ""
    if not isinstance(words, str):
        return None
    rows = [row for row in _rows(given.get("toggle_trigger_words")) if isinstance(row, dict) and "text" in row]
    if not words:
        return ("",)
    if not rows:
        return (words,)
    return (", ".join(str(row["text"]) for row in rows if row.get("active", True)),)


def _managed_prompt(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """An encoded text behind words that are linked, and that text."""
    words = [given.get(f"trigger_words{place}") for place in range(1, 5)]
    if has_choices(given["text"]):
        raise NodeUnsupported("text: found choices, expected the text that was chosen: a seed chooses another one here")
    found = ", ".join(str(each) for each in (*words, given["text"]) if each)
    return TextValue(found, given["clip"]), found


def tagged(whole_text: str) -> tuple[str, tuple[LoraUse, ...]]:
    """Return a text without the LoRAs in it, and these. Raises NodeUnsupported for strengths that are no numbers, and
    for too many."""
    uses = []
    for match in _TAG.finditer(whole_text):
        name, strength, text_strength = match.groups()
        try:
            found = float(strength or 1)
            uses.append(LoraUse(file_stem(name.strip()), found, float(text_strength) if text_strength else found))
        except ValueError:
            raise NodeUnsupported(f"{match[0][:100]}: expected a number as strength") from None
    check_parts("loras", "LoRAs in a text", len(uses), MAX_LORAS)
    return _TAG.sub("", whole_text), tuple(uses)


def _tag_loaded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    found, uses = tagged(given["text"])
    return *with_loras(given["model"], given.get("clip"), uses), found


def _prompt(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A text with its LoRAs on the model and the text encoder that are linked, encoded; the model, the encoder, and the
    text without them. Raises NodeUnsupported for LoRAs without both."""
    found, uses = tagged(given["prompt"])
    model, clip = given.get("opt_model"), given.get("opt_clip")
    if uses and (model is None or clip is None):
        raise NodeUnsupported("prompt: found LoRAs, expected links of opt_model and opt_clip to use them on")
    if model is not None:
        model, clip = with_loras(model, clip, uses)
    return None if clip is None else TextValue(found, clip), model, clip, found


def _plain_prompt(given: Mapping[str, Any]) -> tuple[Any, ...]:
    clip = given.get("opt_clip")
    found, uses = tagged(given["prompt"])
    if uses:
        warn(given, "prompt: LoRAs in it are taken out, and not used: the node has no model")
    return None if clip is None else TextValue(found, clip), found


def _text_of(name: str, before: int) -> Route:
    """Return what gives the text of a node without its LoRAs before a workflow is compiled, behind other outputs."""

    def route(given: Mapping[str, Any]) -> tuple[Any, ...] | None:
        if not isinstance(given.get(name), str):
            return None
        try:
            return (*(None,) * before, tagged(given[name])[0])
        except NodeUnsupported:
            return None

    return route


def _weighted(given: Mapping[str, Any]) -> tuple[Any, ...]:
    check_weights(given)
    return (TextValue(given["text"], given["clip"]),)


def _seed_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a sampler, with its linked seed checked. Raises NodeUnsupported."""
    seed = given["seed"]
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise NodeUnsupported(f"seed: found {str(seed)[:100]!r}, expected a link to the node Seed")
    return {**given, "seed": seed}


def _sampled(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return _KSAMPLER(_seed_of(given))


def _sampled_node(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return WORKFLOW_NODES["KSampler"](_seed_of(given))


_row = partial(node_row, category="custom")


def _slots(count: int, *parts: NodeInput) -> tuple[NodeInput, ...]:
    return tuple(replace(part, name=f"{part.name}_{place}") for place in range(1, count + 1) for part in parts)


_flag = partial(flag, is_required=False)
_MODEL_CLIP = (link("model", "MODEL"), link("clip", "CLIP"))
_BY_TEXT = (link("model", "MODEL"), link("clip", "CLIP", is_required=False))
_WEIGHTS = (
    text("token_normalization", "none", choices=("none", "mean", "length", "length+mean")),
    text("weight_interpretation", "comfy", choices=("comfy", "A1111", "compel", "comfy++", "down_weight")),
)
_LORA = (
    text("lora_name", _NONE, choices=LORAS),
    number("strength_model", *_STRENGTH),
    number("strength_clip", *_STRENGTH),
)
_STACK = link("lora_stack", "LORA_STACK", is_required=False)
_DTYPES = tuple(text(name, "default", False) for name in ("weight_dtype", "compute_dtype"))
_INSERTED = tuple(text(f"insert_{name}", "CHOOSE", False) for name in ("lora", "embedding", "saved"))
_DEVICE = text("device", "", False)
_ON = combo("switch", ("Off", "On"))
LOADING_NODES = (
    _row("VAELoaderKJ", (text("vae_name", choices=VAES), text("device", "main_device", False),
                              text("weight_dtype", "bf16", False)), _vae, "VAE"),
    _row(
        "DiffusionModelLoaderKJ",
        (
            combo("model_name", MODELS), *_DTYPES, _flag("patch_cublaslinear"),
            text("sage_attention", "disabled", False), _flag("enable_fp16_accumulation"),
            link("extra_state_dict", ANY, is_required=False),
        ),
        _model,
        "MODEL",
    ),
    _row(
        "GGUFLoaderKJ",
        (
            combo("model_name", MODELS), text("extra_model_name", "none", False, choices=MODELS),
            *(text(name, "default", False) for name in ("dequant_dtype", "patch_dtype")), _flag("patch_on_device"),
            _flag("enable_fp16_accumulation"), text("attention_override", "none", False),
        ),
        _model,
        "MODEL",
    ),
    _row(
        "DualClipLoaderGGUF",
        (*(text(f"clip_name{place}", choices=TEXT_ENCODERS) for place in (1, 2)), text("type", "sdxl", False),
         text("device", "default", False)),
        clip_of_files,
        "CLIP",
    ),
    _row("UNETLoaderMultiGPU", (combo("unet_name", MODELS), text("weight_dtype", "default", False), _DEVICE),
         _model_of_file, "MODEL"),
    _row("VAELoaderMultiGPU", (text("vae_name", choices=VAES), _DEVICE), _vae, "VAE"),
    _row("CLIPLoaderMultiGPU", (text("clip_name", choices=TEXT_ENCODERS), text("type", "stable_diffusion", False),
                                _DEVICE), clip_of_files, "CLIP"),
    _row(
        "DualCLIPLoaderMultiGPU",
        (*(text(f"clip_name{place}", choices=TEXT_ENCODERS) for place in (1, 2)), text("type", "sdxl", False), _DEVICE),
        clip_of_files,
        "CLIP",
    ),
    _row("CheckpointLoaderSimpleMultiGPU", (combo("ckpt_name", MODELS), _DEVICE), _checkpoint,
         *("MODEL", "CLIP", "VAE")),
    _row("Checkpoint Loader (Simple)", (combo("ckpt_name", MODELS),), _named_checkpoint,
         *("MODEL", "CLIP", "VAE", "STRING")),
    _row("CheckpointLoader|pysssss", (combo("ckpt_name", MODELS),), _checkpoint, *("MODEL", "CLIP", "VAE")),
    _row("LoraLoader|pysssss", (*_MODEL_CLIP, *_LORA), _lora, "MODEL", "CLIP"),
    _row("Load Lora", (*_MODEL_CLIP, *_LORA), _named_lora, "MODEL", "CLIP", "STRING"),
    _row("Lora Loader", (*_MODEL_CLIP, *_LORA), _named_lora, "MODEL", "CLIP", "STRING"),
    _row("CR Load LoRA", (*_MODEL_CLIP, _ON, *_LORA), _helped_lora, "MODEL", "CLIP", "STRING"),
    _row(
        "CR LoRA Stack",
        (
            *_slots(_STACKED, _ON, _LORA[0], number("model_weight", 1.0, -10.0, 10.0),
                    number("clip_weight", 1.0, -10.0, 10.0)),
            _STACK,
        ),
        _stacked,
        "LORA_STACK", "STRING",
    ),
    _row("CR Apply LoRA Stack", (*_MODEL_CLIP, _STACK), _unstacked, "MODEL", "CLIP", "STRING"),
    _row(
        "LoRA Stacker",
        (
            combo("input_mode", ("simple", "advanced")),
            whole("lora_count", 3, 0, _EFFICIENT_SLOTS),
            *_slots(_EFFICIENT_SLOTS, _LORA[0], *(number(name, 1.0, -10.0, 10.0, False)
                                                  for name in ("lora_wt", "model_str", "clip_str"))),
            _STACK,
        ),
        _stacked_efficiently,
        "LORA_STACK",
    ),
    _row(
        "easy loraStack",
        (
            flag("toggle", True),
            combo("mode", ("simple", "advanced")),
            whole("num_loras", 1, 0, _EASY_SLOTS),
            *(
                each
                for place in range(1, _EASY_SLOTS + 1)
                for each in (
                    text(f"lora_{place}_name", _NONE, choices=LORAS),
                    *(number(f"lora_{place}_{name}", 1.0, -10.0, 10.0)
                      for name in ("strength", "model_strength", "clip_strength")),
                )
            ),
            link("optional_lora_stack", "LORA_STACK", is_required=False),
        ),
        _stacked_easily,
        "LORA_STACK",
    ),
    _row(
        "Lora Loader (LoraManager)",
        (link("model", "MODEL"), text("text", "", False), link("clip", "CLIP", is_required=False), _STACK,
         link("loras", ANY, is_required=False)),
        _managed,
        *("MODEL", "CLIP", "STRING", "STRING"),
    ),
    _row(
        "Lora Stacker (LoraManager)",
        (text("text", "", False), _STACK, link("loras", ANY, is_required=False)),
        _managed_stack,
        *("LORA_STACK", "STRING", "STRING"),
    ),
    _row(
        "TriggerWord Toggle (LoraManager)",
        (
            *(_flag(name) for name in ("group_mode", "default_active", "allow_strength_adjustment")),
            *(link(name, ANY, is_required=False)
              for name in ("trigger_words", "toggle_trigger_words", "originalMessage", "orinalMessage")),
        ),
        lambda given: _toggled(given) or ("",),
        "STRING",
    ),
    _row(
        "Prompt (LoraManager)",
        (link("clip", "CLIP"), text("text"), link("seed", ANY, is_required=False),
         *(link(f"trigger_words{place}", ANY, is_required=False) for place in range(1, 5))),
        _managed_prompt,
        *("CONDITIONING", "STRING"),
    ),
    _row("LoraTagLoader", (*_BY_TEXT, text("text")), _tag_loaded, "MODEL", "CLIP", "STRING"),
    _row(
        "Power Prompt (rgthree)",
        (text("prompt"), link("opt_model", "MODEL", is_required=False), link("opt_clip", "CLIP", is_required=False),
         *_INSERTED),
        _prompt,
        *("CONDITIONING", "MODEL", "CLIP", "STRING"),
    ),
    _row(
        "Power Prompt - Simple (rgthree)",
        (text("prompt"), link("opt_clip", "CLIP", is_required=False), *_INSERTED[1:]),
        _plain_prompt,
        *("CONDITIONING", "STRING"),
    ),
    _row("BNK_CLIPTextEncodeAdvanced", (text("text"), link("clip", "CLIP"), *_WEIGHTS), _weighted, "CONDITIONING"),
    _row(
        "KSampler (WAS)",
        (
            link("model", "MODEL"), link("seed", ANY), whole("steps", 20, 1, MAX_STEPS), number("cfg", 8.0, 0.0, 100.0),
            combo("sampler_name", SAMPLER_NAMES), combo("scheduler", SCHEDULE_NAMES), link("positive", "CONDITIONING"),
            link("negative", "CONDITIONING"), link("latent_image", "LATENT"), number("denoise", 1.0, 0.0, 1.0),
        ),
        _sampled,
        "LATENT",
    ),
)  # fmt: skip
#: what they become in workflows
LOADING_BUILDERS: Mapping[str, Builder] = MappingProxyType({"KSampler (WAS)": _sampled_node})
#: outputs that are texts, which are known before a workflow is compiled
LOADING_ROUTES: Mapping[str, Route] = MappingProxyType(
    {
        "Lora Loader (LoraManager)": _words_of_managed,
        "TriggerWord Toggle (LoraManager)": _toggled,
        "LoraTagLoader": _text_of("text", 2),
        "Power Prompt (rgthree)": _text_of("prompt", 3),
        "Power Prompt - Simple (rgthree)": _text_of("prompt", 1),
    }
)
