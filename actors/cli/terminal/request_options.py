"""Gives commands the options of request fields, from the table of fields (`actors.request.field_table`)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

import typer

from modelpool.actors.request.field_table import REQUEST_FIELDS, Option, OptionKind

#: the types that typer converts words to
_TYPES: Mapping[OptionKind, Any] = MappingProxyType(
    {"text": str | None, "whole": int | None, "number": float | None, "texts": list[str] | None, "switch": bool}
)
#: the fields of a request that were set
Fields: TypeAlias = Mapping[str, Any]
NO_FIELDS: Fields = MappingProxyType({})
_FIELDS = "fields"
#: the fields that do not change an output
SCHEDULING_FIELDS = ("priority", "user", "deadline")
#: fields with options that a command defines itself
_OF_COMMAND = ("model", "seed")


def with_request_options(names: Iterable[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces the parameter `fields` of a command by the options of these request fields, or
    of all except model and seed. The command is called with the fields that were set."""
    wanted = tuple(names) or tuple(name for name in REQUEST_FIELDS if name not in _OF_COMMAND)
    chosen = {
        option.parameter: (name, option) for name in wanted if (option := REQUEST_FIELDS[name].option) is not None
    }

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def call(**given: Any) -> None:
            set_fields: dict[str, Any] = {}
            for parameter, (name, option) in chosen.items():
                value = given.pop(parameter)
                if value is not None and value is not False and value != []:
                    set_fields |= {name: value} if option.sets is None else option.sets(value)
            command(**given, fields=set_fields)

        own = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            parameters += _parameters(chosen) if parameter.name == _FIELDS else [parameter]
        call.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # read by typer
        return call

    return decorated


def option_of(field: str) -> Any:
    """Return the annotation of a parameter of a command that is this field's option."""
    option = REQUEST_FIELDS[field].option
    assert option is not None, f"{field} has no option"
    return Annotated[_TYPES[option.kind], _typer_option(option)]


def _parameters(chosen: Mapping[str, tuple[str, Option]]) -> Iterator[inspect.Parameter]:
    for name, (field, option) in chosen.items():
        default = False if option.kind == "switch" else None
        yield inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=option_of(field)
        )


def _typer_option(option: Option) -> Any:
    return typer.Option(
        option.flag, help=option.help, rich_help_panel=option.panel, show_default=False, metavar=option.metavar
    )
