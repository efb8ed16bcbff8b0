"""`show_help_literally`: help texts are not markup.

Typer takes them for Rich's markup, in which "[cluster] drain_seconds" names a style: it was shown without "[cluster]".
"""

from __future__ import annotations

from typing import Any

from rich.markup import escape


def show_help_literally(command: Any) -> None:
    """Escape the help of a click command, of its parameters, and of all its subcommands."""
    command.help = command.help and escape(command.help)
    for parameter in command.params:
        text = getattr(parameter, "help", None)
        if text:
            parameter.help = escape(text)
    for each in getattr(command, "commands", {}).values():
        show_help_literally(each)
