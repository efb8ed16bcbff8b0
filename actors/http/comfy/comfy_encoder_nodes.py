"""ComfyUI nodes that give a text to each text encoder of a model, or put it into a template. Pure.

With the same text for all, they are that text. Others are operations on encoded texts, where the encoders of a family
are apart in what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_node_types import (
    MAX_SIDE,
    Builder,
    NodeInput,
    NodeType,
    NodeUnsupported,
    combo,
    link,
    number,
    text,
    warn,
    whole,
)
from modelpool.actors.http.comfy.comfy_text_nodes import with_unread
from modelpool.actors.http.comfy.comfy_values import ChangedText, TextValue

_CLIP = link("clip", "CLIP")
_SYSTEM_PROMPTS = ("superior", "alignment")
#: sizes that a node gives to a text, of the image and of what it was cut from
_SIZES = ("width", "height", "target_width", "target_height")
#: what texts for several encoders become: an operation, and the input of the node that each of its inputs is
_FLUX = ("encoded_pooled_of", ("t5xxl", "clip_l"))
_SDXL = ("encoded_of_two", ("text_l", "text_g"))
_SD3 = ("encoded_of_three", ("clip_l", "clip_g", "t5xxl"))
_NAMES = ("first", "second", "third")


def _one_text(given: Mapping[str, Any], *names: str) -> str:
    """Return the text of several encoders. Raises NodeUnsupported if it is not the same."""
    if len({given[name] for name in names}) > 1:
        raise NodeUnsupported(f"{', '.join(names)}: expected the same text, which all text encoders read")
    found: str = given[names[0]]
    return found


def _texts(
    given: Mapping[str, Any], operation: str, names: tuple[str, ...], settings: tuple[tuple[str, bool], ...] = ()
) -> TextValue:
    """Return the text of several encoders: one text, or what an operation makes of them."""
    if len({given[name] for name in names}) == 1 and not settings:
        return TextValue(given[names[0]], given["clip"])
    parts = tuple((each, TextValue(given[name], given["clip"])) for each, name in zip(_NAMES, names, strict=False))
    return TextValue("", given["clip"], changed=ChangedText(operation, parts, settings, parts=len(parts)))


def _for_sd3(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Without a padding, an encoder with an empty text has no states; of both CLIP, if both texts are empty."""
    empty = _empty_encoders(given)
    if ("has_third", False) in empty:
        warn(given, "t5xxl: found an empty text without padding: the pool leaves out its one state, of the end")
    return (_texts(given, *_SD3, empty),)


def _for_sd3_as_text(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if _empty_encoders(given):
        raise NodeUnsupported("empty_padding: found none with an empty text, expected empty_prompt")
    return (TextValue(_one_text(given, *_SD3[1]), given["clip"]),)


def _empty_encoders(given: Mapping[str, Any]) -> tuple[tuple[str, bool], ...]:
    if given["empty_padding"] != "none":
        return ()
    there = {"has_clip": bool(given["clip_l"] or given["clip_g"]), "has_third": bool(given["t5xxl"])}
    return tuple((name, value) for name, value in there.items() if not value)


def _with_guidance(value: TextValue, given: Mapping[str, Any]) -> TextValue:
    return replace(value, guidance=given["guidance"]) if "guidance" in given else value


def _one(*names: str) -> Builder:
    def build(given: Mapping[str, Any]) -> tuple[Any, ...]:
        return (_with_guidance(_with_sizes(TextValue(_one_text(given, *names), given["clip"]), given), given),)

    return build


def _several(operation: str, names: tuple[str, ...]) -> Builder:
    def build(given: Mapping[str, Any]) -> tuple[Any, ...]:
        return (_with_guidance(_with_sizes(_texts(given, operation, names), given), given),)

    return build


def _with_sizes(value: TextValue, given: Mapping[str, Any]) -> TextValue:
    """Return a text with the sizes next to it, which are the ones of the image here. Warn of others."""
    if given.get("crop_w") or given.get("crop_h"):
        warn(given, f"crop_w, crop_h: found {given['crop_w']} and {given['crop_h']}, which are not read: 0 is")
    return with_unread(value, given, *_SIZES)


def _for_refiner(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The text; the refiner of the pool reads the score that it was published with: 6, and 2.5 for negative."""
    if given["ascore"] not in (6.0, 2.5):
        warn(given, f"ascore: found {given['ascore']:g}, which is not read: positive texts have 6, negative ones 2.5")
    return (_with_sizes(TextValue(given["text"], given["clip"]), given),)


def _plain(name: str) -> Builder:
    return lambda given: (_with_sizes(TextValue(given[name], given["clip"]), given),)


def _for_lumina(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The text of the user: the pool puts the first of these system prompts before positive texts by itself."""
    if given["system_prompt"] != _SYSTEM_PROMPTS[0]:
        warn(given, f"system_prompt: found {given['system_prompt']}, which is not read: the pool has superior")
    return (TextValue(given["user_prompt"], given["clip"]),)


def _row(name: str, build: Builder, *inputs: NodeInput) -> NodeType:
    return NodeType(name, "conditioning", inputs, ("CONDITIONING",), build)


def _sides(*names: str, default: int = 1024) -> tuple[NodeInput, ...]:
    return tuple(whole(name, default, 0, MAX_SIDE) for name in names)


ENCODER_NODES = (
    _row(
        "CLIPTextEncodeFlux",
        _one("t5xxl", "clip_l"),
        _CLIP,
        text("clip_l"),
        text("t5xxl"),
        number("guidance", 3.5, 0.0, 100.0),
    ),
    _row(
        "CLIPTextEncodeSD3",
        _for_sd3_as_text,
        _CLIP,
        text("clip_l"),
        text("clip_g"),
        text("t5xxl"),
        combo("empty_padding", ("none", "empty_prompt"), is_required=False),
    ),
    _row(
        "CLIPTextEncodeSDXL",
        _one("text_g", "text_l"),
        _CLIP,
        *_sides("width", "height"),
        *_sides("crop_w", "crop_h", default=0),
        *_sides("target_width", "target_height"),
        text("text_g"),
        text("text_l"),
    ),
    _row(
        "CLIPTextEncodeSDXLRefiner",
        _for_refiner,
        number("ascore", 6.0, 0.0, 1000.0),
        *_sides("width", "height"),
        text("text"),
        _CLIP,
    ),
    _row("CLIPTextEncodePixArtAlpha", _plain("text"), *_sides("width", "height"), text("text"), _CLIP),
    _row("CLIPTextEncodeHunyuanDiT", _one("bert", "mt5xl"), _CLIP, text("bert"), text("mt5xl")),
    _row(
        "CLIPTextEncodeHiDream",
        _one("clip_l", "clip_g", "t5xxl", "llama"),
        _CLIP,
        *map(text, ("clip_l", "clip_g", "t5xxl", "llama")),
    ),
    _row(
        "CLIPTextEncodeLumina2",
        _for_lumina,
        combo("system_prompt", _SYSTEM_PROMPTS),
        text("user_prompt"),
        _CLIP,
    ),
    _row("CLIPTextEncodeKandinsky5", _one("clip_l", "qwen25_7b"), _CLIP, text("clip_l"), text("qwen25_7b")),
)
#: what they become in workflows
ENCODER_BUILDERS: Mapping[str, Builder] = MappingProxyType(
    {
        "CLIPTextEncodeFlux": _several(*_FLUX),
        "CLIPTextEncodeSDXL": _several(*_SDXL),
        "CLIPTextEncodeSD3": _for_sd3,
    }
)
