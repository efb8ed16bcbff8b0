"""A group of options is the options of its fields on the command line, and one value in the command."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from modelpool.actors.cli.terminal.option_groups import OptionGroup, Without, with_option_groups
from modelpool.actors.cli.terminal.request_options import NO_FIELDS, Fields, with_request_options

Size = Annotated[int | None, typer.Option("--size")]
Fast = Annotated[bool, typer.Option("--fast")]
Place = Annotated[str | None, typer.Option("--place")]


@dataclass(frozen=True, slots=True)
class Settings(OptionGroup):
    size: Size = None
    fast: Fast = False
    place: Place = None


def called(command: Any, *arguments: str) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, arguments)


def test_a_command_gets_its_group_as_one_value() -> None:
    got: list[object] = []

    @with_option_groups
    def command(first: str = "", *, settings: Settings, last: Annotated[int, typer.Option("--last")] = 0) -> None:
        got.append((first, settings, last))

    assert list(inspect.signature(command).parameters) == ["first", "size", "fast", "place", "last"]
    assert called(command).exit_code == 0
    assert called(command, "--first", "x", "--size", "3", "--fast", "--last", "7").exit_code == 0
    assert got == [("", Settings(), 0), ("x", Settings(3, True), 7)]


def test_a_command_without_some_options_refuses_them() -> None:
    got: list[object] = []

    @with_option_groups
    def command(*, settings: Annotated[Settings, Without.of("fast", "place")]) -> None:
        got.append(settings)

    assert called(command, "--size", "3").exit_code == 0
    assert called(command, "--fast").exit_code != 0
    assert got == [Settings(3)]


def test_groups_and_fields_of_requests_go_together() -> None:
    got: list[object] = []

    @with_request_options(("steps",))
    @with_option_groups
    def command(fields: Fields = NO_FIELDS, *, settings: Settings) -> None:
        got.append((dict(fields), settings))

    assert called(command, "--steps", "9", "--place", "here").exit_code == 0
    assert got == [({"steps": 9}, Settings(place="here"))]


def test_a_group_without_an_unknown_field_is_a_mistake_of_the_command() -> None:
    def command(*, settings: Annotated[Settings, Without.of("colour")]) -> None: ...

    with pytest.raises(AssertionError, match=r"Settings has no fields \['colour'\]"):
        with_option_groups(command)
