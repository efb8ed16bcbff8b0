"""`modelpool batch`: generates the requests of a file into a folder; the same command again resumes."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modelpool.actors.cli.terminal import options
from modelpool.actors.cli.terminal.option_groups import with_option_groups
from modelpool.actors.cli.terminal.options import PlainPoolOptions
from modelpool.actors.cli.terminal.request_options import NO_FIELDS, SCHEDULING_FIELDS, Fields, with_request_options
from modelpool.actors.cli.terminal.session import session_of
from modelpool.actors.request.field_table import AUTO_BATCH, REQUEST_FIELDS
from modelpool.pool.values.core.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from modelpool.actors.cli.run.checked_requests import WantedOutput
    from modelpool.actors.cli.run.job_file import BrokenLine, JobLine
    from modelpool.actors.client.start_checks import NameCheck
    from modelpool.actors.request.name_template import NameTemplate
    from modelpool.actors.request.requests import GenerateRequest

#: lines that the pool checks together at first, so that the first task starts at once
FIRST_CHUNK = 8
#: time in which the lines of a file are checked before the pool starts; about 10,000 lines
CHECKED_FIRST_SECONDS = 1.0
#: invalid lines that are printed; more of them have a common cause
MOST_REPORTED = 1000
#: outputs that are all read before the first is generated, so that no batch is larger than the outputs. Of more,
#: no batch size leaves so much of its last pass empty that another one would be faster
FEW_OUTPUTS = 64

BATCH_HELP = (
    "Generate the requests of a file, one per line. Invalid lines are reported by line number; the rest are generated."
    f"\n\nA line is a JSON object with fields of a request ({', '.join(REQUEST_FIELDS)}), a row of a CSV or Parquet "
    "file with these fields as columns, or a prompt in a .txt file. Run the same command again to resume: images that "
    "already exist in --out are skipped."
)


@with_request_options((*SCHEDULING_FIELDS, "batch", "gpus", "format", "quality"))
@with_option_groups
def batch(
    context: typer.Context,
    job_file: options.JobFile,
    out: Annotated[
        str,
        typer.Option(
            "--out",
            help="Folder for images, manifest and contact sheet, or a URL: s3://bucket/folder.",
            metavar="DIR_OR_URL",
        ),
    ],
    model: options.LineModel = None,
    seed: options.LineSeed = 0,
    workflow: Annotated[
        Path | None,
        typer.Option(
            "--workflow",
            help="Workflow that each row is for: columns are NODE.INPUT, or fields beside a workflow, such as id.",
            metavar="WORKFLOW",
            show_default=False,
        ),
    ] = None,
    columns: options.Columns = None,
    ignore_columns: options.IgnoreColumns = False,
    name: options.Name = None,
    again: Annotated[
        bool, typer.Option("--again", help="Also regenerate what already exists in --out.", metavar=" ")
    ] = False,
    shards: options.Shards = None,
    shard_format: options.ShardFormat = None,
    thumbnails: options.Thumbnails = False,
    why: options.Why = False,
    fields: Fields = NO_FIELDS,
    as_json: options.AsJson = False,
    *,
    where: PlainPoolOptions,
) -> None:
    """Read the file, start a pool once a line can be generated, and generate the missing outputs while later lines are
    read. Exits with 2 if no line is valid.
    """
    from modelpool.actors.cli.run.checked_requests import CHUNK, WantedOutputs
    from modelpool.actors.cli.run.job_file import job_lines, line_count
    from modelpool.actors.cli.run.read_ahead import ReadAhead
    from modelpool.actors.cli.run.run_jobs import CommandRun, run_requests, started
    from modelpool.actors.cli.run.workflow_rows import workflow_lines
    from modelpool.actors.cli.terminal.screen import user_console
    from modelpool.actors.config.output_address import output_address
    from modelpool.actors.outputs.layout import FILES, declare_layout, layout_of
    from modelpool.actors.outputs.output_check import check_outputs
    from modelpool.actors.request.job_files.columns import ColumnChoice
    from modelpool.actors.request.name_template import NameTemplate
    from modelpool.actors.request.requests import GenerateRequest

    output = output_address(out, "--out")
    defaults = {"batch": AUTO_BATCH, **fields} if model is None else {"batch": AUTO_BATCH, **fields, "model": model}
    template = None if name is None else NameTemplate.of(name, "--name")
    choice = ColumnChoice.of(columns or (), ignore_columns)
    options_alone = GenerateRequest(**{"model": "any", "prompt": "", **defaults})
    check_outputs(output)
    session = session_of(context)
    layout = layout_of(shards, shard_format, thumbnails)
    names = session.check_names(where)
    if model is not None:
        names.check(options_alone)  # report a bad option once, not for every line
    console = user_console()
    read: Callable[[], Iterator[JobLine | BrokenLine]] = partial(job_lines, job_file, defaults, seed, choice)
    if workflow is not None:
        read = partial(workflow_lines, job_file, workflow, names)
    lines = _ValidLines(job_file, read, names, console, template)
    with ReadAhead(lines, "read job file") as reader:
        if not reader.wait():
            lines.say_none_is_valid()
            raise typer.Exit(2)
        expected = line_count(job_file)
        if expected is not None:  # a file, not the output of a program that may be slow
            reader.wait_ahead(CHECKED_FIRST_SECONDS)
        lines.pool_starts()
        if layout != FILES:
            declare_layout(output, layout)
        few = expected is not None and expected <= FEW_OUTPUTS
        count = reader.count_of_few(FEW_OUTPUTS) if few else 0
        wanted = WantedOutputs(
            reader.chunks(FIRST_CHUNK, CHUNK), expected, lambda: lines.invalid_count, job_file, count
        )
        with started(session, where, console) as running:
            resume = shlex.join(["modelpool", *session.arguments])
            run = CommandRun(wanted, output, not again, as_json, resume, print_reasons=why, name=name)
            raise typer.Exit(run_requests(run, running, console))


class _ValidLines:
    """The valid lines of a job file, each with its place among them. Iterate once; prints invalid lines as they are
    read.

    Lines with unknown names, and with fields that their models do not support, are invalid too: a file without any
    other lines starts no pool.
    """

    def __init__(
        self,
        path: str,
        read: Callable[[], Iterator[JobLine | BrokenLine]],
        names: NameCheck,
        console: Console,
        file_name: NameTemplate | None = None,
    ) -> None:
        """`read` returns the lines of the file at `path`."""
        self._path = path
        self._read = read
        self._names = names
        self._console = console
        self._file_name = file_name
        self._is_pool_started = False
        self.invalid_count = 0

    def __iter__(self) -> Iterator[WantedOutput]:
        from modelpool.actors.cli.run.checked_requests import WantedOutput
        from modelpool.actors.cli.run.job_file import BrokenLine
        from modelpool.actors.cli.terminal.screen import say

        place, invalid_number = 0, 0
        for line in self._read():
            problem = line.message if isinstance(line, BrokenLine) else self._problem(line.labelled)
            if problem or isinstance(line, BrokenLine):
                if line.number == invalid_number:  # another output of the same line
                    continue
                invalid_number = line.number
                self.invalid_count += 1
                if self.invalid_count <= MOST_REPORTED:
                    say(self._console, f"{self._path}:{line.number}: {problem}", "red")
                if self.invalid_count == MOST_REPORTED:
                    say(self._console, f"{self._path}: further invalid lines are only counted", "red")
                continue
            yield WantedOutput(place, line.labelled, f"{self._path}:{line.number}: ")
            place += 1

    def pool_starts(self) -> None:
        """Leave what takes long to the pool from now on: it reads images itself, and knows what fits."""
        self._is_pool_started = True

    def say_none_is_valid(self) -> None:
        """Print that all lines are invalid."""
        from modelpool.actors.cli.terminal.screen import counted, say

        say(self._console, f"{self._path}: {counted(self.invalid_count, 'invalid line')}, 0 valid", "red")

    def _problem(self, request: GenerateRequest) -> str:
        """Return why a line cannot be used; "" if it can."""
        from modelpool.actors.cli.run.read_inputs import with_images_read

        if self._file_name is not None and (missing := self._file_name.missing(request)):
            return f"{missing}: missing; --name {self._file_name.text} needs it"
        try:
            self._names.check(request)
            if self._is_pool_started:
                self._names.check_supported(request)
            else:
                self._names.check_before_start(with_images_read(request))
        except UserError as problem:
            return str(problem)
        return ""
