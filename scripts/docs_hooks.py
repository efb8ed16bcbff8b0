"""Hooks of mkdocs that fill in two pages of the reference while the site is built, so that they match the code.

docs/reference/command_line.md gets the options of every subcommand, and docs/reference/python.md the public names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

COMMANDS, NAMES = "<!-- options of every command -->", "<!-- public names -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the marker of a page by the generated part. mkdocs calls this for every page."""
    if page.file.src_uri not in _PAGES:
        return markdown
    marker, generated = _PAGES[page.file.src_uri]
    if marker not in markdown:
        raise ValueError(f"{page.file.src_uri} has no line {marker}")
    return markdown.replace(marker, "\n".join(generated()))


def names_section() -> Iterator[str]:
    """Yield a mkdocstrings directive for each public name of modelpool. Aliases appear once."""
    import modelpool

    public = [getattr(modelpool, name) for name in modelpool.__all__]
    for identifier in dict.fromkeys(f"{each.__module__}.{each.__qualname__}" for each in public):
        yield from (f"::: {identifier}", "")


def commands_section() -> Iterator[str]:
    """Yield the lines of one section for each subcommand."""
    import typer

    from modelpool.actors.cli.main import build_app

    for name, command in _commands(typer.main.get_command(build_app()), "modelpool"):
        yield from ("", f"## `{name}`", "", *(line.strip() for line in (command.help or "").splitlines()), "")
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        if arguments:
            yield from ("| argument | |", "| --- | --- |", *(_row(p.name.upper(), p.help) for p in arguments), "")
        panels: dict[str, list[Any]] = defaultdict(list)
        for option in command.params:
            if option.param_type_name == "option" and not option.hidden:
                panels[option.rich_help_panel or "Options"].append(option)
        for panel, options in panels.items():
            yield from (f"**{panel}**", "", "| option | |", "| --- | --- |")
            yield from (_row(_usage(option), option.help) for option in options)
            yield ""


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The subcommands by name, including those of `modelpool models`."""
    for child_name, child in sorted(getattr(command, "commands", {}).items()):
        yield f"{name} {child_name}", child
        yield from _commands(child, f"{name} {child_name}")


def _usage(option: Any) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    return names if option.is_flag or not (option.metavar or "").strip() else f"{names} {option.metavar}"


def _row(usage: str, text: str | None) -> str:
    cells = (f"`{usage}`", " ".join((text or "").split()))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


#: page -> marker, and the function that replaces it
_PAGES: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "reference/command_line.md": (COMMANDS, commands_section),
    "reference/python.md": (NAMES, names_section),
}
