"""Hooks of mkdocs: write the options of every subcommand into docs/reference/command_line.md while the site is built.

The page holds a marker; the tables come from the command itself, so they are never out of date.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

PAGE, MARKER = "reference/command_line.md", "<!-- options of every command -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the marker of the command-line page. mkdocs calls this for every page."""
    if page.file.src_uri != PAGE:
        return markdown
    if MARKER not in markdown:
        raise ValueError(f"{PAGE} has no line {MARKER}")
    return markdown.replace(MARKER, "\n".join(commands_section()))


def commands_section() -> Iterator[str]:
    """Yield the lines of one section for each subcommand."""
    import typer

    from modelpool.actors.cli.main import build_app

    for name, command in _commands(typer.main.get_command(build_app()), "modelpool"):
        yield from ("", f"## `{name}`", "", *(line.strip() for line in (command.help or "").splitlines()), "")
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        if arguments:
            yield from ("| argument | |", "| --- | --- |", *(_row(p.name.upper(), "", p.help) for p in arguments), "")
        panels: dict[str, list[Any]] = defaultdict(list)
        for option in command.params:
            if option.param_type_name == "option" and not option.hidden:
                panels[option.rich_help_panel or "Options"].append(option)
        for panel, options in panels.items():
            yield from (f"**{panel}**", "", "| option | value | |", "| --- | --- | --- |")
            yield from (_row(", ".join([*o.opts, *o.secondary_opts]), f"`{_value(o)}`", o.help) for o in options)
            yield ""


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The subcommands, those of `modelpool models` included."""
    for child_name, child in sorted(getattr(command, "commands", {}).items()):
        yield f"{name} {child_name}", child
        yield from _commands(child, f"{name} {child_name}")


def _value(option: Any) -> str:
    return " " if option.is_flag else option.metavar or " "


def _row(name: str, value: str, text: str | None) -> str:
    cells = [f"`{name}`", *([value.replace("` `", "")] if value else []), " ".join((text or "").split())]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
