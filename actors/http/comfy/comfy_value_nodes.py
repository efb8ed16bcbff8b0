"""ComfyUI nodes of values: primitives, texts, numbers, and switches that pass one of their inputs on. Pure.

They have no tensors: `comfy_evaluation` computes them before a workflow is compiled. Custom nodes are here under their
own names, with what their public descriptions say; what depends on files, times or settings of a server is none of
them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

from modelpool.actors.http.comfy.comfy_expressions import number_of
from modelpool.actors.http.comfy.comfy_node_types import (
    ANY,
    MAX_BATCH,
    MAX_SEED,
    NodeInput,
    NodeUnsupported,
    any_of,
    combo,
    flag,
    link,
    node_row,
    number,
    text,
    whole,
)
from modelpool.actors.http.comfy.comfy_pack_numbers import PACK_NUMBERS
from modelpool.actors.http.comfy.comfy_pack_switches import PACK_SWITCHES, unknown_route
from modelpool.actors.http.comfy.comfy_pack_texts import PACK_SEARCH_STEPS, PACK_TEXTS
from modelpool.actors.http.comfy.comfy_searches import (
    joined,
    regex_extracted,
    regex_matched,
    regex_replacement,
    regex_steps,
    replaced,
)
from modelpool.actors.http.comfy.comfy_tokens import TOKEN_DEFINITIONS, TOKEN_NODES
from modelpool.actors.http.comfy.comfy_utility_nodes import UTILITY_NODES, WRITING_NODES, json_steps, need_room
from modelpool.actors.http.comfy.comfy_values import (
    BlankLatent,
    DecodedImage,
    ImageFile,
    NodeImage,
    ScaledLatent,
    UnknownSize,
)

_INT, _FLOAT = (-(2**63), 2**64 - 1), (-1e18, 1e18)
#: the input that a node passes on, from its settings and the names of its inputs that are there
Choice: TypeAlias = Callable[[Mapping[str, Any], tuple[str, ...]], str | None]
_PARTS_OF_TEXT = ("text_a", "text_b", "text_c", "text_d")
_SWITCHED = 10
#: regular expressions of names by which a node of the editor chooses what it is linked to
_PATTERNS = ("title_regex", "input_regex", "group_regex")
#: names of the values of an expression
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _value(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (given["value"],)


def _written(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the first input of a node with a single one."""
    return (next(value for name, value in given.items() if name != "node_id"),)


def _concatenated(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (joined(given["delimiter"], [given["string_a"], given["string_b"]]),)


def _substring(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (given["string"][given["start"] : given["end"]],)


def _length(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (len(given["string"]),)


def _cased(given: Mapping[str, Any]) -> tuple[Any, ...]:
    change = {
        "UPPERCASE": str.upper,
        "lowercase": str.lower,
        "Capitalize": str.capitalize,
        "Title Case": str.title,
    }[given["mode"]]
    found = change(given["string"])
    need_room(len(found))
    return (found,)


def _trimmed(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return ({"Both": str.strip, "Left": str.lstrip, "Right": str.rstrip}[given["mode"]](given["string"]),)


def _replacement(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (replaced(given["string"], given["find"], given["replace"]),)


def _contains(given: Mapping[str, Any]) -> tuple[Any, ...]:
    found, part = _in_case(given, "string", "substring")
    return (part in found,)


def _compared(given: Mapping[str, Any]) -> tuple[Any, ...]:
    one, other = _in_case(given, "string_a", "string_b")
    if given["mode"] == "Equal":
        return (one == other,)
    return (one.startswith(other) if given["mode"] == "Starts With" else one.endswith(other),)


def _in_case(given: Mapping[str, Any], *names: str) -> list[str]:
    return [given[name] if given["case_sensitive"] else given[name].lower() for name in names]


def _four_texts(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(given.get(name) or "" for name in ("text", "text_b", "text_c", "text_d"))


def _concatenated_parts(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Parts that are missing are left out; with `clean_whitespace`, they are trimmed, and empty ones are left out. The
    node of early 2023 has lines or nothing between them."""
    parts = [given[name] for name in _PARTS_OF_TEXT if given.get(name) is not None]
    if given.get("linebreak_addition"):
        return (joined("\n" if given["linebreak_addition"] == "true" else "", parts),)
    if given["clean_whitespace"] == "true":
        parts = [part.strip() for part in parts if part.strip()]
    return (joined(given["delimiter"].replace("\\n", "\n"), parts),)


def _shown(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (given["text"],)


def _found_and_replaced(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (replaced(given["text"], given["find"], given["replace"]),)


def _random_line(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the line that Python's random numbers choose for the seed."""
    return (random.Random(given["seed"]).choice(given["text"].split("\n")),)


def _calculated_of(given: Mapping[str, Any]) -> tuple[Any, ...]:
    names = {name: given.get(f"values.{name}") for name in _LETTERS}
    there = {name: value for name, value in names.items() if value is not None}
    if wrong := [name for name, value in there.items() if not isinstance(value, int | float)]:
        raise NodeUnsupported(f"values.{wrong[0]}: expected a number")
    found = number_of(given["expression"], there, tuple(there.values()))
    return float(found), int(found), bool(found)


def _negated(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (not given["boolean"],)


def _empty_of_size(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A latent of sides as in "1024 x 768  (landscape)", and these times `clip_scale`, for the size in the texts."""
    sides = re.match(r"\s*(\d{2,5})\s*x\s*(\d{2,5})", given["dimensions"])
    if sides is None:
        raise NodeUnsupported(f"dimensions: found {given['dimensions'][:100]!r}, expected WIDTH x HEIGHT")
    width, height = (max(16, int(side)) for side in sides.groups())
    scaled = (int(side * given["clip_scale"]) for side in (width, height))
    return (BlankLatent(width, height, given["batch_size"]), *scaled)


def _unknown_size(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A node that is still there when the workflow is compiled: the size is not known."""
    raise NodeUnsupported("image: its size is known when it is made, and not before")


def _size_and_count(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The width and the height of images are known when they are made, their number is known before."""
    image: ImageFile | NodeImage | DecodedImage = given["image"]
    count = 1
    if isinstance(image, NodeImage):
        count = image.count * max(1, image.frames)
    elif isinstance(image, DecodedImage):
        start: Any = image.latent.start
        while isinstance(start, ScaledLatent):
            start = start.latent.start
        count = getattr(start, "count", 1) * max(1, getattr(start, "frames", 0))
    return UnknownSize(), UnknownSize(), count


def _image_size_and_count(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return given["image"], *_size_and_count(given)


def _nothing(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return ()


def _without_newlines(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (given["string"].replace("\n", "") if given["strip_newlines"] else given["string"],)


def _calculated(given: Mapping[str, Any]) -> tuple[Any, ...]:
    found = number_of(given["expression"], _numbers(given, "abc"))
    return int(found), float(found)


def _rounded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    found = number_of(given["value"], _numbers(given, "ab"))
    return round(found), float(found)


def _numbers(given: Mapping[str, Any], names: str) -> dict[str, Any]:
    found = {name: 0 if given.get(name) is None else given[name] for name in names}
    if wrong := [name for name, value in found.items() if not isinstance(value, int | float)]:
        raise NodeUnsupported(f"{', '.join(wrong)}: expected numbers")
    return found


_row = partial(node_row, category="values")


_INTEGER, _NUMBER = (whole("value", 0, *_INT),), (number("value", 0.0, *_FLOAT),)
_CORE = (
    _row("PrimitiveInt", _INTEGER, _value, "INT"),
    _row("PrimitiveFloat", _NUMBER, _value, "FLOAT"),
    _row("PrimitiveString", (text("value"),), _value, "STRING"),
    _row("PrimitiveStringMultiline", (text("value"),), _value, "STRING"),
    _row("PrimitiveBoolean", (flag("value"),), _value, "BOOLEAN"),
    _row(
        "StringConcatenate", (text("string_a"), text("string_b"), text("delimiter", "", False)), _concatenated, "STRING"
    ),
    _row("StringSubstring", (text("string"), whole("start", 0, *_INT), whole("end", 0, *_INT)), _substring, "STRING"),
    _row("StringLength", (text("string"),), _length, "INT"),
    _row(
        "CaseConverter",
        (text("string"), combo("mode", ("UPPERCASE", "lowercase", "Capitalize", "Title Case"))),
        _cased,
        "STRING",
    ),
    _row("StringTrim", (text("string"), combo("mode", ("Both", "Left", "Right"))), _trimmed, "STRING"),
    _row("StringReplace", (text("string"), text("find"), text("replace")), _replacement, "STRING"),
    _row("ReplaceText", (text("text"), text("find"), text("replace")), _found_and_replaced, "STRING"),
    _row("StringContains", (text("string"), text("substring"), flag("case_sensitive", True)), _contains, "BOOLEAN"),
    _row(
        "StringCompare",
        (
            text("string_a"),
            text("string_b"),
            combo("mode", ("Starts With", "Ends With", "Equal")),
            flag("case_sensitive", True),
        ),
        _compared,
        "BOOLEAN",
    ),
)
_FLAGS = tuple(
    flag(name, default, is_required=False)
    for name, default in (("case_insensitive", True), ("multiline", False), ("dotall", False))
)
_LATER = (
    _row(
        "RegexReplace",
        (
            text("string"),
            text("regex_pattern"),
            text("replace"),
            *_FLAGS,
            whole("count", 0, 0, 100, is_required=False),
        ),
        regex_replacement,
        "STRING",
    ),
    _row(
        "RegexExtract",
        (
            text("string"),
            text("regex_pattern"),
            combo("mode", ("First Match", "All Matches", "First Group", "All Groups")),
            *_FLAGS,
            whole("group_index", 1, 0, 100, is_required=False),
        ),
        regex_extracted,
        "STRING",
    ),
    _row("RegexMatch", (text("string"), text("regex_pattern"), *_FLAGS), regex_matched, "BOOLEAN"),
    _row(
        "ComfyMathExpression",
        (text("expression", "a + b"), *any_of(*(f"values.{name}" for name in _LETTERS))),
        _calculated_of,
        "FLOAT",
        "INT",
        "BOOLEAN",
    ),
    _row("InvertBooleanNode", (flag("boolean"),), _negated, "BOOLEAN"),
)
#: nodes that show something in the editor, and make nothing
_SHOWING = (
    _row("Image Comparer (rgthree)", any_of("image_a", "image_b"), _nothing),
    _row("ImageCompare", any_of("image_a", "image_b"), _nothing),
    _row("ImageHistogram", any_of("image"), _nothing),
    _row("Display Any (rgthree)", any_of("source"), _nothing),
    # in the API format, the links that the editor adds for these are there
    _row("Anything Everywhere", any_of("anything"), _nothing),
    _row("Anything Everywhere3", any_of("anything", "anything2", "anything3"), _nothing),
    _row("Anything Everywhere?", (*any_of("anything"), *(text(name, ".*", False) for name in _PATTERNS)), _nothing),
    _row("Prompts Everywhere", any_of("+ve", "-ve", "anything", "anything2"), _nothing),
    _row("Display Int (rgthree)", any_of("input"), _nothing),
    _row("LayerUtility: PurgeVRAM", (*any_of("anything"), flag("purge_cache"), flag("purge_models")), _nothing),
    _row("Show any [Crystools]", any_of("any_value"), _nothing),
    _row("DisplayAny", any_of("input"), _nothing),
    _row("Int debug print", (text("Label", "", False), *any_of("Value")), _nothing),
)
_CUSTOM = (
    _row("Text Multiline", (text("text"),), _written, "STRING"),
    _row("Text _O", (text("text"),), _written, "STRING"),
    _row(
        "Text to Console", (text("text"), text("label", "Text Output", False)), lambda given: (given["text"],), "STRING"
    ),
    _row("ShowText|pysssss", (text("text"),), _written, "STRING"),
    _row(
        "Text String",
        (text("text"), *(text(name, "", False) for name in ("text_b", "text_c", "text_d"))),
        _four_texts,
        *["STRING"] * 4,
    ),
    _row(
        "Text Concatenate",
        (
            text("delimiter", ", "),
            combo("clean_whitespace", ("true", "false")),
            *(NodeInput(name, "STRING", is_required=False) for name in _PARTS_OF_TEXT),
            text("linebreak_addition", "", False),
        ),
        _concatenated_parts,
        "STRING",
    ),
    _row("Text Find and Replace", (text("text"), text("find"), text("replace")), _found_and_replaced, "STRING"),
    _row("Text Find and Replace Input", (text("text"), text("find"), text("replace")), _found_and_replaced, "STRING"),
    _row("Text Random Line", (text("text"), whole("seed", 0, 0, MAX_SEED)), _random_line, "STRING"),
    _row("INTConstant", _INTEGER, _value, "INT"),
    _row("FloatConstant", _NUMBER, _value, "FLOAT"),
    _row("StringConstant", (text("string"),), _written, "STRING"),
    _row("StringConstantMultiline", (text("string"), flag("strip_newlines", True)), _without_newlines, "STRING"),
    _row("JWInteger", _INTEGER, _value, "INT"),
    _row("JWFloat", _NUMBER, _value, "FLOAT"),
    _row("JWString", (text("text"),), _written, "STRING"),
    _row("easy int", _INTEGER, _value, "INT"),
    _row("easy float", _NUMBER, _value, "FLOAT"),
    _row("easy string", (text("value"),), _value, "STRING"),
    _row("easy boolean", (flag("value"),), _value, "BOOLEAN"),
    _row("Seed (rgthree)", (whole("seed", 0, 0, MAX_SEED),), _written, "INT"),
    _row("CR Seed", (whole("seed", 0, 0, MAX_SEED),), _written, "INT"),
    _row("MathExpression|pysssss", (text("expression"), *any_of("a", "b", "c")), _calculated, "INT", "FLOAT"),
    _row("SimpleMath+", (text("value"), *any_of("a", "b")), _rounded, "INT", "FLOAT"),
)
_PASSING = (
    _row("ComfySwitchNode", (flag("switch"), *any_of("on_false", "on_true")), unknown_route, ANY),
    _row("LazySwitchKJ", (flag("switch"), *any_of("on_false", "on_true")), unknown_route, ANY),
    _row("Switch any [Crystools]", (flag("boolean", True), *any_of("on_true", "on_false")), unknown_route, ANY),
    _row("Any Switch (rgthree)", any_of(*(f"any_{place:02}" for place in range(1, _SWITCHED + 1))), unknown_route, ANY),
)


def _only(given: Mapping[str, Any], there: tuple[str, ...]) -> str | None:
    return there[0] if there else None


def _by_flag(name: str) -> Choice:
    return lambda given, there: "on_true" if given[name] else "on_false"


#: the nodes that pass one of their inputs on
PASSING_NODES: Mapping[str, Choice] = MappingProxyType(
    {
        "ComfySwitchNode": _by_flag("switch"),
        "LazySwitchKJ": _by_flag("switch"),
        "Switch any [Crystools]": _by_flag("boolean"),
        "Any Switch (rgthree)": _only,
    }
)
_LATENTS = (
    _row(
        "SDXL Empty Latent Image (rgthree)",
        (text("dimensions", "1024 x 1024"), number("clip_scale", 2.0, 1.0, 10.0), whole("batch_size", 1, 1, MAX_BATCH)),
        _empty_of_size,
        "LATENT",
        "INT",
        "INT",
    ),
)
_SIZES = (
    _row("GetImageSize", (link("image", "IMAGE"),), _size_and_count, "INT", "INT", "INT"),
    _row("GetImageSize+", (link("image", "IMAGE"),), _size_and_count, "INT", "INT", "INT"),
    _row("GetImageSizeAndCount", (link("image", "IMAGE"),), _image_size_and_count, "IMAGE", "INT", "INT", "INT"),
    _row(
        "Image Size to Number",
        (link("image", "IMAGE"),),
        _unknown_size,
        *("INT", "INT", "FLOAT", "FLOAT", "INT", "INT"),
    ),
    _row("easy imageSize", (link("image", "IMAGE"),), _unknown_size, "INT", "INT"),
    _row(
        "easy imageSizeBySide", (link("image", "IMAGE"), combo("side", ("Longest", "Shortest"))), _unknown_size, "INT"
    ),
    _row("easy imageSizeByLongerSide", (link("image", "IMAGE"),), _unknown_size, "INT"),
    _row("GetImage_(Width&Height) _O", (link("image", "IMAGE"),), _unknown_size, "INT", "INT"),
    _row("CM_NearestSDXLResolution", (link("image", "IMAGE"),), _unknown_size, "INT", "INT"),
    _row("Get resolution [Crystools]", (link("image", "IMAGE"),), _unknown_size, "INT", "INT"),
    _row("Image or Latent Size (rgthree)", (link("input", ANY),), _unknown_size, "INT", "INT"),
    _row("LayerUtility: GetImageSize", (link("image", "IMAGE"),), _unknown_size, "INT", "INT", "BOX"),
)
_COMPUTED = (*_CORE, *_LATER, *UTILITY_NODES, *_CUSTOM, *PACK_TEXTS, *PACK_NUMBERS, *TOKEN_NODES)
VALUE_NODES = (*_COMPUTED, *_PASSING, *PACK_SWITCHES, *TOKEN_DEFINITIONS, *_SHOWING, *_LATENTS, *_SIZES, *WRITING_NODES)
#: names of the nodes that are computed from written values
COMPUTED_NODES = frozenset(row.name for row in _COMPUTED)
#: steps of nodes that search a text, from their settings, besides reading it: each takes a part of a second at most
SEARCH_STEPS: Mapping[str, Callable[[Mapping[str, Any]], int]] = MappingProxyType(
    {
        **dict.fromkeys(("RegexReplace", "RegexExtract", "RegexMatch"), regex_steps),
        "JsonExtractString": json_steps,
        **PACK_SEARCH_STEPS,
    }
)
