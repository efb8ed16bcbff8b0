"""Converts values of the scheduler to JSON and back without loss: dataclasses, enums, tuples and plain values.

Rules
1. A value that is read equals the written one, floats to the last bit.
2. A field with its default is left out when written, to keep lines short; `in_full` leaves nothing out.
3. Reading checks every field against its type. Errors name the field, what was found and what was expected.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from modelpool.pool.values.core.errors import UnknownName, missing_value, unknown_name, unusable_field
from modelpool.pool.weights.plan.eviction_plan import Residency

#: JSON value and its place in the line, for errors -> value
Reader: TypeAlias = Callable[[Any, str], Any]
_PLAIN = (str, int, bool, type(None))
#: names that modules import for type checkers only
_NAMES = {"Residency": Residency}


def plain(value: Any) -> Any:
    """Return `value` as JSON values; fields with their defaults are left out."""
    kind: Any = type(value)
    if kind in _PLAIN or kind is float:
        return value
    if kind is tuple:
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    written: dict[str, Any] = {}
    for name, default in _fields(kind):
        item = getattr(value, name)
        if not _is_default(item, default):
            written[name] = plain(item)
    return written


def in_full(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance as JSON values, including defaults."""
    return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


def named(value: Any) -> dict[str, Any]:
    """Return a dataclass instance under the name of its class, for places that allow several classes."""
    return {type(value).__name__: plain(value)}


def read(kind: Any, found: Any, place: str = "") -> Any:
    """Return the value of type `kind` that `plain` or `in_full` wrote. Raises UnusableField and UnknownName."""
    return _reader(kind)(found, place)


def read_named(kinds: Mapping[str, Any], found: Any, place: str) -> Any:
    """Return the value that `named` wrote, of one of these classes. Raises UnusableField and UnknownName."""
    if not isinstance(found, dict) or len(found) != 1:
        raise unusable_field(place, found, "an object with one key, the name of its class")
    ((name, fields),) = found.items()
    if name not in kinds:
        raise UnknownName(f"{place}: {unknown_name('kind', name, kinds)}")
    return read(kinds[name], fields, f"{place}.{name}")


def one_line(value: Any) -> str:
    """Return JSON without blanks, and a line end."""
    return json.dumps(value, separators=(",", ":")) + "\n"


def _is_default(item: Any, default: Any) -> bool:
    if item is default:
        return True
    if type(item) is not type(default):
        return False
    if type(item) is float:
        return repr(item) == repr(default)  # 0.0 and -0.0 are equal, and two values
    if type(item) is tuple:
        return len(item) == len(default) and all(map(_is_default, item, default))
    if not bool(item == default):
        return False
    # values from another process are not the same objects; numbers in them may be equal and two values, as above
    return type(item) in _PLAIN or (dataclasses.is_dataclass(item) and repr(item) == repr(default))


@cache
def _fields(kind: Any) -> tuple[tuple[str, Any], ...]:
    assert dataclasses.is_dataclass(kind), f"{kind.__name__} is not a writable value"
    defaults = _defaults(kind)
    return tuple((field.name, defaults.get(field.name, dataclasses.MISSING)) for field in dataclasses.fields(kind))


def _defaults(kind: Any) -> dict[str, Any]:
    """Default values of fields. Of a class with a constructor of the build (setup.py), which alone has them, they are
    read from the source."""
    found = {field.name: field.default for field in dataclasses.fields(kind)}
    if not kind.__dataclass_params__.init:
        names = vars(sys.modules[kind.__module__])
        values = {ast.unparse(node.target): node.value for node in _source_fields(kind) if node.value is not None}
        found |= {name: eval(ast.unparse(values[name]), names) for name in found if name in values}
        found = {name: one.default if isinstance(one, dataclasses.Field) else one for name, one in found.items()}
    return {name: default for name, default in found.items() if default is not dataclasses.MISSING}


@cache
def _reader(kind: Any) -> Reader:
    if isinstance(kind, typing.NewType):
        return _reader(kind.__supertype__)
    if kind is float:
        return _checked((int, float), "a number")
    if kind in _PLAIN:
        return _checked((kind,), {str: "a text", int: "a whole number", bool: "true or false"}.get(kind, "null"))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum_reader(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _dataclass_reader(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Final:
        return _reader(arguments[0])
    if origin is tuple:
        if arguments[1:] == (Ellipsis,):
            return _tuple_reader(_reader(arguments[0]))
        return _fixed_tuple_reader([_reader(argument) for argument in arguments])
    assert origin in (types.UnionType, typing.Union), f"{kind} is not a readable type"
    (some,) = (argument for argument in arguments if argument is not type(None))
    return _optional_reader(_reader(some))


def _checked(kinds: tuple[type, ...], expected: str) -> Reader:
    def read_plain(found: Any, place: str) -> Any:
        if type(found) not in kinds:
            raise unusable_field(place, found, expected)
        return found

    return read_plain


def _enum_reader(kind: type[Enum]) -> Reader:
    members = {member.value: member for member in kind}

    def read_enum(found: Any, place: str) -> Any:
        if not isinstance(found, str) or found not in members:
            raise unusable_field(place, found, f"one of {', '.join(map(str, members))}")
        return members[found]

    return read_enum


def _tuple_reader(read_item: Reader) -> Reader:
    def read_tuple(found: Any, place: str) -> Any:
        if not isinstance(found, list):
            raise unusable_field(place, found, "a list")
        return tuple([read_item(item, f"{place}[{index}]") for index, item in enumerate(found)])

    return read_tuple


def _fixed_tuple_reader(readers: list[Reader]) -> Reader:
    def read_fixed(found: Any, place: str) -> Any:
        if not isinstance(found, list) or len(found) != len(readers):
            raise unusable_field(place, found, f"a list of {len(readers)}")
        return tuple([readers[index](item, f"{place}[{index}]") for index, item in enumerate(found)])

    return read_fixed


def _optional_reader(read_some: Reader) -> Reader:
    return lambda found, place: None if found is None else read_some(found, place)


def _hints(kind: type[Any]) -> dict[str, Any]:
    """The types of its fields. A compiled class no longer knows the element types of its tuples: they are read from its
    source."""
    module = sys.modules[kind.__module__]
    if str(module.__file__).endswith(".py"):
        return typing.get_type_hints(kind, localns=_NAMES)
    return {ast.unparse(node.target): eval(ast.unparse(node.annotation), vars(module)) for node in _source_fields(kind)}


def _source_fields(kind: type[Any]) -> list[ast.AnnAssign]:
    """The fields of a class in its source, which is installed with the compiled module."""
    package, _, name = kind.__module__.rpartition(".")
    source = Path(sys.modules[package].__path__[0], f"{name}.py").read_text(encoding="utf-8")
    (class_node,) = (
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    return [node for node in class_node.body if isinstance(node, ast.AnnAssign)]


def _dataclass_reader(kind: type[Any]) -> Reader:
    hints = _hints(kind)
    fields, defaults = dataclasses.fields(kind), _defaults(kind)
    readers = {field.name: _reader(hints[field.name]) for field in fields}
    needed = [f.name for f in fields if f.name not in defaults and f.default_factory is dataclasses.MISSING]

    def read_dataclass(found: Any, place: str) -> Any:
        if not isinstance(found, dict):
            raise unusable_field(place, found, f"an object, the fields of {kind.__name__}")
        for name in found:
            if name not in readers:
                raise UnknownName(f"{place}: {unknown_name(f'field of {kind.__name__}', name, readers)}")
        for name in needed:
            if name not in found:
                raise missing_value(f"{place}.{name}", "a value; this field is required")
        return kind(**{name: readers[name](item, f"{place}.{name}") for name, item in found.items()})

    return read_dataclass
