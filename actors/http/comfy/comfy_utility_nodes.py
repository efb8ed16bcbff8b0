"""ComfyUI nodes of values that its templates use: sizes by their ratio, lists of choices, parts of JSON, formats. Pure.

Like the nodes of `comfy_value_nodes`, they are computed before a workflow is compiled.
"""

from __future__ import annotations

import json
import math
import string
from collections.abc import Mapping
from functools import partial
from typing import Any

from modelpool.actors.http.comfy.comfy_node_types import (
    ANY,
    MAX_SEED,
    NodeInput,
    NodeUnsupported,
    chosen_by,
    combo,
    flag,
    link,
    node_row,
    number,
    text,
    whole,
)
from modelpool.actors.request.bounds import MAX_PROMPT_CHARACTERS
from modelpool.pool.values.core.errors import counted

#: width and height of the ratios that ResolutionSelector names
_RATIOS = {
    "1:1 (Square)": (1, 1),
    "2:3 (Portrait Photo)": (2, 3),
    "3:2 (Photo)": (3, 2),
    "3:4 (Portrait Standard)": (3, 4),
    "4:3 (Standard)": (4, 3),
    "9:16 (Portrait Widescreen)": (9, 16),
    "16:9 (Widescreen)": (16, 9),
    "21:9 (Ultrawide)": (21, 9),
}
_MEGAPIXEL = 1024 * 1024
#: options of CustomCombo; values of StringFormat
_OPTIONS, _VALUES = 50, string.ascii_lowercase
#: braces at which a text is read as JSON, and these times its characters: each may be read to the end
_MOST_STARTS, _MOST_READ = 100, 10**7


def need_room(characters: int) -> None:
    """Raise NodeUnsupported for a text of more characters than a prompt may have."""
    if characters > MAX_PROMPT_CHARACTERS:
        raise NodeUnsupported(f"its text has {characters} characters, expected up to {MAX_PROMPT_CHARACTERS}")


def _size_of_ratio(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Sides of about so many pixels with a ratio, each rounded to a multiple."""
    wide, high = _RATIOS[given["aspect_ratio"]]
    scale = math.sqrt(given["megapixels"] * _MEGAPIXEL / (wide * high))
    multiple = given["multiple"]
    return tuple(round(side * scale / multiple) * multiple for side in (wide, high))


def _chosen(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The choice, and its place in the list of options, where these are there."""
    options = [given[name] for place in range(1, _OPTIONS + 1) if given.get(name := f"option{place}") is not None]
    return given["choice"], options.index(given["choice"]) if given["choice"] in options else given["index"]


def _of_json(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The value of a key of the first object of JSON in a text, as Python shows it; "" if there is none. Raises
    NodeUnsupported for too much work."""
    try:
        found = _first_object(given["json_string"]).get(given["key"])
        shown = "" if found is None else str(found)
    except RecursionError:
        raise NodeUnsupported("json_string: found JSON that is too deep, expected fewer levels") from None
    need_room(len(shown))
    return (shown,)


def json_steps(given: Mapping[str, Any]) -> int:
    """Return about how many characters are read to find an object: all of them from each brace on."""
    whole_text: str = given["json_string"]
    return min(_MOST_READ, min(_MOST_STARTS, whole_text.count("{")) * len(whole_text))


def _first_object(whole_text: str) -> dict[str, Any]:
    need_room(len(whole_text))
    decoder, place, starts = json.JSONDecoder(), whole_text.find("{"), 0
    while place >= 0:
        starts += 1
        if starts > _MOST_STARTS or starts * len(whole_text) > _MOST_READ:
            raise NodeUnsupported(
                f"json_string: found no object in the first {counted(starts - 1, 'brace')} of "
                f"{counted(len(whole_text), 'character')}, expected one within {_MOST_STARTS} braces, and braces times "
                f"characters up to {_MOST_READ}"
            )
        try:
            return dict(decoder.raw_decode(whole_text, place)[0])
        except ValueError:
            place = whole_text.find("{", place + 1)
    return {}


def _as_numbers(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A number, and it with its fraction cut off. Texts of whole numbers stay exact."""
    value = given["value"]
    try:
        exact = int(value) if isinstance(value, bool | int) else int(value.strip()) if isinstance(value, str) else None
    except ValueError:
        exact = None
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise NodeUnsupported(f"value: found {str(value)[:100]!r}, expected a number")
    return found, int(found) if exact is None else exact


def _shown(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the editor shows of a value: a text as it is, others as Python shows them."""
    value = given["source"]
    if not isinstance(value, str | bool | int | float):
        raise NodeUnsupported("source: expected a text, a number or a truth value")
    return (str(value),)


def _formatted(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A text in which names in braces are replaced with their values. Raises NodeUnsupported for formats and parts of
    values."""
    values = {name: given.get(f"values.{name}") for name in _VALUES}
    parts: list[str] = []
    try:
        fields = list(string.Formatter().parse(given["f_string"]))
    except ValueError:
        raise NodeUnsupported(f"f_string: found {given['f_string'][:100]!r}, expected a format") from None
    for literal, name, form, conversion in fields:
        parts.append(literal)
        if name is None:
            continue
        if form or conversion not in (None, "s") or values.get(name) is None:
            raise NodeUnsupported(f"f_string: found {{{name[:40]}}}, expected the name of a value, without a format")
        if not isinstance(values[name], str | bool | int | float):
            raise NodeUnsupported(f"values.{name}: expected a text, a number or a truth value")
        parts.append(str(values[name]))
    need_room(sum(map(len, parts)))
    return ("".join(parts),)


def _seed(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (given["seed"],)


def _cut(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (given["text"][: given["max_length"]],)


def _prefixed(given: Mapping[str, Any]) -> tuple[Any, ...]:
    need_room(len(given["prefix"]) + len(given["text"]))
    return (given["prefix"] + given["text"],)


def _suffixed(given: Mapping[str, Any]) -> tuple[Any, ...]:
    need_room(len(given["suffix"]) + len(given["text"]))
    return (given["text"] + given["suffix"],)


def _lower(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (given["text"].lower(),)


def _upper(given: Mapping[str, Any]) -> tuple[Any, ...]:
    need_room(len(found := given["text"].upper()))
    return (found,)


def _stripped(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (given["text"].strip(),)


def _generated(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A node that is still there when the workflow is compiled: an output needs its text."""
    raise NodeUnsupported(
        "the pool has no language models that write texts: write the text itself, or choose the branch without it"
    )


_row = partial(node_row, category="values")
_WRITING_INPUTS = (
    link("clip", "CLIP"),
    text("prompt"),
    *(
        link(name, kind, is_required=False)
        for name, kind in (("image", "IMAGE"), ("video", "IMAGE"), ("audio", "AUDIO"))
    ),
    whole("max_length", 512, 1, 32_768),
    combo("sampling_mode", ("on", "off")),
    *chosen_by(
        "sampling_mode",
        "on",
        inputs=(
            number("temperature", 0.7, 0.01, 2.0),
            whole("top_k", 64, 0, 1000),
            number("top_p", 0.95, 0.0, 1.0),
            number("min_p", 0.05, 0.0, 1.0),
            number("repetition_penalty", 1.05, 0.0, 5.0),
            whole("seed", 0, 0, MAX_SEED),
            number("presence_penalty", 0.0, 0.0, 5.0),
        ),
    ),
    flag("thinking", False, is_required=False),
    flag("use_default_template", True, is_required=False),
    text("mtp", "auto", False),
    link("system_prompt", "STRING", is_required=False),
)
#: nodes that write texts with a language model: workflows in which a switch leads past them work
WRITING_NODES = tuple(
    _row(name, _WRITING_INPUTS, _generated, "STRING", "STRING") for name in ("TextGenerate", "TextGenerateLTX2Prompt")
)
UTILITY_NODES = (
    _row(
        "ResolutionSelector",
        (
            combo("aspect_ratio", tuple(_RATIOS)),
            number("megapixels", 1.0, 0.1, 16.0),
            whole("multiple", 8, 8, 128, is_required=False),
        ),
        _size_of_ratio,
        "INT",
        "INT",
    ),
    _row(
        "CustomCombo",
        (
            text("choice"),
            whole("index", 0, -1, 10_000, is_required=False),
            *(NodeInput(f"option{place}", "STRING", is_required=False) for place in range(1, _OPTIONS + 1)),
        ),
        _chosen,
        "STRING",
        "INT",
    ),
    _row("JsonExtractString", (text("json_string"), text("key")), _of_json, "STRING"),
    _row("ComfyNumberConvert", (link("value", ANY),), _as_numbers, "FLOAT", "INT"),
    _row("PreviewAny", (link("source", ANY),), _shown, "STRING"),
    _row(
        "StringFormat",
        (text("f_string", "{a}"), *(link(f"values.{name}", ANY, is_required=False) for name in _VALUES)),
        _formatted,
        "STRING",
    ),
    _row("SeedNode", (whole("seed", 0, 0, MAX_SEED),), _seed, "INT"),
    _row("TruncateText", (text("text"), whole("max_length", 77, 1, 10_000)), _cut, "STRING"),
    _row("AddTextPrefix", (text("text"), text("prefix", "", False)), _prefixed, "STRING"),
    _row("AddTextSuffix", (text("text"), text("suffix", "", False)), _suffixed, "STRING"),
    _row("TextToLowercase", (text("text"),), _lower, "STRING"),
    _row("TextToUppercase", (text("text"),), _upper, "STRING"),
    _row("StripWhitespace", (text("text"),), _stripped, "STRING"),
)
