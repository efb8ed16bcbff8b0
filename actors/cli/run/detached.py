"""`modelpool submit`, `wait`, `progress`, `cancel` and `jobs`: jobs that outlive the command that submitted them."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelpool.actors.cli.terminal import options
from modelpool.actors.cli.terminal.options import PoolOptions
from modelpool.actors.cli.terminal.request_options import NO_FIELDS, SCHEDULING_FIELDS, Fields, with_request_options
from modelpool.actors.cli.terminal.session import session_of
from modelpool.actors.cli.terminal.submission_lines import counts, plain_record, progress_line
from modelpool.actors.request.field_table import AUTO_BATCH
from modelpool.pool.values.core.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from modelpool.actors.cli.terminal.command_ports import Pool
    from modelpool.actors.control.detached.job_service import JobsProgress
    from modelpool.actors.control.detached.records import RequestOutcome, SubmissionRecord
    from modelpool.actors.request.job_files.columns import ColumnChoice
    from modelpool.actors.request.name_template import NameTemplate
    from modelpool.actors.request.requests import GenerateRequest

EXIT_FAILED = 1
#: interval of drawing the progress
_DRAW_SECONDS = 0.5
#: outcomes of a submission that `jobs show` prints; --json prints all
MOST_SHOWN = 40
#: submissions that `jobs` names with one reason why they wait
MOST_NAMED = 8
#: invalid lines of a job file that are printed; more of them have a common cause
MOST_REPORTED = 1000

_NO_SUBMISSION = "no submission; hand one over with `modelpool submit`"
JobsId = Annotated[
    str, typer.Argument(metavar="ID", help="Id of a submission, or the start of it.", show_default=False)
]


@with_request_options((*SCHEDULING_FIELDS, "batch", "gpus", "format", "quality"))
def submit(
    context: typer.Context,
    job_file: options.JobFile,
    out: Annotated[
        str,
        typer.Option(
            "--out",
            help="Folder for the outputs, on the pool's head node, or a URL: s3://bucket/folder.",
            metavar="DIR_OR_URL",
        ),
    ],
    jobs_id: Annotated[
        str | None,
        typer.Option(
            "--id", help="Id of the submission: submitting again has no effect.", metavar="ID", show_default=False
        ),
    ] = None,
    model: options.LineModel = None,
    seed: options.LineSeed = 0,
    columns: options.Columns = None,
    ignore_columns: options.IgnoreColumns = False,
    name: options.Name = None,
    shards: options.Shards = None,
    shard_format: options.ShardFormat = None,
    thumbnails: options.Thumbnails = False,
    fields: Fields = NO_FIELDS,
    as_json: options.AsJson = False,
    pool: options.PoolName = None,
) -> None:
    """Hand the requests of a file over to a running pool, and return. They run, and their outputs are written, whatever
    happens to this terminal, to the pool's processes, or to the machine: `modelpool up` continues. Prints the id.
    """
    from modelpool.actors.cli.terminal.screen import counted, print_json, say, spinner, user_console
    from modelpool.actors.config.output_address import absolute_address, output_address
    from modelpool.actors.outputs.layout import FILES, layout_of
    from modelpool.actors.request.job_files.columns import ColumnChoice
    from modelpool.actors.request.name_template import NameTemplate

    output = absolute_address(output_address(out, "--out"))
    layout = layout_of(shards, shard_format, thumbnails)
    template = None if name is None else NameTemplate.of(name, "--name")
    choice = ColumnChoice.of(columns or (), ignore_columns)
    defaults = {"batch": AUTO_BATCH, **fields} if model is None else {"batch": AUTO_BATCH, **fields, "model": model}
    console = user_console()
    with joined_pool(context, pool) as joined, spinner(console, f"reading {job_file}") as show_line:
        lines = _SubmittedLines(job_file, defaults, seed, choice, template, console, show_line)
        asked = None if layout == FILES else layout
        # a file is read again if the job service is restarted meanwhile
        requests = iter(lines) if job_file == "-" else lines
        submitted = joined.submit_detached(requests, output=output, jobs_id=jobs_id, name=name, layout=asked)
        record = submitted.progress().record
    if as_json:
        print_json(sys.stdout, plain_record(record))
        return
    print(submitted.id)
    say(console, f"{counted(record.request_count, 'request')} submitted; outputs: {record.output}", "dim")
    name = shlex.quote(submitted.id)
    say(console, f"Follow it:  modelpool progress {name}   Wait for it:  modelpool wait {name}", "dim")


class _SubmittedLines:
    """The requests of a job file, as they are read. Nobody watches a detached batch, so it is complete or refused: once
    a line is invalid, the others are read to report their problems, and an error ends the iteration.
    """

    def __init__(
        self,
        path: str,
        defaults: Mapping[str, Any],
        seed: int,
        choice: ColumnChoice,
        file_name: NameTemplate | None,
        console: Console,
        show: Callable[[str], None],
    ) -> None:
        """`show` displays how far the reading is."""
        self._path = path
        self._defaults = defaults
        self._seed = seed
        self._file_name = file_name
        self._choice = choice
        self._console = console
        self._show = show

    def __iter__(self) -> Iterator[GenerateRequest]:
        from modelpool.actors.cli.run.job_file import BrokenLine, job_lines, line_count
        from modelpool.actors.cli.terminal.screen import counted, say

        expected, shown_at, valid, invalid = line_count(self._path), 0.0, 0, 0
        for line in job_lines(self._path, self._defaults, self._seed, self._choice):
            if time.monotonic() - shown_at > _DRAW_SECONDS:
                shown_at, checked = time.monotonic(), valid + invalid
                of_all = "" if expected is None else f" of {max(expected, checked):,}"
                self._show(f"{self._path}: checked {checked:,}{of_all}")
            problem = line.message if isinstance(line, BrokenLine) else self._problem(line.labelled)
            if problem or isinstance(line, BrokenLine):
                invalid += 1
                if invalid <= MOST_REPORTED:
                    say(self._console, f"{self._path}:{line.number}: {problem}", "red")
                continue
            valid += 1
            if not invalid:
                yield line.labelled
        if invalid:
            raise UserError(f"{self._path}: {counted(invalid, 'invalid line')}; nothing was submitted")

    def _problem(self, request: GenerateRequest) -> str:
        """Return why a line cannot be used; "" if it can."""
        if self._file_name is None or not (missing := self._file_name.missing(request)):
            return ""
        return f"{missing}: missing; --name {self._file_name.text} needs it"


def wait(
    context: typer.Context,
    jobs_id: JobsId,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Wait no longer.", metavar="SECONDS", show_default=False)
    ] = None,
    as_json: options.AsJson = False,
    pool: options.PoolName = None,
) -> None:
    """Wait until all jobs of a submission have ended. Exits with 1 if some failed or were cancelled, or if the time is
    over.
    """
    from modelpool.actors.cli.terminal.screen import print_json, say, spinner, user_console

    until = None if timeout is None else time.monotonic() + timeout
    console = user_console()
    with joined_pool(context, pool) as joined:
        jobs = joined.attach(jobs_id)
        progress = jobs.progress()
        with spinner(console, progress_line(progress)) as show_line:
            while progress.record.pending and (until is None or time.monotonic() < until):
                time.sleep(_DRAW_SECONDS)
                progress = jobs.progress()
                show_line(progress_line(progress))
    if as_json:
        print_json(sys.stdout, plain_record(progress.record))
    else:
        say(console, progress_line(progress), "bold")
    if progress.record.succeeded < progress.record.request_count:
        raise typer.Exit(EXIT_FAILED)


def progress(
    context: typer.Context,
    jobs_id: Annotated[
        str | None,
        typer.Argument(
            metavar="ID",
            help="Id of a submission, or the start of it; by default those that have not ended, else the latest one.",
            show_default=False,
        ),
    ] = None,
    as_json: options.AsJson = False,
    pool: options.PoolName = None,
) -> None:
    """Show how far a submission is, and what it waits for."""
    from modelpool.actors.cli.terminal.screen import print_json, say, user_console

    with joined_pool(context, pool) as joined:
        ids = current_ids(joined.detached()) if jobs_id is None else (jobs_id,)
        found = [joined.attach(each).progress() for each in ids]
    console = user_console(sys.stdout)
    for now in found:
        if as_json:
            values = {"in_pool": now.in_pool, "running": len(now.running), "waiting_for": now.waiting_for}
            print_json(sys.stdout, {**plain_record(now.record), **values})
            continue
        say(console, progress_line(now))
        for task in now.running:
            step = f"step {task.step} of {task.steps}"
            say(console, f"  job {task.index}: {task.stage.value} on {task.worker}, {step}")
    if not found and not as_json:
        say(console, _NO_SUBMISSION)


def current_ids(records: Sequence[SubmissionRecord]) -> tuple[str, ...]:
    """Return the ids of the submissions that have not ended, of the latest one if all have, from oldest to newest."""
    active = tuple(record.submission_id for record in records if record.pending)
    return active or tuple(record.submission_id for record in records[-1:])


def cancel(context: typer.Context, jobs_id: JobsId, pool: options.PoolName = None) -> None:
    """Cancel what has not ended of a submission. Finished outputs stay."""
    from modelpool.actors.cli.terminal.screen import say, user_console

    with joined_pool(context, pool) as joined:
        record = joined.attach(jobs_id).cancel()
    say(user_console(), counts(record), "bold")


def jobs_app() -> typer.Typer:
    """Return `modelpool jobs`, `jobs show` and `jobs rm`."""
    app = typer.Typer(
        help="List the submissions of a running pool, show one, or forget one that has ended.",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(list_jobs)
    app.command("show", no_args_is_help=True)(show_jobs)
    app.command("rm", no_args_is_help=True)(remove_jobs)
    return app


def list_jobs(context: typer.Context, as_json: options.AsJson = False, pool: options.PoolName = None) -> None:
    """List all submissions of a running pool, oldest first."""
    if context.invoked_subcommand is not None:
        return
    from modelpool.actors.cli.terminal.screen import print_json, say, show, user_console
    from modelpool.actors.cli.terminal.tables import rows_table

    with joined_pool(context, pool) as joined:
        records = joined.detached()
    if as_json:
        for record in records:
            print_json(sys.stdout, plain_record(record))
        return
    rows = [
        [record.submission_id, record.state.value, counts(record), _time(record.created_at), record.user, record.output]
        for record in records
    ]
    console = user_console(sys.stdout)
    if not rows:
        say(console, _NO_SUBMISSION)
        return
    show(console, rows_table(["id", "state", "jobs", "submitted", "user", "output"], rows))
    waiting: dict[str, list[str]] = {}
    for record in records:
        if record.pending and record.trouble:
            waiting.setdefault(record.trouble, []).append(record.submission_id)
    for trouble, names in waiting.items():
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        say(console, f"{', '.join(names[:MOST_NAMED])}{more}: {trouble}", "yellow")


def show_jobs(
    context: typer.Context, jobs_id: JobsId, as_json: options.AsJson = False, pool: options.PoolName = None
) -> None:
    """Show a submission and the outcomes of its jobs."""
    from modelpool.actors.cli.terminal.screen import print_json, say, user_console

    with joined_pool(context, pool) as joined:
        jobs = joined.attach(jobs_id)
        now, outcomes = jobs.progress(), list(jobs.outcomes())
    if as_json:
        print_json(sys.stdout, {**plain_record(now.record), "outcomes": [_plain_outcome(each) for each in outcomes]})
        return
    console = user_console(sys.stdout)
    _say_record(console, now)
    bad = [each for each in outcomes if not each.file]
    for each in (bad + [each for each in outcomes if each.file])[:MOST_SHOWN]:
        what = each.file or f"{each.outcome.value}: {each.error_kind} {each.message}".rstrip(": ")
        say(console, f"  job {each.place}: {what}")
    if len(outcomes) > MOST_SHOWN:
        say(console, f"  ... and {len(outcomes) - MOST_SHOWN} more; --json prints all", "dim")


def remove_jobs(context: typer.Context, jobs_id: JobsId, pool: options.PoolName = None) -> None:
    """Forget a submission that has ended. Its outputs stay."""
    with joined_pool(context, pool) as joined:
        joined.attach(jobs_id).remove()


def _plain_outcome(outcome: RequestOutcome) -> dict[str, Any]:
    plain = dataclasses.asdict(outcome)
    del plain["submission_id"], plain["labels"]
    # "place" is the former name of the index
    return {"index": outcome.place, **plain, **outcome.labels.as_json(), "outcome": outcome.outcome.value}


def _say_record(console: Console, now: JobsProgress) -> None:
    from modelpool.actors.cli.terminal.screen import say

    record = now.record
    say(console, progress_line(now), "bold")
    say(console, f"  submitted {_time(record.created_at)} by {record.user or 'nobody'}; outputs: {record.output}")


def _time(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds).strftime("%Y-%m-%d %H:%M:%S")


def joined_pool(context: typer.Context, pool: str | None) -> Pool:
    """Return a connection to the running pool of this name, or to the latest one. Raises UserError."""
    from modelpool.actors.cli.cluster.serve import name_of_running

    return session_of(context).open_pool(PoolOptions(pool=pool or name_of_running()))
