"""`modelpool repair`: generates the files of an output folder again that are missing or damaged, and no others."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modelpool.actors.cli.terminal import options
from modelpool.actors.cli.terminal.option_groups import with_option_groups
from modelpool.actors.cli.terminal.options import PlainPoolOptions, PoolOptions
from modelpool.actors.cli.terminal.session import session_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from modelpool.actors.cli.terminal.command_ports import PoolDetachedJobs
    from modelpool.actors.config.output_address import OutputAddress
    from modelpool.actors.outputs.place import DamagedOutput, OutputPlace

EXIT_FAILED = 1
#: problems that are printed one by one
MOST_LISTED = 40

Folder = Annotated[
    str,
    typer.Argument(
        metavar="DIR_OR_ID",
        help="An output folder or URL with a manifest, or the id of a submission of a running pool on this machine.",
        show_default=False,
    ),
]
Inputs = Annotated[
    list[Path] | None,
    typer.Option(
        "--inputs", help="Folder with input images; repeatable (default: . and DIR).", metavar="DIR", show_default=False
    ),
]


@with_option_groups
def repair(
    context: typer.Context,
    folder: Folder,
    inputs: Inputs = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Check only the existence and size of files.", metavar=" ")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what is damaged; change nothing.", metavar=" ")
    ] = False,
    as_json: options.AsJson = False,
    *,
    where: PlainPoolOptions,
) -> None:
    """Generate files of a folder again that are missing or damaged, from the recipes in its manifest.

    Lines of the manifest that cannot be used are moved to manifest.damaged; complete files that are not listed are
    listed again. Exits with 0 if everything is complete, with 1 if something could not be repaired.
    """
    from modelpool.actors.cli.terminal.screen import counted, say, user_console
    from modelpool.actors.outputs.open_outputs import existing_outputs

    address = outputs_of(context, folder, where.pool)
    console, out = user_console(), existing_outputs(address)
    damaged = list(out.damaged(quick))
    print_damaged(console, out, damaged)
    if dry_run:
        raise typer.Exit(EXIT_FAILED if damaged or out.damaged_line_count else 0)
    removed, listed = out.repair_manifest()
    if removed or listed:
        moved, again = counted(removed, "line"), counted(listed, "complete file")
        say(console, f"{out.manifest_path}: {moved} moved to manifest.damaged, {again} listed again")
    damaged = [one for one in damaged if out.problem(one.entry, quick)]
    if not damaged:
        say(console, f"{address}: {counted(len(out.entries()), 'file')}, nothing to generate")
        raise typer.Exit(0)
    raise typer.Exit(_generate(context, where, out, damaged, inputs or default_inputs(address), as_json))


def outputs_of(context: typer.Context, given: str, pool: str | None) -> OutputAddress:
    """Return the address of outputs: `given` if it is a folder or a URL, or else the address of this submission.
    Raises UserError if it is none of them."""
    from modelpool.actors.config.output_address import output_address

    address = named_place(given)
    if address is not None:
        return address
    with named_submission(context, given, pool) as jobs:
        return output_address(jobs.progress().record.output)


def named_place(given: str) -> OutputAddress | None:
    """Return the folder or the URL that `given` names; None if it can only be the id of a submission."""
    from modelpool.actors.config.output_address import output_address

    address = output_address(given, "DIR_OR_ID")
    return address if isinstance(address, str) or address.exists() or len(address.parts) != 1 else None


@contextlib.contextmanager
def named_submission(context: typer.Context, given: str, pool: str | None) -> Iterator[PoolDetachedJobs]:
    """Connect to the pool while the submission with the id `given` is read. Raises UserError if there is none."""
    from modelpool.actors.cli.run.detached import joined_pool
    from modelpool.pool.values.core.errors import UserError, unusable_field

    try:
        with joined_pool(context, pool) as running:
            yield running.attach(given)
    except UserError as problem:
        expected = f"an output folder, or the id of a submission ({problem})"
        raise unusable_field("DIR_OR_ID", given, expected) from None


def default_inputs(address: OutputAddress) -> list[Path]:
    """Return where input images of outputs at `address` are looked up: here, and with the outputs."""
    return [Path(), address] if isinstance(address, Path) else [Path()]


def print_damaged(console: Console, out: OutputPlace, damaged: Sequence[DamagedOutput]) -> None:
    """Print damaged lines and files."""
    from modelpool.actors.cli.run.run_jobs import print_damaged_lines
    from modelpool.actors.cli.terminal.screen import counted, say

    print_damaged_lines(console, out)
    for one in damaged[:MOST_LISTED]:
        say(console, f"{one.path}: {one.reason}", "yellow")
    if len(damaged) > MOST_LISTED:
        say(console, f"... and {counted(len(damaged) - MOST_LISTED, 'more file')}", "yellow")


def _generate(
    context: typer.Context,
    where: PoolOptions,
    out: OutputPlace,
    damaged: Sequence[DamagedOutput],
    inputs: Sequence[Path],
    as_json: bool,
) -> int:
    """Generate the damaged outputs; return the exit code."""
    from modelpool.actors.cli.run.checked_requests import WantedOutput, WantedOutputs
    from modelpool.actors.cli.run.generate_again import requests_again
    from modelpool.actors.cli.run.run_jobs import CommandRun, run_requests, started
    from modelpool.actors.cli.terminal.screen import say, user_console

    session, console = session_of(context), user_console()
    with started(session, where) as running:
        again, impossible = requests_again([one.entry for one in damaged], running, inputs)
        refused = [(one.entry, one.reason) for one in impossible]
        for one in again:
            if one.differs:
                names = ", ".join(one.differs)
                refused.append((one.entry, f"this pool would generate another output: {names} would differ"))
        for entry, reason in refused:
            say(console, f"{out.path_of(entry.file)}: cannot be generated again: {reason}", "red")
        wanted = tuple(
            WantedOutput(place, one.request, f"{one.entry.file}: ")
            for place, one in enumerate(one for one in again if not one.differs)
        )
        if not wanted:
            return EXIT_FAILED
        command = shlex.join(["modelpool", *session.arguments])
        run = CommandRun(WantedOutputs.of(wanted, invalid=len(refused)), out.path, False, as_json, command)
        return run_requests(run, running)
