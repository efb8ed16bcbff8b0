"""Runs requests and reports the results; shared by all commands that generate.

Knows the pool through its protocol, and what users and programs read; not where requests come from. Rules
1. An image is safe as soon as it is finished: stopping loses only running images.
2. `--json` prints one object per image, in the order in which they finish, and nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO

from modelpool.actors.cli.run.checked_requests import CheckedRequests, WantedOutput, WantedOutputs
from modelpool.actors.cli.run.preview_file import preview_file, writer_of
from modelpool.actors.cli.run.progress_view import View, view_for
from modelpool.actors.cli.terminal.interrupts import StopRequest
from modelpool.actors.cli.terminal.open_pool import checked_output
from modelpool.actors.cli.terminal.screen import (
    counted,
    duration,
    json_on_stdout,
    print_json,
    say,
    show,
    spinner,
    user_console,
)
from modelpool.actors.cli.terminal.tables import summary_table
from modelpool.actors.graph.features.recorded_batches import SubmittedBatches
from modelpool.actors.request.labels import labels_of
from modelpool.pool.values.core.errors import OutputFailed, UserError
from modelpool.pool.values.specs.spec import RunErrorKind

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from modelpool.actors.cli.terminal.command_ports import Pool, PoolJobs
    from modelpool.actors.cli.terminal.options import OutputOptions, PoolOptions
    from modelpool.actors.cli.terminal.session import Session
    from modelpool.actors.config.output_address import OutputAddress
    from modelpool.actors.control.status_values import WorkerStatus
    from modelpool.actors.outputs.place import KeptImage, OutputPlace
    from modelpool.actors.outputs.results.outcomes import JobFailure, OutputResult, Summary, TaskSummary
    from modelpool.actors.outputs.results.progress import Progress
    from modelpool.actors.request.requests import GenerateRequest

EXIT_FAILED = 1
#: interval of drawing a display and of noticing a stop request
_CHECK_SECONDS = 0.1
#: interval of asking what the pool waits for while nothing runs yet
_WAITING_SECONDS = 2.0
#: what users of a pool without GPUs must know: its images are right, and its times are not a GPU's
SIMULATED = "The GPUs of this pool are simulated: the CPU computes, slowly (`modelpool doctor` shows why)."
#: number of jobs with a printed placement, the first that end; the manifest has all
MOST_WHYS = 40


@dataclass(frozen=True, slots=True)
class CommandRun:
    """Decisions of a command before anything is generated.

    resume          skip outputs that exist in `output`
    resume_command  the command line that generates the rest after a stop
    all_or_nothing  one impossible request is an error, and nothing starts before all are checked; otherwise requests
                    start while later ones are read, and impossible ones are reported
    print_reasons   print at the end where each job ran and why
    name            template of the names of files; None for the pool's, or the usual names
    preview         file that the newest preview is written to; None: no previews are made
    """

    wanted: WantedOutputs
    output: OutputAddress
    resume: bool
    as_json: bool
    resume_command: str
    all_or_nothing: bool = False
    print_reasons: bool = False
    name: str | None = None
    preview: Path | None = None


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How a command outputs requests that it knows completely before it generates any; checked before a pool is
    started."""

    options: OutputOptions
    output: OutputAddress
    preview: Path | None

    @classmethod
    def of(cls, options: OutputOptions, where: PoolOptions) -> OutputPlan:
        """Check the options but for the template of names, which needs a request. Raises UserError, and
        OutputFailed."""
        preview = None if options.preview is None else preview_file(options.preview)
        return cls(options, checked_output(where, options.out), preview)

    def run(self, requests: Iterable[GenerateRequest], resume_command: str, pool: Pool) -> int:
        """Generate all of these requests, or none if one is impossible; see `run_requests`."""
        wanted = WantedOutputs.of(tuple(itertools.starmap(WantedOutput, enumerate(requests))))
        run = CommandRun(
            wanted,
            self.output,
            self.options.resume,
            self.options.as_json,
            resume_command,
            all_or_nothing=True,
            name=self.options.name,
            preview=self.preview,
        )
        return run_requests(run, pool)


@contextlib.contextmanager
def started(session: Session, options: PoolOptions, console: Console | None = None) -> Iterator[Pool]:
    """Open a pool for the duration of a command. Prints that it is starting, which takes a few seconds, on `console`
    if other threads print there meanwhile.
    """
    console = console or user_console()
    text = f"joining pool {options.pool}" if options.pool else "starting the pool (Ray, then its controller)"
    if not console.is_terminal:
        say(console, text)
    with spinner(console, text) if console.is_terminal else contextlib.nullcontext():
        pool = session.open_pool(options)
    try:
        with pool:
            if session.simulates(options) or (options.pool and _has_simulated_gpus(pool)):
                say(console, SIMULATED, "yellow")
            yield pool
    except KeyboardInterrupt:
        say(console, "modelpool: interrupted", "yellow")
        raise


def _has_simulated_gpus(pool: Pool) -> bool:
    devices = [worker.device for worker in pool.status().workers if worker.device]
    return bool(devices) and all(device.startswith("sim:") for device in devices)


def run_requests(run: CommandRun, pool: Pool, console: Console | None = None) -> int:
    """Generate what `run` wants and is missing; return the exit code. Raises UserError, and PoolLost after printing
    finished outputs and how to resume. Creates the output folder when the first request is accepted.
    """
    from modelpool.actors.outputs.open_outputs import opened_if_exists
    from modelpool.actors.outputs.results.outcomes import PoolLost

    console = console or user_console()
    place = opened_if_exists(run.output)
    if place is not None:
        print_damaged_lines(console, place)
    finished = place.kept() if run.resume and place is not None else {}
    failed = frozenset(each.key for each in place.failures()) if run.resume and place is not None else frozenset()
    recorded = {} if place is None else place.batch_sizes()
    batches = SubmittedBatches(recorded, run.wanted.count)
    with StopRequest() as stop:
        with json_on_stdout() if run.as_json else contextlib.nullcontext() as stream:
            report = _Report(console, run, stream)
            checked = CheckedRequests(
                run.wanted, finished, report.kept, report.refused, report.checked, failed, batches.sizes
            )
            try:
                failures, summary, whys = _make(run, pool, checked, stop, report, batches)
            except PoolLost:
                place = place or _opened_after(console, run, checked)
                _print_place(console, run, checked.noun, place)
                say(console, f"The pool has ended; finished files are kept. To resume: {run.resume_command}", "yellow")
                _print_sheet(console, place)
                if stop.requested:  # the signal may have ended the pool too: Slurm signals every process of a job
                    return stop.exit_code
                raise
        if place is not None and checked.is_complete and not checked.accepted_count:
            place.finish()  # nothing was written, but the last run may have ended before its last shard
        if run.print_reasons:
            _print_reasons(console, whys, 0 if summary is None else summary.succeeded)
        _print_summary(console, checked, failures, summary)
        place = place or _opened_after(console, run, checked)
        _print_place(console, run, checked.noun, place)
        code = _print_end(console, run, checked, failures, summary, stop)
        _print_sheet(console, place)
    return code


class _Report:
    """Prints the results and decisions of one run, from any thread."""

    def __init__(self, console: Console, run: CommandRun, stream: TextIO | None) -> None:
        self.console = console
        self._run = run
        self._stream = stream
        self._lock = threading.Lock()

    def finished(self, one: WantedOutput, image: OutputResult) -> None:
        """Print a new output for programs."""
        if self._stream is not None:
            self._print(image_json(one, image))

    def kept(self, one: WantedOutput, kept: KeptImage) -> None:
        """Print an output that existed already, for programs."""
        if self._stream is not None:
            self._print(kept_json(one, kept))

    def refused(self, one: WantedOutput, problem: UserError) -> None:
        """Print why a request is impossible. Raises that if one such request is an error."""
        if self._run.all_or_nothing:
            raise problem
        say(self.console, f"{one.origin}{problem}", "red")

    def checked(self, requests: CheckedRequests) -> None:
        """Print how many outputs existed already, and how many lines are invalid."""
        if requests.kept_count:
            already = "is" if requests.kept_count == 1 else "are"
            kept = counted(requests.kept_count, requests.noun)
            say(self.console, f"{kept} {already} already in {self._run.output} and skipped")
        if requests.tried_again_count:
            failed = counted(requests.tried_again_count, requests.noun)
            again = "is" if requests.tried_again_count == 1 else "are"
            say(self.console, f"{failed} failed in an earlier run and {again} tried again")
        for chosen, count in requests.chosen_batches.items():
            each = counted(chosen.size, "image")
            which = f"{counted(count, requests.noun)} of {chosen.model} at {chosen.width}x{chosen.height}"
            say(self.console, f"{which}: {each} per forward pass, {chosen.reason}", "dim")
        if requests.invalid_lines:
            valid = requests.valid_line_count
            say(self.console, f"{requests.source}: {requests.invalid_lines}, {valid} valid", "red")

    def _print(self, value: Mapping[str, Any]) -> None:
        assert self._stream is not None, "JSON is printed to a stream"
        with self._lock:
            print_json(self._stream, value)


def print_damaged_lines(console: Console, place: OutputPlace) -> None:
    """Print how many lines of the manifest of `place` are skipped, and why the first is."""
    if place.damaged_line_count:
        count = counted(place.damaged_line_count, "damaged line")
        say(console, f"{place.manifest_path}: {count} skipped, the first at {place.damaged_lines[0]}", "yellow")


def image_json(one: WantedOutput, image: OutputResult) -> dict[str, Any]:
    """Return a finished image, video or audio clip as JSON values."""
    from modelpool.actors.outputs.folder import pixels_sha256, plain
    from modelpool.actors.outputs.results.outcomes import array_of_result

    return {
        "index": one.place,
        **labels_of(one.request).as_json(),
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
        **labels_of(one.request).as_json(),
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
    run: CommandRun,
    pool: Pool,
    checked: CheckedRequests,
    stop: StopRequest,
    report: _Report,
    batches: SubmittedBatches,
) -> tuple[Sequence[JobFailure], Summary | None, dict[int, str]]:
    """Generate missing outputs; return the failures, the summary if anything ran, and where each job ran, by place."""
    jobs = pool.submit_stream(
        checked.chunks(),
        checked.decide,
        output=run.output,
        name=run.name,
        hold=run.all_or_nothing,
        on_preview=None if run.preview is None else writer_of(run.preview),
        batches=batches,
    )

    def reason() -> str:
        return waiting_for(pool, checked.waits_for)

    failures, whys = _follow(jobs, checked, view_for(report.console), stop, report, reason)
    return failures, jobs.summary() if checked.accepted_count else None, whys


def waiting_for(pool: Pool, check_waits_for: str = "") -> str:
    """Return what a submission of which nothing runs yet waits for: GPUs, the check of its requests, which itself waits
    for `check_waits_for`, or the start of a worker. "" if one is up, and if nothing is known.
    """
    status = pool.status()
    is_up = any(worker.state in ("idle", "busy") for worker in status.workers)
    if not is_up and status.waiting_for:
        return status.waiting_for
    return check_waits_for or ("" if is_up else _start_of_workers(status.workers))


def _start_of_workers(workers: Sequence[WorkerStatus]) -> str:
    """Return how far the workers of a pool without any that is up are; "" if none starts."""
    starting = [worker for worker in workers if worker.state == "starting"]
    if not starting:
        return ""
    which = "the worker loads" if len(workers) == 1 else f"worker 1 of {len(workers)} loads"
    troubles = "".join(f"; {worker.id}: {worker.not_up}" for worker in starting if worker.trouble)
    return f"waiting: {which} torch and opens its device{troubles}"


def _follow(
    jobs: PoolJobs,
    checked: CheckedRequests,
    view: View,
    stop: StopRequest,
    report: _Report,
    waiting: Callable[[], str],
) -> tuple[Sequence[JobFailure], dict[int, str]]:
    """Print results until all jobs have ended. Return the failures without cancelled ones, and where each of the
    others ran, by place.
    """
    from modelpool.actors.outputs.results.outcomes import JobFailure, OutputResult, where_and_why
    from modelpool.actors.outputs.results.packed_list import PackedList

    failures: PackedList[JobFailure] = PackedList()
    whys: dict[int, str] = {}
    with view, _watched(jobs, checked, view, stop, waiting):
        for result in jobs.results():
            if isinstance(result, JobFailure) and result.cancelled:  # some were not even accepted
                checked.drop(result.index)
                continue
            one = checked.take(result.index)
            if isinstance(result, OutputResult):
                view.image(_image_line(result))
                if len(whys) < MOST_WHYS:
                    whys[one.place] = where_and_why(result.tasks)
                report.finished(one, result)
            else:
                failures.append(result)
                view.failure(f"failed: {_failure_line(one, result)}")
    return failures, whys


@contextlib.contextmanager
def _watched(
    jobs: PoolJobs, checked: CheckedRequests, view: View, stop: StopRequest, waiting: Callable[[], str]
) -> Iterator[None]:
    """Draw progress and forward a stop request, from a thread, while the caller waits for results. Until something
    runs, print what the pool waits for when that changes.

    Errors of the thread are raised at the end.
    """
    ended = threading.Event()
    errors: list[Exception] = []

    def progress_so_far() -> Progress:
        progress = jobs.progress()
        return replace(progress, total=max(progress.total, checked.expected_count))

    def watch() -> None:
        passed_on, has_run, waited_for, held, rounds = False, False, "", "", 0
        try:
            while not ended.wait(_CHECK_SECONDS):
                progress = progress_so_far()
                view.update(progress, checked.words)
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

    view.update(progress_so_far(), checked.words)
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
    console: Console, checked: CheckedRequests, failures: Sequence[JobFailure], summary: Summary | None
) -> None:
    """Print the summary. Invalid lines are counted in it: what was printed about them is far above."""
    if summary is None and checked.invalid_lines:
        say(console, f"nothing to generate, {checked.invalid_lines}", "bold")
    if summary is not None:
        if summary.tasks:
            show(console, summary_table(summary))
            console.print()
        say(console, ", ".join(filter(None, (_headline(summary, checked.noun), checked.invalid_lines))), "bold")
        for line in (*memory_lines(summary.tasks), *lost_lines(summary), *resumed_lines(summary.tasks)):
            say(console, line, "yellow")
    _print_internal_error(console, failures)


def _print_end(
    console: Console,
    run: CommandRun,
    checked: CheckedRequests,
    failures: Sequence[JobFailure],
    summary: Summary | None,
    stop: StopRequest,
) -> int:
    """Print how to resume if something is missing; return the exit code."""
    if any(failure.kind is RunErrorKind.OUTPUT for failure in failures):
        say(console, f"Some files could not be written. To resume: {run.resume_command}", "yellow")
        return EXIT_FAILED
    if stop.requested and (not checked.is_complete or (summary is not None and summary.cancelled)):
        say(console, f"Stopped. To resume: {run.resume_command}", "yellow")
        return stop.exit_code
    return EXIT_FAILED if failures or checked.failed_count else 0


def _opened_after(console: Console, run: CommandRun, checked: CheckedRequests) -> OutputPlace | None:
    """Return the place of outputs after the run, if there is one; None, with a line about it, if it cannot be written
    to: the disk may be full since, which is no failure of what was written."""
    from modelpool.actors.outputs.open_outputs import opened_if_exists

    try:
        return opened_if_exists(run.output)
    except OutputFailed as problem:
        say(console, f"{checked.noun}s: {run.output}")
        say(console, f"no contact sheet: {problem}", "yellow")
        return None


def _print_place(console: Console, run: CommandRun, noun: str, place: OutputPlace | None) -> None:
    """Print where the outputs are."""
    with contextlib.suppress(OutputFailed):  # the contact sheet fails in the same way, and its line says so
        if place is not None and place.has_outputs():
            say(console, f"{noun}s: {run.output}")


def _print_sheet(console: Console, place: OutputPlace | None) -> None:
    """Draw the contact sheet and print where it is, or why there is none. Call it after everything else is printed:
    drawing takes seconds.
    """
    try:
        if place is not None and place.has_outputs() and (sheet := place.contact_sheet()) is not None:
            say(console, f"contact sheet: {sheet}")
    except OutputFailed as problem:
        say(console, f"no contact sheet: {problem}", "yellow")


def _print_reasons(console: Console, whys: Mapping[int, str], jobs: int) -> None:
    """Print where jobs ran and why; `whys` of all `jobs` with an output."""
    if whys:
        say(console, "where each job ran, and why:", "bold")
    for place in sorted(whys):
        say(console, f"job {place}: {whys[place]}", "dim")
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
    is_ours = (each for each in failures if each.kind is RunErrorKind.INTERNAL and each.traceback_text)
    if (first := next(is_ours, None)) is not None:
        say(console, f"First internal error (please report it):\n{first.traceback_text}", "dim")


def _image_line(image: OutputResult) -> str:
    name = image.path.name if image.path else image.url.rpartition("/")[2] or image.recipe.prompt
    return f"{name}  {image.worker}  {duration(image.seconds)}"


def _failure_line(one: WantedOutput, failure: JobFailure) -> str:
    origin = one.origin or f"image {one.place}: "
    return f"{origin}{one.request.prompt!r} (seed {one.request.seed}): {failure.kind.value}: {failure.message}"
