"""What a recipe records: dataclasses with fields that say how they are written, and what they mean for the digest.

A field that is marked with `LATER` was added after the first version of its class: it is left out while it has its
default, so that adding a field changes no existing recipe and no digest. Values only.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, get_args, get_origin, get_type_hints

from modelpool.pool.values.core.errors import unknown_name

#: marks of fields; `A | B` has both
LATER: Mapping[str, bool] = {"is_later": True}
#: always written, and left out of the digest while it has its default
LATER_IN_DIGEST: Mapping[str, bool] = {"is_later_in_digest": True}
#: never part of the digest: how and where the output was computed, and names of files with recorded hashes
INFORMATIVE: Mapping[str, bool] = {"is_informative": True}
#: never written: for who asked for the output, and not known of one that exists
NOT_WRITTEN: Mapping[str, bool] = {"is_not_written": True, **INFORMATIVE}
#: name of a file with a recorded hash; it may end with a commit of the hub. Other commits may have the same file, so
#: the digest leaves the commit out
FILE_NAME: Mapping[str, bool] = {"is_file_name": True}
#: mark with the name of a field in JSON, where it has another one there
JSON_NAME = "json_name"
_COMMIT = re.compile(r"@[0-9a-f]{40}$")

#: reads the value of a field from JSON; the second argument is its place in the recipe, for messages
_Reader = Callable[[Any, str], Any]


def as_json(part: Any) -> dict[str, Any]:
    """Return the fields of a recorded dataclass as values of JSON, with tuples for lists."""
    found = {}
    for each in dataclasses.fields(part):
        value = getattr(part, each.name)
        if each.metadata.get("is_not_written"):
            continue
        if not (each.metadata.get("is_later") and _is_default(each, value)):
            found[_json_name(each)] = _plain(value, as_json)
    return found


def determining(part: Any) -> dict[str, Any]:
    """Return the fields of a recorded dataclass that determine the output."""
    found = {}
    for each in dataclasses.fields(part):
        value, marks = getattr(part, each.name), each.metadata
        is_later = marks.get("is_later") or marks.get("is_later_in_digest")
        if marks.get("is_informative") or (is_later and _is_default(each, value)):
            continue
        found[_json_name(each)] = _COMMIT.sub("", value) if marks.get("is_file_name") else _plain(value, determining)
    return found


def from_json(kind: Any, fields: Mapping[str, Any], place: str = "") -> Any:
    """Invert `as_json` for values of the right types; nothing is converted. Raises UnknownName for a field that `kind`
    does not have, named with its `place`."""
    check_names(kind, fields, place)
    readers = _readers(kind)
    given = ((each.name, _json_name(each)) for each in dataclasses.fields(kind) if _json_name(each) in fields)
    return kind(**{name: readers[name](fields[key], f"{place}{key}.") for name, key in given})


def check_names(kind: type[Any], fields: Mapping[str, Any], place: str = "") -> None:
    """Raise UnknownName for a field that `kind` does not have."""
    written = [each for each in dataclasses.fields(kind) if not each.metadata.get("is_not_written")]
    known = [_json_name(each) for each in written]
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise unknown_name("field of a recipe", place + unknown[0], [place + name for name in known])


def _json_name(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata.get(JSON_NAME, field.name))


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return bool(value == field.default)


def _plain(value: Any, convert: Callable[[Any], dict[str, Any]]) -> Any:
    if dataclasses.is_dataclass(value):
        return convert(value)
    if isinstance(value, tuple | list):
        return type(value)(_plain(each, convert) for each in value)
    if isinstance(value, Mapping):
        return {name: _plain(each, convert) for name, each in value.items()}
    return value


@lru_cache(maxsize=32)
def _readers(kind: Any) -> Mapping[str, _Reader]:
    """Return what reads each field of `kind`."""
    return {name: _reader(hint) for name, hint in get_type_hints(kind).items()}


def _reader(hint: Any) -> _Reader:
    parts: list[Any] = [each for each in (hint, *get_args(hint)) if dataclasses.is_dataclass(each)]
    if not parts:
        return lambda value, place: _without_lists(value)
    kind = parts[0]
    if get_origin(hint) is tuple:
        return lambda values, place: tuple(from_json(kind, each, place) for each in values)
    return lambda value, place: None if value is None else from_json(kind, value, place)


def _without_lists(value: Any) -> Any:
    """Return values of JSON with tuples for lists."""
    if isinstance(value, list | tuple):
        return tuple(_without_lists(each) for each in value)
    if isinstance(value, Mapping):
        return {name: _without_lists(each) for name, each in value.items()}
    return value
