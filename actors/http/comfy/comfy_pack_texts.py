"""Custom nodes of texts: KJNodes, WAS, Comfyroll, easy-use, mtb, LayerStyle, tinyterra, pysssss, Impact, others. Pure.

They are here under their own names, with what their public descriptions say. What depends on files, times or lists of a
server is not here. Like the nodes of `comfy_value_nodes`, they are computed before a workflow is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_node_types import (
    ANY,
    LORAS,
    MAX_SEED,
    Builder,
    NodeInput,
    NodeUnsupported,
    combo,
    flag,
    link,
    node_row,
    number,
    text,
    whole,
)
from modelpool.actors.http.comfy.comfy_searches import joined, regex_replaced, replaced, steps_of
from modelpool.actors.http.comfy.comfy_utility_nodes import need_room

#: texts that a node joins, at most
_MOST_JOINED = 100
#: styles that leave a text as it is
_NO_STYLES = ("base", "sai-base", "none", "no style", "")
#: the name of a list, and alternatives
_CHOICES = re.compile(r"__[\w.\-+/*\\]{1,100}__|\{[^{}|]*\|")
_UNTIDY = ((re.compile(r"[ \t]{2,}"), " "), (re.compile(r" +,"), ","), (re.compile(r",{2,}"), ","))


#: a kind of node of values
row = partial(node_row, category="values")


def passed(name: str) -> Builder:
    """Return what gives the input `name` as it is."""
    return lambda given: (given[name],)


def _helped(name: str) -> Builder:
    """Return what gives the input `name`, and an empty text of help."""
    return lambda given: (given[name], "")


def _there(given: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    """Return the texts that are there, and not empty."""
    return [given[name] for name in names if given.get(name)]


def _joined_by(delimiter: str, *names: str) -> Builder:
    """Return what joins all texts, also empty ones, by the delimiter of the input."""
    return lambda given: (joined(given[delimiter], [given.get(name) or "" for name in names]),)


def _joined_there(delimiter: str, *names: str, escapes: bool = False) -> Builder:
    def build(given: Mapping[str, Any]) -> tuple[Any, ...]:
        between = given[delimiter].replace("\\n", "\n") if escapes else given[delimiter]
        return (joined(between, _there(given, names)),)

    return build


def _joined_many(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The first texts, as many as the node counts, without empty ones behind the first. Raises NodeUnsupported for a
    list."""
    if given["return_list"]:
        raise NodeUnsupported("return_list: found true, expected false: the pool has no lists of texts")
    first, *others = (given.get(f"string_{place}") or "" for place in range(1, given["inputcount"] + 1))
    return (joined(given["delimiter"], [first, *(each for each in others if each)]),)


def _replaced_each(source: str, pairs: tuple[tuple[str, str], ...], *more: str) -> Builder:
    """Return what replaces some parts of a text, one after the other; empty ones are not looked for."""

    def build(given: Mapping[str, Any]) -> tuple[Any, ...]:
        found = given[source]
        for find, new in pairs:
            if given[find]:
                found = replaced(found, given[find], given[new])
        return (found, *more)

    return build


def _replaced_or_searched(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A text with a part replaced, or the matches of a regular expression."""
    if not given["use_regex"]:
        return (replaced(given["string"], given["old"], given["new"]),)
    return (regex_replaced(given["string"], given["old"], given["new"]),)


def _text_function(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Texts one behind the other, or a text with a part replaced; tidied, without spaces and commas in a row."""
    is_tidy, others = given["tidy_tags"] == "yes", (given.get("text_b") or "", given.get("text_c") or "")
    if given["action"] == "append":
        parts = [part for part in (given["text_a"], *others) if part]
        found = joined(", " if is_tidy else "", parts)
    elif len(others[0]) > 1 and others[0].startswith("/") and others[0].endswith("/"):
        found = regex_replaced(given["text_a"], others[0][1:-1], others[1])
    else:
        found = replaced(given["text_a"], others[0], others[1]) if others[0] else given["text_a"]
    if is_tidy:
        for pattern, new in _UNTIDY:
            found = pattern.sub(new, found)
        found = found.strip()
    return (found,)


def _without_repeated_tags(given: Mapping[str, Any]) -> tuple[Any, ...]:
    tags = (tag.strip() for tag in given["text"].split(","))
    return (joined(", ", list(dict.fromkeys(tag for tag in tags if tag))),)


def _changed(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A text in another case, turned round, or with blanks taken away."""
    changes: Mapping[str, Callable[[str], str]] = {
        "uppercase": str.upper,
        "lowercase": str.lower,
        "capitalize": str.capitalize,
        "invert_case": str.swapcase,
        "reverse": lambda found: found[::-1],
        "trim": str.strip,
        "remove_spaces": lambda found: found.replace(" ", ""),
    }
    found = changes[given["operation"]](given["text"])
    need_room(len(found))
    return found, ""


def _styled(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Both texts: only the style that changes nothing is known. Raises NodeUnsupported."""
    if given["style"].lower() not in _NO_STYLES:
        raise NodeUnsupported(
            f"style: found {given['style'][:100]!r}, expected base: styles are files of a server, which the pool does "
            "not have; write the style in the text"
        )
    return given["text_positive"], given["text_negative"]


def _listed_text(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """One of the texts of a list, a line each, or each behind "#": their number is counted on over the end."""
    whole_text = given["strings"]
    parts = whole_text.split("\n")
    if given["multiline"]:
        parts, current = [], None
        for line in whole_text.split("\n"):
            if line.startswith("#"):
                parts += [] if current is None else ["\n".join(current)]
                current = [line[1:]]
            elif current is not None:
                current.append(line)
        parts += [] if current is None else ["\n".join(current)]
        parts = [part.strip() for part in parts]
    return (parts[given["select"] % len(parts)] if parts else "",)


def _three_ways(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Three texts, each two of them, and all of them, with a delimiter between those that are there."""
    between = given["delimiter"].replace("\\n", "\n")
    one, two, three = (given[f"text{place}"] for place in (1, 2, 3))
    pairs = ((one, two), (one, three), (two, three), (one, two, three))
    return one, two, three, *(joined(between, [part for part in each if part]) for each in pairs)


def _with_fixes(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """What Python shows of a value, between two texts."""
    value = given["input"]
    if not isinstance(value, str | bool | int | float):
        raise NodeUnsupported("input: expected a text, a number or a truth value")
    return (joined("", [given["prefix"], str(value), given["suffix"]]),)


def has_choices(whole_text: str) -> bool:
    """Whether a text has alternatives, or names of lists of them, of which a seed chooses."""
    return _CHOICES.search(whole_text) is not None


def _without_choices(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A text, twice, if nothing is chosen in it. Raises NodeUnsupported."""
    found = given["text"]
    if has_choices(found):
        raise NodeUnsupported("text: found choices, expected the text that was chosen: choices of a seed differ from "
                              "program to program")  # fmt: skip
    if "<lora:" in found:
        raise NodeUnsupported("text: found a LoRA, expected LoRAs in a stack, or in a loader")
    if given["multiline_mode"] and len(found.splitlines()) > 1:
        raise NodeUnsupported("multiline_mode: found true with several lines, expected false: the pool has no lists")
    return found, found


def _populated(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The text that the editor has made from the one with choices; if that has none, they are the same. Raises
    NodeUnsupported for a choice that is still to be made."""
    made, template = given["populated_text"], given["wildcard_text"]
    if given["mode"] in ("populate", "True", "true") and has_choices(template):
        raise NodeUnsupported(
            "mode: found populate with choices in wildcard_text, expected fixed: choices of a seed differ from program "
            "to program; populated_text has the text that was chosen, or write {a|b} in a text of the pool's requests"
        )
    return (template if given["mode"] in ("populate", "True", "true") else made,)


def _boxed(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The text that is linked, if there is one, else its own."""
    return (given.get("passthrough") or given["text"],)


def _as_text(name: str, *more: str) -> Builder:
    return lambda given: (str(given[name]), *more)


def _length(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return len(given["text"]), ""


def _is_in(given: Mapping[str, Any]) -> tuple[Any, ...]:
    has = given["sub_string"] in given["text"]
    return has is (given["condition"] == "include"), given["text"]


_TEXTS = tuple(f"string_{place}" for place in range(1, _MOST_JOINED + 1))
_FOUR = tuple(f"text_{place}" for place in range(1, 5))
_TWO_OR_MORE = tuple(text(name, "", False) for name in _FOUR)
_KJ = (
    row(
        "JoinStrings",
        (text("delimiter", " "), text("string1", "", False), text("string2", "", False)),
        _joined_by("delimiter", "string1", "string2"),
        "STRING",
    ),
    row(
        "JoinStringMulti",
        (
            whole("inputcount", 2, 2, _MOST_JOINED),
            text("delimiter", " "),
            flag("return_list"),
            *(NodeInput(name, "STRING", is_required=False) for name in _TEXTS),
        ),
        _joined_many,
        "STRING",
    ),
    row(
        "SomethingToString",
        (link("input", ANY), text("prefix", "", False), text("suffix", "", False)),
        _with_fixes,
        "STRING",
    ),
)
_WAS = (
    row("Text to String", (text("text"),), passed("text"), "STRING"),
    row("String to Text", (text("string"),), passed("string"), "STRING"),
)
_COMFYROLL = (
    row("CR Text", (text("text"),), _helped("text"), "STRING", "STRING"),
    row("CR Multiline Text", (text("text"),), _helped("text"), "STRING", "STRING"),
    row("CR Prompt Text", (text("prompt"),), _helped("prompt"), "STRING", "STRING"),
    row("CR Integer To String", (whole("int_", 0, -(2**63), 2**64 - 1),), _as_text("int_", ""), "STRING", "STRING"),
    row("CR Float To String", (number("float_", 0.0, -1e18, 1e18),), _as_text("float_", ""), "STRING", "STRING"),
    row(
        "CR Combine Prompt",
        (*(text(f"part{place}", "", False) for place in range(1, 5)), text("separator", ",")),
        lambda given: (*_joined_by("separator", *(f"part{place}" for place in range(1, 5)))(given), ""),
        "STRING",
        "STRING",
    ),
    row(
        "CR Text Concatenate",
        (text("text1", "", False), text("text2", "", False), text("separator", "", False)),
        lambda given: (*_joined_by("separator", "text1", "text2")(given), ""),
        "STRING",
        "STRING",
    ),
    row(
        "CR Text Replace",
        (
            text("text"),
            *(
                each
                for place in range(1, 4)
                for each in (text(f"find{place}", "", False), text(f"replace{place}", "", False))
            ),
        ),
        _replaced_each("text", tuple((f"find{place}", f"replace{place}") for place in range(1, 4)), ""),
        "STRING",
        "STRING",
    ),
    row(
        "CR Text Operation",
        (
            text("text"),
            combo(
                "operation",
                ("uppercase", "lowercase", "capitalize", "invert_case", "reverse", "trim", "remove_spaces"),
            ),
        ),
        _changed,
        "STRING",
        "STRING",
    ),
    row("CR Text Length", (text("text"),), _length, "INT", "STRING"),
)
_EASY = (
    row("easy positive", (text("positive"),), passed("positive"), "STRING"),
    row("easy negative", (text("negative"),), passed("negative"), "STRING"),
    row(
        "easy promptConcat",
        (text("prompt1", "", False), text("prompt2", "", False), text("separator", "", False)),
        _joined_by("separator", "prompt1", "prompt2"),
        "STRING",
    ),
    row(
        "easy promptReplace",
        (
            text("prompt"),
            *(
                each
                for place in range(1, 4)
                for each in (text(f"find{place}", "", False), text(f"replace{place}", "", False))
            ),
        ),
        _replaced_each("prompt", tuple((f"find{place}", f"replace{place}") for place in range(1, 4))),
        "STRING",
    ),
)
_LAYERS = (
    row("LayerUtility: String", (text("string"),), passed("string"), "STRING"),
    row("LayerUtility: TextBox", (text("text"),), passed("text"), "STRING"),
    row(
        "LayerUtility: TextJoin",
        (text("text_1"), *_TWO_OR_MORE[1:]),
        lambda given: (joined("", [given.get(name) or "" for name in _FOUR]),),
        "STRING",
    ),
    row(
        "LayerUtility: StringCondition",
        (text("text"), combo("condition", ("include", "exclude")), text("sub_string")),
        _is_in,
        "BOOLEAN",
        "STRING",
    ),
)
_TINYTERRA = (
    row("ttN text", (text("text"),), passed("text"), "STRING"),
    row(
        "ttN concat",
        (*(text(f"text{place}", "", False) for place in (1, 2, 3)), text("delimiter", ",", False)),
        _joined_there("delimiter", "text1", "text2", "text3", escapes=True),
        "STRING",
    ),
    row(
        "ttN text3BOX_3WAYconcat",
        (*(text(f"text{place}", "", False) for place in (1, 2, 3)), text("delimiter", ",", False)),
        _three_ways,
        *["STRING"] * 7,
    ),
)
_OTHERS = (
    row(
        "String Replace (mtb)",
        (text("string"), text("old"), text("new"), flag("use_regex", False, is_required=False)),
        _replaced_or_searched,
        "STRING",
    ),
    row(
        "StringFunction|pysssss",
        (
            combo("action", ("append", "replace")),
            combo("tidy_tags", ("yes", "no")),
            *(text(name, "", False) for name in ("text_a", "text_b", "text_c")),
        ),
        _text_function,
        "STRING",
    ),
    row("RemoveDuplicateTags|LP", (text("text"),), _without_repeated_tags, "STRING"),
    row("DF_Text", (text("Text"),), passed("Text"), "STRING"),
    row("DF_Text_Box", (text("Text"),), passed("Text"), "STRING"),
    row("Textbox", (text("text"), text("passthrough", "", False)), _boxed, "STRING"),
    *(row(f"String{ending}", (text("String"),), passed("String"), "STRING") for ending in ("", "-\U0001f52c")),
    row(
        "easy wildcards",
        (
            text("text"),
            *(text(f"Select to add {what}", "", False) for what in ("LoRA", "Wildcard")),
            whole("seed", 0, 0, MAX_SEED),
            flag("multiline_mode", is_required=False),
        ),
        _without_choices,
        *("STRING", "STRING"),
    ),
    row("floatToText _O", (number("float", 0.0, -1e18, 1e18),), _as_text("float"), "STRING"),
    row(
        "Concat Text _O",
        (text("text1"), text("text2"), text("separator", ",", False)),
        lambda given: (given["separator"].join((given["text1"], given["text2"])),),
        "STRING",
    ),
    row("Text box", (text("text"),), passed("text"), "STRING"),
    row(
        "PromptBuilder //Inspire",
        (text("category", "", False), text("preset", "#PRESET", False), text("text")),
        passed("text"),
        "STRING",
    ),
    row("PreviewTextNode", (text("text"),), passed("text"), "STRING"),
    row("DisplayText_Zho", (text("text"),), passed("text"), "STRING"),
    row(
        "ttN textDebug",
        (
            flag("print_to_console", True, False),
            text("console_title", "", False),
            text("execute", "Always", False),
            text("text"),
        ),
        passed("text"),
        "STRING",
    ),
    row("Boolean To Text", (flag("boolean"),), _as_text("boolean"), "STRING"),
    row("easy loraNames", (text("lora_name", choices=LORAS),), passed("lora_name"), ANY),
    row("Primitive string [Crystools]", (text("string"),), passed("string"), "STRING"),
    row("Primitive string multiline [Crystools]", (text("string"),), passed("string"), "STRING"),
    row(
        "SDXLPromptStyler",
        (text("text_positive"), text("text_negative"), text("style", "base"), text("log_prompt", "No", False)),
        _styled,
        "STRING",
        "STRING",
    ),
    row(
        "ImpactStringSelector",
        (text("strings"), flag("multiline"), whole("select", 0, 0, MAX_SEED)),
        _listed_text,
        "STRING",
    ),
    row(
        "ImpactWildcardProcessor",
        (
            text("wildcard_text"),
            text("populated_text", "", False),
            text("mode", "populate"),
            whole("seed", 0, 0, MAX_SEED),
            text("Select to add Wildcard", "", False),
        ),
        _populated,
        "STRING",
    ),
)
PACK_TEXTS = (*_KJ, *_WAS, *_COMFYROLL, *_EASY, *_LAYERS, *_TINYTERRA, *_OTHERS)
#: steps of those that search with regular expressions, besides reading their texts
PACK_SEARCH_STEPS: Mapping[str, Callable[[Mapping[str, Any]], int]] = MappingProxyType(
    {
        "String Replace (mtb)": lambda given: steps_of(given, "string", "old", "new") if given["use_regex"] else 0,
        "StringFunction|pysssss": lambda given: steps_of(
            {**given, "text_b": (given.get("text_b") or "")[1:-1]}, "text_a", "text_b", "text_c"
        ),
    }
)
