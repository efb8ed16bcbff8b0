"""Makes what was asked for and tells how it went: shared by `generate` and `batch`.

Knows the pool through its port, and what people and programs want to read; not where requests come from. Rules
1. An image is safe as soon as it is finished: stopping loses only what is under way.
2. `--json` prints one object an image, in the order in which they finish, and nothing else.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from modelpool.actors.cli.interrupts import EXIT_INTERRUPTED, StopRequest
from modelpool.actors.cli.progress_view import View, view_for
from modelpool.actors.cli.screen import counted, duration, json_on_stdout, people_console, print_json, say, show
from modelpool.actors.cli.tables import summary_table
from modelpool.pool.core.errors import UserError
from modelpool.pool.specs.spec import RunErrorKind

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from modelpool.actors.cli.options import PoolOptions
    from modelpool.actors.cli.ports import Jobs, Pool
    from modelpool.actors.cli.session import Session
    from modelpool.actors.outputs.folder import KeptImage
    from modelpool.actors.request.requests import GenerateRequest
    from modelpool.actors.results.outcomes import JobFailure, MadeResult, Summary, TaskSummary

EXIT_FAILED = 1
#: how often a display is drawn and a request to stop is noticed
_LOOK_SECONDS = 0.1
#: jobs of which is told where they ran: the first that end. The manifest has it of all
MOST_WHYS = 40


@dataclass(frozen=True, slots=True)
class Wanted:
    """One image to have at the end. `place` is its number among all, from 0; `origin` is where it was asked for."""

    place: int
    request: GenerateRequest
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Sorted:
    """What is wanted, by what there is to do about it."""

    to_make: tuple[Wanted, ...]
    kept: tuple[tuple[Wanted, KeptImage], ...]
    #: with what is wrong
    refused: tuple[tuple[Wanted, str], ...]
    #: what each of them is: image, video, audio, or file where they are not all the same
    noun: str = "image"


@dataclass(frozen=True, slots=True)
class Run:
    """All that a command decided before anything is made.

    resume          leave out images that are in `output` already
    refused         how many could not even be asked for (that was told already)
    how_to_go_on    the command line that makes the rest after Ctrl-C
    all_or_nothing  one request that cannot be asked for is an error; otherwise the others are made
    tell_why        say at the end where each job ran and why there
    """

    wanted: tuple[Wanted, ...]
    output: Path
    resume: bool
    as_json: bool
    how_to_go_on: str
    refused: int = 0
    all_or_nothing: bool = False
    tell_why: bool = False


@contextlib.contextmanager
def started(session: Session, options: PoolOptions) -> Iterator[Pool]:
    """A pool for the time of a command. Says that it is being started, which takes a few seconds."""
    console = people_console()
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


def sort_wanted(wanted: Sequence[Wanted], pool: Pool, finished: Mapping[str, KeptImage]) -> Sorted:
    """Ask the pool what each request means, and look whether its image is there."""
    to_make: list[Wanted] = []
    kept: list[tuple[Wanted, KeptImage]] = []
    refused: list[tuple[Wanted, str]] = []
    nouns: set[str] = set()
    for one, recipe in zip(wanted, pool.recipes([one.request for one in wanted]), strict=True):
        if isinstance(recipe, UserError):
            refused.append((one, str(recipe)))
            continue
        nouns.add("video" if recipe.frames else "audio" if recipe.seconds else "image")
        if recipe.digest in finished:
            kept.append((one, finished[recipe.digest]))
        else:
            to_make.append(one)
    return Sorted(tuple(to_make), tuple(kept), tuple(refused), nouns.pop() if len(nouns) == 1 else "file")


def make_all(run: Run, pool: Pool) -> int:
    """Make what `run` wants and is not there; the exit code. Raises UserError, and PoolLost when it has told what stays
    and how to go on."""
    from modelpool.actors.outputs.folder import OutputFolder
    from modelpool.actors.results.outcomes import PoolLost

    console = people_console()
    folder = OutputFolder(run.output)
    plan = sort_wanted(run.wanted, pool, folder.kept() if run.resume else {})
    for one, message in plan.refused:
        if run.all_or_nothing:
            raise UserError(message)
        say(console, f"{one.origin}{message}", "red")
    if plan.kept:
        already = "is" if len(plan.kept) == 1 else "are"
        say(console, f"{counted(len(plan.kept), plan.noun)} {already} in {run.output} already, and left as found")
    with StopRequest() as stop:
        try:
            with json_on_stdout() if run.as_json else contextlib.nullcontext() as stream:
                failures, summary, whys = _make(run, pool, plan, stop, stream)
        except PoolLost:
            _tell(console, run, plan.noun, folder.contact_sheet() if folder.finished() else None, (), None)
            say(console, f"The pool has ended; what is finished stays. To go on: {run.how_to_go_on}", "yellow")
            raise
        if run.tell_why:
            _tell_whys(console, whys, 0 if summary is None else summary.succeeded)
        _tell(console, run, plan.noun, folder.contact_sheet() if folder.finished() else None, failures, summary)
    if summary is not None and summary.cancelled:
        say(console, f"Stopped. To go on: {run.how_to_go_on}", "yellow")
        return EXIT_INTERRUPTED
    return EXIT_FAILED if failures or plan.refused or run.refused else 0


def image_json(one: Wanted, image: MadeResult) -> dict[str, Any]:
    """What a program learns of a finished image, video or audio."""
    from modelpool.actors.outputs.folder import pixels_sha256, plain
    from modelpool.actors.results.outcomes import array_of_result

    return {
        "index": one.place,
        "job": image.job_id,
        "prompt": image.recipe.prompt,
        "seed": image.seed,
        "path": str(image.path) if image.path else None,
        "sha256": pixels_sha256(array_of_result(image)),
        "worker": image.worker,
        "seconds": round(image.seconds, 4),
        "skipped": False,
        "recipe": image.recipe.as_json(),
        "tasks": [plain(task) for task in image.tasks],
    }


def kept_json(one: Wanted, kept: KeptImage) -> dict[str, Any]:
    """The same of an image that was there already."""
    return {
        "index": one.place,
        "job": kept.entry.get("job_id"),
        "prompt": kept.recipe.prompt,
        "seed": kept.recipe.seed,
        "path": str(kept.path),
        "sha256": kept.pixels_sha256,
        "worker": kept.entry["worker"],
        "seconds": kept.entry["seconds"],
        "skipped": True,
        "recipe": kept.recipe.as_json(),
        "tasks": kept.entry["tasks"],
    }


def _make(
    run: Run, pool: Pool, plan: Sorted, stop: StopRequest, stream: TextIO | None
) -> tuple[list[JobFailure], Summary | None, dict[int, str]]:
    """Make what is to be made; the failures, the numbers if anything was, and where each job ran, by place."""
    if stream is not None:
        for one, image in plan.kept:
            print_json(stream, kept_json(one, image))
    if not plan.to_make:
        return [], None, {}
    jobs = pool.submit([one.request for one in plan.to_make], output=run.output)
    failures, whys = _follow(jobs, plan.to_make, view_for(people_console()), stop, stream)
    return failures, jobs.summary(), whys


def _follow(
    jobs: Jobs, wanted: Sequence[Wanted], view: View, stop: StopRequest, stream: TextIO | None
) -> tuple[list[JobFailure], dict[int, str]]:
    """Show and print what ends until all has ended. The failures, those that were asked to stop left out, and where
    each of the others ran, by place."""
    from modelpool.actors.results.outcomes import MadeResult, where_and_why

    failures: list[JobFailure] = []
    whys: dict[int, str] = {}
    with view, _watched(jobs, view, stop):
        for result in jobs.results():
            one = wanted[result.index]
            if isinstance(result, MadeResult):
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
def _watched(jobs: Jobs, view: View, stop: StopRequest) -> Iterator[None]:
    """Draw the progress and pass on a request to stop, from a thread: the caller waits for results meanwhile.

    What goes wrong in the thread is raised at the end.
    """
    ended = threading.Event()
    errors: list[Exception] = []

    def watch() -> None:
        passed_on = False
        try:
            while not ended.wait(_LOOK_SECONDS):
                view.update(jobs.progress())
                if stop.asked and not passed_on:
                    passed_on = True
                    view.notice("stopping at the next step; what is finished stays (Ctrl-C again ends at once)")
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


def _tell(
    console: Console,
    run: Run,
    noun: str,
    sheet: Path | None,
    failures: Sequence[JobFailure],
    summary: Summary | None,
) -> None:
    """The end of the story, for people."""
    if summary is not None:
        if summary.tasks:
            show(console, summary_table(summary))
            console.print()
        say(console, _headline(summary, noun), "bold")
        for line in memory_lines(summary.tasks):
            say(console, line, "yellow")
    _tell_internal_error(console, failures)
    if sheet is not None:
        say(console, f"{noun}s: {run.output}   contact sheet: {sheet}")


def _tell_whys(console: Console, whys: Mapping[int, str], jobs: int) -> None:
    """Where jobs ran and why there: `whys` of all the `jobs` that have an image."""
    if whys:
        say(console, "where each job ran, and why there:", "bold")
    for place in sorted(whys):
        say(console, f"job {place + 1}: {whys[place]}", "dim")
    if jobs > len(whys):
        say(console, f"... and {counted(jobs - len(whys), 'job')} more; the manifest says it of each", "dim")


def memory_lines(tasks: Sequence[TaskSummary]) -> list[str]:
    """What a person should know of runs that were divided, or that ran out of memory before they were made."""
    mine = [task for task in tasks if not task.shared]
    divided = Counter(f"{task.stage.value} by {task.divided}" for task in mine if task.divided)
    rungs = Counter(", ".join(task.rungs) for task in mine if task.rungs)
    lines = [f"{how}: {counted(count, 'run')}, for want of GPU memory" for how, count in divided.items()]
    return lines + [f"out of GPU memory in {counted(count, 'run')}; helped: {what}" for what, count in rungs.items()]


def _headline(summary: Summary, noun: str) -> str:
    parts = [f"{counted(summary.succeeded, noun)} in {duration(summary.seconds)}"]
    if summary.succeeded and summary.seconds > 0:
        rate = summary.succeeded / summary.seconds
        parts[0] += f" ({rate:.2g} a second)" if rate >= 0.1 else f" ({duration(1 / rate)} each)"
    parts += [f"{summary.failed} failed"] if summary.failed else []
    parts += [f"{summary.cancelled} not made"] if summary.cancelled else []
    return ", ".join(parts)


def _tell_internal_error(console: Console, failures: Sequence[JobFailure]) -> None:
    """A mistake of ours is shown once with all that is known; other failures have said what they are."""
    ours = [failure for failure in failures if failure.kind is RunErrorKind.INTERNAL and failure.traceback_text]
    if ours:
        say(console, f"The first internal error in full (please report it):\n{ours[0].traceback_text}", "dim")


def _image_line(image: MadeResult) -> str:
    name = image.path.name if image.path else image.recipe.prompt
    return f"{name}  {image.worker}  {duration(image.seconds)}"


def _failure_line(one: Wanted, failure: JobFailure) -> str:
    origin = one.origin or f"image {one.place + 1}: "
    return f"{origin}{one.request.prompt!r} (seed {one.request.seed}): {failure.kind.value}: {failure.message}"
