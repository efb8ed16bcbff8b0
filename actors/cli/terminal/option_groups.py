"""Gives commands groups of options: a parameter of a command with a group as type becomes one option for each field of
the group."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints


class OptionGroup:
    """Base of the dataclasses that are groups. A field is annotated as the parameter of a command would be."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Without:
    """Annotates the group of a command that lacks some of its options; these fields keep their defaults."""

    fields: frozenset[str]

    @classmethod
    def of(cls, *fields: str) -> Without:
        """Return the annotation for a group without these fields."""
        return cls(frozenset(fields))


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a command with a group as type by the options of the group, in the order of its
    fields. The command is called with the groups."""
    own = inspect.signature(command, eval_str=True)
    groups = {
        name: (group, _options(group, without))
        for name, parameter in own.parameters.items()
        for group, without in _group_of(parameter.annotation)
    }

    @functools.wraps(command)
    def call(**given: Any) -> None:
        for name, (group, parameters) in groups.items():
            given[name] = group(**{each.name: given.pop(each.name) for each in parameters})
        command(**given)

    parameters: list[inspect.Parameter] = []
    for name, parameter in own.parameters.items():
        found = groups[name][1] if name in groups else (parameter,)
        parameters += [each.replace(kind=parameter.kind) for each in found]
    call.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # read by typer
    return call


def _group_of(annotation: Any) -> Iterator[tuple[type[Any], frozenset[str]]]:
    """Yield the group that a parameter with this annotation is, and the fields that it lacks; nothing for others."""
    kind, *notes = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    if isinstance(kind, type) and issubclass(kind, OptionGroup):
        yield kind, frozenset().union(*(note.fields for note in notes if isinstance(note, Without)))


def _options(group: type[Any], without: frozenset[str]) -> tuple[inspect.Parameter, ...]:
    fields = {field.name: field.default for field in dataclasses.fields(group)}
    assert without <= fields.keys(), f"{group.__name__} has no fields {sorted(without - fields.keys())}"
    hints = get_type_hints(group, include_extras=True)
    return tuple(
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
        for name, default in fields.items()
        if name not in without
    )
