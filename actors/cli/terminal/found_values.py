"""`name_found_values`: errors about the values of options name the option, the value found and the value expected.

Typer and click write "Input should be a valid integer, unable to parse string as an integer", without the value, and
only for the first wrong option.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import typer

from modelpool.pool.values.core.errors import UserError, unusable_field

#: by what Typer's and click's messages about a value contain
_EXPECTED = (
    (re.compile(r"valid integer"), "a whole number"),
    (re.compile(r"valid (?:number|float)"), "a number"),
    (re.compile(r"valid boolean"), "true or false"),
)
_CHOICES = re.compile(r"is not one of (.*?)\.?$")


def name_found_values(command: Any) -> None:
    """Let the parameters of a command, and of all its subcommands, raise UserError for a value that they cannot be."""
    for parameter in command.params:
        parameter.process_value = partial(_processed, parameter, parameter.process_value)
    for each in getattr(command, "commands", {}).values():
        name_found_values(each)


def _processed(parameter: Any, process: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    try:
        return process(context, value)
    except typer.BadParameter as problem:
        if value is None:  # it is missing, which Typer says
            raise
        message = str(problem.message)
    raise _wrong_value(parameter, value, message)


def _wrong_value(parameter: Any, value: Any, message: str) -> UserError:
    options = [option for option in parameter.opts if option.startswith("-")]
    name = max(options, key=len) if options else str(parameter.metavar or parameter.name).upper()
    expected = next((words for pattern, words in _EXPECTED if pattern.search(message)), "")
    if choices := _CHOICES.search(message):
        expected = f"one of {choices[1]}".replace("'", "")
    return unusable_field(name, value, expected or message)
