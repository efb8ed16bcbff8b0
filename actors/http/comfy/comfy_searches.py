"""Searches texts with regular expressions in bounded time, for nodes of texts. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from modelpool.actors.http.comfy.comfy_node_types import NodeUnsupported
from modelpool.actors.http.comfy.comfy_utility_nodes import need_room
from modelpool.pool.values.core.errors import counted

#: characters of a regular expression, and steps of a search
_MOST_PATTERN, _MOST_SEARCH_STEPS = 200, 10**7
#: parts of a template times the matches that it replaces; a part may be an empty group
_MOST_PARTS = 10**6
#: an escape of a template: of a group by its name or number, or else of a character; three octal digits are one
_ESCAPE = re.compile(r"\\(?:g<([^>]*)>|(?![0-7]{3})([1-9][0-9]?)|.)", re.DOTALL)
#: repetitions; repetitions of a group, references, conditions, and flags, which change what a space is
_REPETITION = re.compile(r"[*+?{]")
_UNBOUNDED = re.compile(r"\)[*+?{]|\\[1-9]|\(\?P=|\(\?(?![:=!]|<[=!]|P<)")
#: flags for the whole of a regular expression, which do not change what a space is
_FLAGS_FIRST = re.compile(r"\(\?([ims]+)\)")
_INLINE = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL}


def joined(delimiter: str, parts: list[str]) -> str:
    """Return texts one behind the other. Raises NodeUnsupported for too many characters."""
    need_room(sum(map(len, parts)) + len(delimiter) * max(0, len(parts) - 1))
    return delimiter.join(parts)


def replaced(whole_text: str, find: str, new: str) -> str:
    """Return a text with a part replaced. Raises NodeUnsupported for too many characters."""
    need_room(len(whole_text) + whole_text.count(find) * (len(new) - len(find)))
    return whole_text.replace(find, new)


def regex_replaced(whole_text: str, pattern: str, new: str) -> str:
    """Return a text with all matches of a regular expression replaced. Raises NodeUnsupported as the node does."""
    flags = dict.fromkeys(("case_insensitive", "multiline", "dotall"), False)
    given = {"string": whole_text, "regex_pattern": pattern, "replace": new, "count": 0, **flags}
    found: str = regex_replacement(given)[0]
    return found


def steps_of(given: Mapping[str, Any], source: str, pattern: str, new: str) -> int:
    """Return the steps of a search with these inputs of a node."""
    names = {"string": source, "regex_pattern": pattern, "replace": new}
    return regex_steps({name: given.get(each) or "" for name, each in names.items()})


def _search_steps(pattern: str, characters: int) -> int:
    """Return about how many steps a search takes: with n repetitions and k alternatives, none of a group repeated and
    without references, characters ** (n + 1) * 2 ** k."""
    return int(max(characters, 2) ** (1 + len(_REPETITION.findall(pattern))) * 2 ** pattern.count("|"))


def regex_steps(given: Mapping[str, Any]) -> int:
    """Return the steps of a search that is not refused, and of the parts that take the place of matches."""
    pattern, characters = _without_flags(given["regex_pattern"])[0], len(given["string"])
    if len(pattern) > _MOST_PATTERN or (steps := _search_steps(pattern, characters)) > _MOST_SEARCH_STEPS:
        return 0
    return steps + min(_MOST_PARTS, (characters + 1) * (len(given.get("replace", "")) + 1))


def _without_flags(pattern: str) -> tuple[str, int]:
    """Return a pattern without the flags for the whole of it at its beginning, and these flags."""
    first = _FLAGS_FIRST.match(pattern)
    if first is None:
        return pattern, 0
    return pattern[first.end() :], sum(_INLINE[flag] for flag in set(first[1]))


def _pattern(given: Mapping[str, Any]) -> re.Pattern[str]:
    """Return a pattern that takes no time without end. Raises NodeUnsupported."""
    whole_pattern, characters = given["regex_pattern"], len(given["string"])
    pattern, inline = _without_flags(whole_pattern)
    repetitions, alternatives = len(_REPETITION.findall(pattern)), pattern.count("|")
    steps = _search_steps(pattern, characters) if len(pattern) <= _MOST_PATTERN else 0
    if len(pattern) > _MOST_PATTERN or _UNBOUNDED.search(pattern) or steps > _MOST_SEARCH_STEPS:
        raise NodeUnsupported(
            f"regex_pattern: found {whole_pattern[:100]!r} with {counted(repetitions, 'repetition')} and "
            f"{counted(alternatives, 'alternative')} for {counted(characters, 'character')}; expected up to "
            f"{_MOST_PATTERN} characters, no repetition of a group, no reference, no flags, and characters to the "
            f"power of repetitions + 1, times 2 for each alternative, up to {_MOST_SEARCH_STEPS}"
        )
    names = (("case_insensitive", re.IGNORECASE), ("multiline", re.MULTILINE), ("dotall", re.DOTALL))
    try:
        return re.compile(pattern, inline | sum(flag for name, flag in names if given[name]))
    except (re.error, RecursionError, OverflowError):
        raise NodeUnsupported(f"regex_pattern: found {pattern[:100]!r}, expected a regular expression") from None


def regex_replacement(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A text in which matches are replaced, as `re.sub` does, but with no more text than there is room for."""
    whole_text, new = given["string"], given["replace"]
    need_room(len(whole_text))
    need_room(len(new))
    pattern = _pattern(given)
    parts = _template_parts(pattern, new)
    found: list[str] = []
    end = characters = steps = 0
    for match in itertools.islice(pattern.finditer(whole_text), given["count"] or None):
        steps += len(parts)
        if steps > _MOST_PARTS:
            raise NodeUnsupported(f"replace: expected up to {_MOST_PARTS} parts of its template in all matches")
        before, end = whole_text[end : match.start()], match.end()
        for part in (before, *(each if isinstance(each, str) else match[each[0]] or "" for each in parts)):
            characters += len(part)
            need_room(characters)
            found.append(part)
    need_room(characters + len(whole_text) - end)
    return ("".join((*found, whole_text[end:])),)


def _template_parts(pattern: re.Pattern[str], template: str) -> list[str | tuple[str | int]]:
    """Return the texts of a template, and between them its groups. Raises NodeUnsupported for a wrong template."""
    try:
        pattern.sub(template, "")  # reads the whole template, also if nothing matches
        empty = re.compile("").match("")
        assert empty is not None, "an empty pattern matches"
        parts: list[str | tuple[str | int]] = []
        end = 0
        for escape in _ESCAPE.finditer(template):
            name, place = escape.groups()
            if name is None and place is None:
                continue
            parts.append(empty.expand(template[end : escape.start()]))
            parts.append((name if name is not None and name.isidentifier() else int(name or place),))
            end = escape.end()
        return [part for part in (*parts, empty.expand(template[end:])) if part]
    except (re.error, IndexError):
        raise NodeUnsupported(f"replace: found {template[:100]!r}, expected a template") from None


def regex_matched(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (_pattern(given).search(given["string"]) is not None,)


def regex_extracted(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The first match, or one of its groups, or of each match the whole or a group, one a line; "" for none. Of all
    matches with groups, the first group stands for the whole."""
    pattern, mode, group = _pattern(given), given["mode"], given["group_index"]
    first = pattern.search(given["string"])
    if first is None or (group > pattern.groups and mode.endswith(("Group", "Groups"))):
        return ("",)
    if mode == "First Match":
        return (first[0],)
    if mode == "First Group":
        return (first[group] or "",)
    if mode == "All Groups" and not pattern.groups:
        return ("",)
    wanted = group if mode == "All Groups" else min(pattern.groups, 1)
    found = [match[wanted] or "" for match in pattern.finditer(given["string"])]
    return (joined("\n", found),)
