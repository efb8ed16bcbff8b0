"""Runs requests and reports the results; shared by `generate` and `batch`.

Knows the pool through its protocol, and what users and programs read; not where requests come from. Rules
1. An image is safe as soon as it is finished: stopping loses only what is running.
2. `--json` prints one object per image, in the order in which they finish, and nothing else.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from modelpool.actors.cli.interrupts import StopRequest
from modelpool.actors.cli.preview_file import writer_of
from modelpool.actors.cli.progress_view import View, view_for
from modelpool.actors.cli.screen import counted, duration, json_on_stdout, print_json, say, show, user_console
from modelpool.actors.cli.tables import summary_table
from modelpool.pool.core.errors import OutputFailed, UserError
from modelpool.pool.specs.spec import RunErrorKind

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from modelpool.actors.cli.options import PoolOptions
    from modelpool.actors.cli.ports import Pool, PoolJobs
    from modelpool.actors.cli.session import Session
    from modelpool.actors.outputs.place import KeptImage, OutputPlace
    from modelpool.actors.request.requests import GenerateRequest
    from modelpool.actors.results.outcomes import JobFailure, OutputResult, Summary, TaskSummary
    from modelpool.actors.settings.output_address import OutputAddress

EXIT_FAILED = 1
#: interval of drawing a display and of noticing a stop request
_CHECK_SECONDS = 0.1
#: interval of asking what the pool waits for while nothing runs yet
_WAITING_SECONDS = 2.0
#: number of jobs whose placement is printed, the first that end; the manifest has all
MOST_WHYS = 40


@dataclass(frozen=True, slots=True)
class WantedOutput:
    """One output to generate. `place` is its number among all, from 0; `origin` is the source of the request."""

    place: int
    request: GenerateRequest
    origin: str = ""


@dataclass(frozen=True, slots=True)
class SortedRequests:
    """Requests, by what has to be done."""

    to_make: tuple[WantedOutput, ...]
    kept: tuple[tuple[WantedOutput, KeptImage], ...]
    #: with the problem
    refused: tuple[tuple[WantedOutput, str], ...]
    #: what each of them is: image, video, audio clip, or file if they differ
    noun: str = "image"


@dataclass(frozen=True, slots=True)
class CommandRun:
    """Decisions of a command before anything is generated.

    resume          skip outputs that exist in `output`
    refused         number of invalid requests (already reported)
    resume_command  the command line that generates the rest after a stop
    all_or_nothing  one invalid request is an error; otherwise the others are generated
    print_reasons   print at the end where each job ran and why
    preview         file that the newest preview is written to; None: no previews are made
    """

    wanted: tuple[WantedOutput, ...]
    output: OutputAddress
    resume: bool
    as_json: bool
    resume_command: str
    refused: int = 0
    all_or_nothing: bool = False
    print_reasons: bool = False
    preview: Path | None = None


@contextlib.contextmanager
def started(session: Session, options: PoolOptions) -> Iterator[Pool]:
    """Open a pool for the duration of a command. Prints that it is starting, which takes a few seconds."""
    console = user_console()
    text = f"joining pool {options.pool}" if options.pool else "starting the pool"
    if not console.is_terminal:
        say(console, text)
    with console.status(text) if console.is_terminal else contextlib.nullcontext():
        pool = session.open_pool(options)
    try:
        with pool:
            yield pool
    except KeyboardInterrupt:
        say(console, "modelpool: interrupted", "yellow")
        raise


def sort_requests(wanted: Sequence[WantedOutput], pool: Pool, finished: Mapping[str, KeptImage]) -> SortedRequests:
    """Resolve each request to its recipe, and check whether its output exists."""
    to_make: list[WantedOutput] = []
    kept: list[tuple[WantedOutput, KeptImage]] = []
    refused: list[tuple[WantedOutput, str]] = []
    nouns: set[str] = set()
    for one, recipe in zip(wanted, pool.recipes([one.request for one in wanted]), strict=True):
        if isinstance(recipe, UserError):
            refused.append((one, str(recipe)))
            continue
        nouns.add("video" if recipe.frames else "audio clip" if recipe.seconds else "image")
        if recipe.digest in finished:
            kept.append((one, finished[recipe.digest]))
        else:
            to_make.append(one)
    return SortedRequests(tuple(to_make), tuple(kept), tuple(refused), nouns.pop() if len(nouns) == 1 else "file")


def run_requests(run: CommandRun, pool: Pool) -> int:
    """Generate what `run` wants and is missing; return the exit code. Raises UserError, and PoolLost after printing
    what is finished and how to resume.
    """
    from modelpool.actors.outputs.open_outputs import open_outputs
    from modelpool.actors.results.outcomes import PoolLost

    console = user_console()
    place = open_outputs(run.output)
    finished = place.kept() if run.resume else {}
    print_damaged_lines(console, place)
    plan = sort_requests(run.wanted, pool, finished)
    for one, message in plan.refused:
        if run.all_or_nothing:
            raise UserError(message)
        say(console, f"{one.origin}{message}", "red")
    if plan.kept:
        already = "is" if len(plan.kept) == 1 else "are"
        say(console, f"{counted(len(plan.kept), plan.noun)} {already} already in {run.output} and skipped")
    with StopRequest() as stop:
        try:
            with json_on_stdout() if run.as_json else contextlib.nullcontext() as stream:
                failures, summary, whys = _make(run, pool, plan, stop, stream)
        except PoolLost:
            _print_summary(console, run, plan.noun, (), None)
            _print_sheet(console, run, plan.noun, place)
            say(console, f"The pool has ended; finished files are kept. To resume: {run.resume_command}", "yellow")
            if stop.requested:  # the signal may have ended the pool too: Slurm signals every process of a job
                return stop.exit_code
            raise
        if run.print_reasons:
            _print_reasons(console, whys, 0 if summary is None else summary.succeeded)
        _print_summary(console, run, plan.noun, failures, summary)
        _print_sheet(console, run, plan.noun, place)
    if any(failure.kind is RunErrorKind.OUTPUT for failure in failures):
        say(console, f"Some files could not be written. To resume: {run.resume_command}", "yellow")
        return EXIT_FAILED
    if summary is not None and summary.cancelled:
        say(console, f"Stopped. To resume: {run.resume_command}", "yellow")
        return stop.exit_code
    return EXIT_FAILED if failures or plan.refused or run.refused else 0


def print_damaged_lines(console: Console, place: OutputPlace) -> None:
    """Print how many lines of the manifest of `place` are skipped, and why the first is."""
    if place.damaged_line_count:
        count = counted(place.damaged_line_count, "damaged line")
        say(console, f"{place.manifest_path}: {count} skipped, the first at {place.damaged_lines[0]}", "yellow")


def image_json(one: WantedOutput, image: OutputResult) -> dict[str, Any]:
    """Return a finished image, video or audio clip as JSON values."""
    from modelpool.actors.outputs.folder import pixels_sha256, plain
    from modelpool.actors.results.outcomes import array_of_result

    return {
        "index": one.place,
        "job": image.job_id,
        "prompt": image.recipe.prompt,
        "seed": image.seed,
        "path": str(image.path) if image.path else image.url or None,
        "sha256": image.pixels_sha256 or pixels_sha256(array_of_result(image)),
        "worker": image.worker,
        "seconds": round(image.seconds, 4),
        "skipped": False,
        "recipe": image.recipe.as_json(),
        "tasks": [plain(task) for task in image.tasks],
    }


def kept_json(one: WantedOutput, kept: KeptImage) -> dict[str, Any]:
    """Return an output that existed already as JSON values."""
    return {
        "index": one.place,
        "job": kept.entry.get("job_id"),
        "prompt": kept.recipe.prompt,
        "seed": kept.recipe.seed,
        "path": str(kept.path),
        "sha256": kept.pixels_sha256,
        "worker": kept.entry.get("worker"),
        "seconds": kept.entry.get("seconds"),
        "skipped": True,
        "recipe": kept.recipe.as_json(),
        "tasks": kept.entry.get("tasks", []),
    }


def _make(
    run: CommandRun, pool: Pool, plan: SortedRequests, stop: StopRequest, stream: TextIO | None
) -> tuple[list[JobFailure], Summary | None, dict[int, str]]:
    """Generate what is missing; return the failures, the summary if anything ran, and where each job ran, by place."""
    if stream is not None:
        for one, image in plan.kept:
            print_json(stream, kept_json(one, image))
    if not plan.to_make:
        return [], None, {}
    previews = {} if run.preview is None else {"on_preview": writer_of(run.preview)}
    jobs = pool.submit([one.request for one in plan.to_make], output=run.output, **previews)
    failures, whys = _follow(jobs, plan.to_make, view_for(user_console()), stop, stream, lambda: waiting_for(pool))
    return failures, jobs.summary(), whys


def waiting_for(pool: Pool) -> str:
    """Return what the pool waits for if no worker is up; "" if one is, and if nothing is known."""
    status = pool.status()
    return "" if any(worker.state in ("idle", "busy") for worker in status.workers) else status.waiting_for


def _follow(
    jobs: PoolJobs,
    wanted: Sequence[WantedOutput],
    view: View,
    stop: StopRequest,
    stream: TextIO | None,
    waiting: Callable[[], str],
) -> tuple[list[JobFailure], dict[int, str]]:
    """Print results until all jobs have ended. Return the failures without cancelled ones, and where each of the
    others ran, by place.
    """
    from modelpool.actors.results.outcomes import OutputResult, where_and_why

    failures: list[JobFailure] = []
    whys: dict[int, str] = {}
    with view, _watched(jobs, view, stop, waiting):
        for result in jobs.results():
            one = wanted[result.index]
            if isinstance(result, OutputResult):
                view.image(_image_line(result))
                if len(whys) < MOST_WHYS:
                    whys[one.place] = where_and_why(result.tasks)
                if stream is not None:
                    print_json(stream, image_json(one, result))
            elif not result.cancelled:
                failures.append(result)
                view.failure(f"failed: {_failure_line(one, result)}")
    return failures, whys


@contextlib.contextmanager
def _watched(jobs: PoolJobs, view: View, stop: StopRequest, waiting: Callable[[], str]) -> Iterator[None]:
    """Draw progress and forward a stop request, from a thread, while the caller waits for results. Until something
    runs, print what the pool waits for when that changes.

    Errors of the thread are raised at the end.
    """
    ended = threading.Event()
    errors: list[Exception] = []

    def watch() -> None:
        passed_on, has_run, waited_for, held, rounds = False, False, "", "", 0
        try:
            while not ended.wait(_CHECK_SECONDS):
                progress = jobs.progress()
                view.update(progress)
                rounds += 1
                has_run = has_run or bool(progress.running or progress.ended)
                if not has_run and rounds % round(_WAITING_SECONDS / _CHECK_SECONDS) == 0:
                    reason = waiting()
                    if reason and reason != waited_for:
                        view.notice(reason)
                    waited_for = reason
                if progress.held != held:
                    held = progress.held
                    view.notice(f"{held}; nothing more starts until it can be" if held else "continuing")
                if stop.requested and not passed_on:
                    passed_on = True
                    view.notice("stopping at the next step; finished files are kept (Ctrl-C again terminates at once)")
                    jobs.cancel()
        except Exception as error:
            errors.append(error)

    view.update(jobs.progress())
    thread = threading.Thread(target=watch, name="watch jobs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if errors:
        raise errors[0]


def _print_summary(
    console: Console, run: CommandRun, noun: str, failures: Sequence[JobFailure], summary: Summary | None
) -> None:
    """Print the summary."""
    if summary is not None:
        if summary.tasks:
            show(console, summary_table(summary))
            console.print()
        say(console, _headline(summary, noun), "bold")
        for line in (*memory_lines(summary.tasks), *lost_lines(summary), *resumed_lines(summary.tasks)):
            say(console, line, "yellow")
    _print_internal_error(console, failures)


def _print_sheet(console: Console, run: CommandRun, noun: str, place: OutputPlace) -> None:
    """Draw the contact sheet and print where it is, or why there is none: it never hides what happened before."""
    try:
        if place.has_outputs():
            sheet = place.contact_sheet()
            say(console, f"{noun}s: {run.output}" + ("" if sheet is None else f"   contact sheet: {sheet}"))
    except OutputFailed as problem:
        say(console, f"no contact sheet: {problem}", "yellow")


def _print_reasons(console: Console, whys: Mapping[int, str], jobs: int) -> None:
    """Print where jobs ran and why; `whys` of all `jobs` with an output."""
    if whys:
        say(console, "where each job ran, and why:", "bold")
    for place in sorted(whys):
        say(console, f"job {place + 1}: {whys[place]}", "dim")
    if jobs > len(whys):
        say(console, f"... and {counted(jobs - len(whys), 'more job')}; the manifest lists all", "dim")


def memory_lines(tasks: Sequence[TaskSummary]) -> list[str]:
    """Return notes about runs that were split or that ran out of memory before they succeeded."""
    mine = [task for task in tasks if not task.shared]
    divided = Counter(f"{task.stage.value} by {task.divided}" for task in mine if task.divided)
    rungs = Counter(", ".join(task.rungs) for task in mine if task.rungs)
    lines = [f"{how}: {counted(count, 'run')}, due to limited GPU memory" for how, count in divided.items()]
    return lines + [
        f"out of GPU memory in {counted(count, 'run')}; resolved by: {what}" for what, count in rungs.items()
    ]


def lost_lines(summary: Summary) -> list[str]:
    """Return notes about runs that were lost with their worker and repeated, for each reason."""
    return [f"lost and repeated: {counted(count, 'run')}, {reason}" for reason, count in summary.lost_runs()]


def resumed_lines(tasks: Sequence[TaskSummary]) -> list[str]:
    """Return notes about runs that resumed from what an earlier run had saved, for each step."""
    found = Counter(task.resumed for task in tasks if task.resumed and not task.shared)
    return [f"resumed {where}: {counted(count, 'run')}" for where, count in found.items()]


def _headline(summary: Summary, noun: str) -> str:
    parts = [f"{counted(summary.succeeded, noun)} in {duration(summary.seconds)}"]
    if summary.succeeded and summary.seconds > 0:
        rate = summary.succeeded / summary.seconds
        parts[0] += f" ({rate:.2g} per second)" if rate >= 0.1 else f" ({duration(1 / rate)} each)"
    parts += [f"{summary.failed} failed"] if summary.failed else []
    parts += [f"{summary.cancelled} cancelled"] if summary.cancelled else []
    return ", ".join(parts)


def _print_internal_error(console: Console, failures: Sequence[JobFailure]) -> None:
    """Print the first internal error with its traceback; other failures are already explained."""
    ours = [failure for failure in failures if failure.kind is RunErrorKind.INTERNAL and failure.traceback_text]
    if ours:
        say(console, f"First internal error (please report it):\n{ours[0].traceback_text}", "dim")


def _image_line(image: OutputResult) -> str:
    name = image.path.name if image.path else image.url.rpartition("/")[2] or image.recipe.prompt
    return f"{name}  {image.worker}  {duration(image.seconds)}"


def _failure_line(one: WantedOutput, failure: JobFailure) -> str:
    origin = one.origin or f"image {one.place + 1}: "
    return f"{origin}{one.request.prompt!r} (seed {one.request.seed}): {failure.kind.value}: {failure.message}"
