"""`modelpool why` and `modelpool story`: explain the placement and the event log of one job of a running pool.

For a task that has not started, `why` explains what it waits for, and what the other choices would cost.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from modelpool.actors.cli.terminal import options
from modelpool.actors.cli.terminal.options import PoolOptions
from modelpool.actors.cli.terminal.session import session_of
from modelpool.pool.values.core.errors import UnknownName, UserError, format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from modelpool.actors.cli.terminal.command_ports import Pool
    from modelpool.actors.control.detached.job_service import JobsProgress
    from modelpool.actors.outputs.results.outcomes import PoolLost
    from modelpool.scheduler.core.history import Attempt, JobHistory, TaskHistory
    from modelpool.scheduler.core.waiting_jobs import SubmissionWaits
    from modelpool.scheduler.core.waiting_task import TaskWait
    from modelpool.scheduler.model.placement_record import PlacementOption


def wait_words(now: float, wait: TaskWait) -> str:
    """Return what the task waits for, since when and until when, as a sentence."""
    since = "" if wait.since is None else f", for {now - wait.since:.2f} s so far"
    if wait.until is None:
        until = "; when it will start is unknown"
    else:
        until = f"; should start in {max(0.0, wait.until - now):.2f} s"
    return f"{wait.reason}{since}{until}"


def options_table(wait: TaskWait) -> Table | None:
    """Build the table of the workers that the task could run on, with what it would cost there; None without any."""
    from modelpool.actors.cli.terminal.tables import rows_table

    headings = ["", "worker", "wait", "setup", "run", "together"]
    rows = [_row("waits for it" if option.worker_id == wait.worker_id else "", option) for option in wait.options]
    if wait.evaluated and wait.evaluated != wait.options:
        rows += [_row("at the last placement", option) for option in wait.evaluated]
    return rows_table(headings, rows, right=headings[2:]) if rows else None


def _row(first: str, option: PlacementOption) -> list[str]:
    seconds = (option.wait_seconds, option.extra_seconds, option.run_seconds, option.seconds)
    return [first, str(option.worker_id), *(f"{value:.2f} s" for value in seconds)]


Job = Annotated[
    str,
    typer.Argument(metavar="JOB", help="A job id (see --json, the manifest, top), or a unique part of one."),
]


def why(context: typer.Context, job: Job, as_json: options.AsJson = False, pool: options.PoolName = None) -> None:
    """Show why each task of a job ran where it did, with expected and measured times. JOB may also be a submission of
    several jobs: shows what these wait for, in groups; a pinned model: shows where it is, and why it is on fewer GPUs;
    or a worker: shows why it takes no tasks."""
    from modelpool.actors.cli.cluster.serve import name_of_running
    from modelpool.actors.cli.terminal.screen import print_json, say, user_console
    from modelpool.actors.outputs.results.history_json import history_json

    with session_of(context).open_pool(PoolOptions(pool=pool or name_of_running())) as running:
        status = running.status()
        worker = next((worker for worker in status.workers if worker.id == job), None)
        if worker is not None:
            if as_json:
                print_json(sys.stdout, dataclasses.asdict(worker))
            else:
                reasons = worker.order_words or worker.not_up or worker.trouble
                say(user_console(sys.stdout), f"worker {worker.id} is {worker.state}{reasons and f': {reasons}'}")
            return
        pinned = next((pinned for pinned in status.pins if pinned.model == job), None)
        if pinned is not None:
            if as_json:
                print_json(sys.stdout, dataclasses.asdict(pinned))
            else:
                say(user_console(sys.stdout), f"{pinned.model} is pinned: {pinned.words}")
            return
        try:
            history = running.history(job)
        except UnknownName as unknown:
            waits, progress, lost = _submission(running, job)
            if waits is None and progress is None:
                raise (lost or unknown) from unknown
            _print_submission(waits, progress, as_json, "" if lost is None else str(lost))
            return
    if as_json:
        print_json(sys.stdout, history_json(history))
    else:
        _print_why(user_console(sys.stdout), history)


def story(context: typer.Context, job: Job, as_json: options.AsJson = False, pool: options.PoolName = None) -> None:
    """Show the event log of a job and its tasks, oldest first."""
    from modelpool.actors.cli.terminal.screen import print_json, say, show, user_console
    from modelpool.actors.cli.terminal.tables import rows_table

    history = _history(context, job, pool)
    if as_json:
        for line in history.lines:
            print_json(sys.stdout, dataclasses.asdict(line))
        return
    console = user_console(sys.stdout)
    say(console, headline(history), "bold")
    names = {str(history.job_id): "job", **task_names(history)}
    since = history.submitted_at if history.submitted_at is not None else history.at
    when = "when" if history.submitted_at is not None else "relative to now"
    rows = [
        (
            f"{line.at - since:+.3f} s",
            names.get(line.subject, line.subject),
            _move(line.before, line.after),
            cause,
            note,
        )
        for line in history.lines
        for cause, note in [(_shortened(line.cause, names), _shortened(line.note, names))]
    ]
    if rows:
        show(console, rows_table([when, "what", "became", "because", "note"], rows, right=[when]))


def task_names(history: JobHistory) -> dict[str, str]:
    """Return the display names of a job's tasks: the stage, numbered if there are several of it."""
    several = Counter(task.stage for task in history.tasks)
    seen: Counter[Enum] = Counter()
    names: dict[str, str] = {}
    for task in history.tasks:
        seen[task.stage] += 1
        number = f" {seen[task.stage]}" if several[task.stage] > 1 else ""
        names[task.task_id] = f"{task.stage.value}{number}"
    return names


def headline(history: JobHistory) -> str:
    """Summarise the job in one line."""
    text = f"job {history.job_id}: {history.status}"
    if history.submitted_at is not None:
        until = history.at if history.ended_at is None else history.ended_at
        took = f"{until - history.submitted_at:.2f} s"
        text += f" for {took}" if history.ended_at is None else f" after {took}"
    qos = _qos_terms(history)
    text += f" ({', '.join(qos)})" if qos else ""
    note = history.note.removeprefix(history.status).removeprefix(": ")
    text += f": {note}" if note else ""
    if history.submitted_at is None:
        text += f"; {'submission time' if history.tasks else 'event log'} no longer available"
    return text


def batch_words(history: JobHistory) -> str:
    """Return in passes of how many images a job runs, and why."""
    images = "1 image" if history.batch_size == 1 else f"{history.batch_size} images"
    return f"in passes of {images}: {history.batch_reason or 'as the request says'}"


def _qos_terms(history: JobHistory) -> list[str]:
    """Return the scheduling terms of the job; a deadline counts from submission, or from now if that time is
    unknown.
    """
    qos = [f"user {history.user}"] if history.user else []
    qos += [f"priority {history.priority}"] if history.priority else []
    if history.deadline is None:
        return qos
    if history.submitted_at is not None:
        return [*qos, f"deadline after {history.deadline - history.submitted_at:.1f} s"]
    left = history.deadline - history.at
    return [*qos, f"deadline in {left:.1f} s" if left >= 0 else f"deadline {-left:.1f} s ago"]


def _history(context: typer.Context, job: str, pool: str | None) -> JobHistory:
    from modelpool.actors.cli.cluster.serve import name_of_running

    with session_of(context).open_pool(PoolOptions(pool=pool or name_of_running())) as running:
        return running.history(job)


def _submission(running: Pool, name: str) -> tuple[SubmissionWaits | None, JobsProgress | None, PoolLost | None]:
    """Return why the jobs of a submission in the pool have not ended, and the progress of the submission in the
    journal; each is None if the pool does not know it. The last value says why the journal could not be asked."""
    from modelpool.actors.outputs.results.outcomes import PoolLost

    try:
        progress = running.attach(name).progress()
    except UserError:  # it was not handed over, or the pool has no journal
        return running.waits(name), None, None
    except PoolLost as lost:  # the job service: the controller may know the submission
        return running.waits(name), None, lost
    return running.waits(progress.record.submission_id), progress, None


def _print_submission(waits: SubmissionWaits | None, progress: JobsProgress | None, as_json: bool, lost: str) -> None:
    """`lost`: why the journal could not be asked."""
    from modelpool.actors.cli.terminal.screen import counted, print_json, say, show, user_console
    from modelpool.actors.cli.terminal.submission_lines import plain_record, progress_line
    from modelpool.actors.cli.terminal.tables import rows_table

    groups = () if waits is None else waits.groups
    explained = 0 if waits is None else waits.jobs
    unexplained = 0 if progress is None else max(0, progress.record.pending - explained)
    # what the pool has taken, and the scheduler does not know yet, or no more
    not_queued = 0 if progress is None else min(unexplained, max(0, progress.in_pool - explained))
    in_journal = unexplained - not_queued
    if as_json:
        named = {"submission": waits.submission} if waits is not None else {}
        record = {} if progress is None else plain_record(progress.record)
        named |= {"submission": progress.record.submission_id} if progress is not None else {}
        values = {"groups": [dataclasses.asdict(group) for group in groups], "not_queued": not_queued}
        values["in_journal"] = None if lost else in_journal
        values |= {"trouble": lost} if lost else {}
        print_json(sys.stdout, {**named, **record, **values})
        return
    console = user_console(sys.stdout)
    if progress is not None:
        say(console, progress_line(progress), "bold")
    elif waits is not None:
        say(console, f"{waits.submission}: {counted(waits.jobs, 'job')} in the pool", "bold")
    rows = [(str(group.count), group.detail or group.reason, str(group.first)) for group in groups]
    if not_queued:
        rows.append((str(not_queued), "in the pool: about to begin, or their outputs are being written", ""))
    if in_journal:
        trouble = progress.record.trouble if progress is not None else ""
        rows.append((str(in_journal), trouble or "in the journal, until the pool takes more", ""))
    if rows:
        headings = ["jobs", "why they have not ended, with the figures of the first", "first"]
        show(console, rows_table(headings, rows, right=["jobs"]))
    if lost:
        say(console, f"{lost}; what the pool does not have of this submission is not shown", "yellow")


def _print_why(console: Console, history: JobHistory) -> None:
    from modelpool.actors.cli.terminal.screen import say, show

    say(console, headline(history), "bold")
    if history.batch_size > 1 or history.batch_reason:
        say(console, batch_words(history))
    names = task_names(history)
    for task in history.tasks:
        if not task.attempts and task.wait is None:
            say(console, f"\n{names[task.task_id]}: {_without_attempts(history, task)}")
        for attempt in task.attempts:
            say(console, f"\n{names[task.task_id]}: {_started(history, task, attempt)}")
            show(console, _numbers(attempt))
        if task.wait is not None:
            say(console, f"\n{names[task.task_id]}: {_shortened(wait_words(history.at, task.wait), names)}")
            if (table := options_table(task.wait)) is not None:
                show(console, table)


def _without_attempts(history: JobHistory, task: TaskHistory) -> str:
    """Explain why a task has no attempts."""
    if history.status == "succeeded":
        return "did not run: an earlier job had already produced its result"
    if history.status == "active":
        return "its result exists, from a run that is no longer in the history"
    return "did not run" if history.complete else "is no longer needed"


def _started(history: JobHistory, task: TaskHistory, attempt: Attempt) -> str:
    if history.submitted_at is None:
        when = f"{history.at - attempt.at:.2f} s ago"
    elif attempt.at >= history.submitted_at:
        when = f"{attempt.at - history.submitted_at:.2f} s after submission"
    else:
        when = f"{history.submitted_at - attempt.at:.2f} s before submission, for an earlier job"
    again = f", attempt {attempt.attempt}" if attempt.attempt > 1 else ""
    choice = attempt.why
    among = f"{choice.idle} idle and {choice.busy} busy"
    because = choice.note or choice.rule.value
    batched = 1 if attempt.cost is None else attempt.cost.batched
    again += f", batch of {batched} tasks" if batched > 1 else ""
    if attempt.cost is not None and attempt.cost.steps_before:
        again += f", resumed after step {attempt.cost.steps_before} of {attempt.cost.steps}"
    if attempt.cost is not None and attempt.cost.exchanged_bytes:
        held, got = format_bytes(attempt.cost.share_bytes), format_bytes(attempt.cost.exchanged_bytes)
        again += f", held {held} of weights for its gang and received {got} from other GPUs"
    node = f" on {attempt.node}" if attempt.node else ""
    text = f"{attempt.worker_id}{node}{again}, {when}, of {among}, because {because}: {attempt.end.replace('_', ' ')}"
    return f"{text} ({attempt.error.message})" if attempt.error is not None else text


def _numbers(attempt: Attempt) -> Table:
    """Build the table of expected and measured times, with the candidates that were not chosen."""
    from modelpool.actors.cli.terminal.tables import rows_table

    headings = ["", "worker", "wait", "setup", "run", "together", "uploaded", "streamed", "patch switches"]
    choice = attempt.why
    moved = [format_bytes(choice.upload_bytes), format_bytes(choice.streamed_bytes), str(choice.switches)]
    rows = [["expected", *_seconds(choice.chosen), *moved]]
    if attempt.cost is not None and attempt.ended_at is not None:
        rows.append(_measured(attempt, attempt.ended_at))
    rows += [["instead of", *_seconds(other), "", "", ""] for other in choice.others]
    return rows_table(headings, rows, right=headings[2:])


def _measured(attempt: Attempt, ended_at: float) -> list[str]:
    cost = attempt.cost
    assert cost is not None, "only runs that ended with a report are measured"
    times = ["", f"{cost.load_seconds:.2f} s", f"{cost.run_seconds:.2f} s", f"{ended_at - attempt.at:.2f} s"]
    moved = [format_bytes(cost.uploaded_bytes), format_bytes(cost.streamed_bytes), str(cost.patch_switches)]
    return ["measured", str(attempt.worker_id), *times, *moved]


def _seconds(candidate: PlacementOption) -> list[str]:
    seconds = (candidate.wait_seconds, candidate.extra_seconds, candidate.run_seconds, candidate.seconds)
    return [str(candidate.worker_id), *(f"{value:.2f} s" for value in seconds)]


def _move(before: str, after: str) -> str:
    if before == after:
        return f"stays {after}"
    return f"{before} -> {after}" if before else after


def _shortened(text: str, names: dict[str, str]) -> str:
    """Replace complete ids in `text` by display names."""
    ids = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.sub(rf"(?<![\w-])({ids})(?![\w-])", lambda found: names[found[0]], text)
