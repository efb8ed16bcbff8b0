"""What the web page shows of a pool and of the submissions of one owner, as entries of a `LiveBoard`. Pure.

Sections: pool (one entry), workers, models, users, groups, submissions, tasks, ends, samples (`PoolSeries`). Times are
seconds since 1970, so that values of a pool in which nothing happens do not change.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from modelpool.actors.control.detached.records import name_of
from modelpool.actors.http.service.shown_messages import shown_message
from modelpool.actors.http.service.submissions import HttpSubmission, JobEnd
from modelpool.pool.values.specs.spec import ComponentKey, Stage
from modelpool.scheduler.core.snapshot import model_of

if TYPE_CHECKING:
    from modelpool.actors.control.detached.records import SubmissionRecord
    from modelpool.actors.control.status import PoolStatus, ResidentPart, SubmissionStatus, WorkerStatus

#: entries of a section: the page shows no more at a time, and has calls for the others
MOST_SUBMISSIONS, MOST_TASKS, MOST_ENDS, MOST_QUEUES = 60, 200, 48, 30
#: characters of a prompt and of a message
MOST_CHARACTERS = 240
#: the key of the only entry of the section "pool"
POOL_KEY = "pool"
#: `scheduler.core` counts the waiting tasks of each stage
_STAGES = tuple(stage.value for stage in Stage)
#: where submissions come from: this server, the pool's journal (another server, or `modelpool submit`), or another
#: program: this server does not read their results
HERE, JOURNAL, ELSEWHERE = "here", "journal", "elsewhere"


def pool_entry(status: PoolStatus | None, now: float, user: str | None, trouble: str) -> dict[str, Any]:
    """Return the entry of the pool. `status` is None, and `trouble` says why, while the pool does not answer."""
    if status is None:
        return {"user": user, "trouble": trouble}
    scaling = status.scaling
    return {
        "user": user,
        "trouble": trouble,
        "opened_at": round(now - status.seconds),
        "jobs": dict(status.jobs),
        "waiting": {stage: status.waiting.get(stage, 0) for stage in _STAGES},
        "left_seconds": None if status.left_seconds is None else _rough(status.left_seconds),
        "runs": status.tasks_total,
        "runs_resident": status.tasks_resident,
        "uploaded_bytes": status.uploaded_bytes,
        "streamed_bytes": status.streamed_bytes,
        "restarts": status.restarts,
        "waiting_for": "; ".join(filter(None, (status.waiting_for, *map(shown_message, status.jobs_troubles)))),
        "pins": [{"model": pin.model, "words": pin.words} for pin in status.pins],
        "failures": [
            {"job": job.job_id, "message": _short(shown_message(job.message)), "at": round(now - job.seconds)}
            for job in status.failures
        ],
        "costs": None
        if scaling is None
        else {"spent": round(scaling.spent, 2), "per_hour": round(scaling.per_hour, 2)},
        "decision": "" if scaling is None else scaling.latest_decision,
    }


def pool_sections(status: PoolStatus, now: float, prompts: Mapping[str, str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the sections of the pool besides its entry. `prompts` are by job id, of the jobs that may be seen."""
    scaling = status.scaling
    users = {
        user: {**_stages(status.waiting_by_user.get(user, {})), "seconds": round(seconds)}
        for user, seconds in _largest_users(status).items()
    }
    return {
        "workers": {str(worker.id): _worker(worker, now, prompts) for worker in status.workers},
        "models": _largest({name: _stages(tasks) for name, tasks in status.waiting_by_model.items()}),
        "users": users,
        "groups": {}
        if scaling is None
        else {
            group.name: {
                "nodes": group.nodes,
                "most": group.max_nodes,
                "starting": group.starting,
                "price": group.price_per_hour,
                "obstacle": group.obstacle,
            }
            for group in scaling.groups
        },
    }


def submission_sections(
    submissions: Sequence[HttpSubmission],
    left_seconds: Mapping[str, float],
    records: Sequence[SubmissionRecord] = (),
    status: PoolStatus | None = None,
    now: float = 0.0,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the sections of submissions, oldest first, of one owner: those that are active and newest, their running
    tasks, and the latest ends. `left_seconds` are expected, by submission. `records` are those in the pool's journal
    that this server has not accepted; `status` is the pool as the owner may see it, with those of other programs.
    """
    known = {each.id for each in submissions}
    pooled = {name_of(each.id): each for each in reversed(() if status is None else status.submissions)}
    own = {
        each.id: submission_entry(each, left_seconds.get(each.id), pooled.get(each.id)) for each in _shown(submissions)
    }
    journaled = {
        each.submission_id: record_entry(each, left_seconds.get(each.submission_id), pooled.get(each.submission_id))
        for each in heapq.nlargest(MOST_SUBMISSIONS, records, key=lambda each: (each.pending > 0, each.created_at))
    }
    elsewhere = [
        each
        for each in (() if status is None else status.submissions)
        if each.id not in known and name_of(each.id) not in known and name_of(each.id) not in journaled
    ]
    tasks = dict(_tasks(submissions))
    if status is not None:
        tasks |= _other_tasks(status, known, journaled, MOST_TASKS - len(tasks))
    return {
        "submissions": own
        | journaled
        | {each.id: other_entry(each, now, status) for each in elsewhere[:MOST_SUBMISSIONS] if status is not None},
        "tasks": tasks,
        "ends": {
            f"{submission.id}/{end.index}": end_entry(submission, place)
            for submission, place, end in latest_ends(submissions, MOST_ENDS)
        },
    }


def submission_entry(
    submission: HttpSubmission, left_seconds: float | None, pooled: SubmissionStatus | None = None
) -> dict[str, Any]:
    """Return the entry of a submission. Of requests that this server has not taken, the pool may know the first."""
    counts, (prompt, model) = submission.counts, submission.texts_of(0)
    if not model and pooled is not None:
        prompt, model = pooled.prompt, pooled.model
    return {
        "prompt": _short(prompt),
        "model": model,
        "source": HERE,
        "user": "",
        "detached": submission.detached,
        "created_at": round(submission.created_at, 1),
        "jobs": submission.total,
        **{state: counts[state] for state in ("succeeded", "failed", "cancelled")},
        "running": len(submission.running),
        "state": "lost" if submission.lost else "ended" if submission.over else "active",
        "stopping": submission.cancelled and not submission.over,
        "waits_for": _short(submission.lost or submission.held),
        "left_seconds": None if left_seconds is None else _rough(left_seconds),
        "can_retry": bool(submission.requests),
    }


def record_entry(
    record: SubmissionRecord, left_seconds: float | None, pooled: SubmissionStatus | None = None
) -> dict[str, Any]:
    """Return the entry of a submission in the journal, as `submission_entry`; what runs of it is not known, and its
    first request only as far as the pool has it (`pooled`)."""
    return {
        "prompt": "" if pooled is None else _short(pooled.prompt),
        "model": "" if pooled is None else pooled.model,
        "source": JOURNAL,
        "user": record.user,
        "detached": True,
        "created_at": round(record.created_at, 1),
        "jobs": record.request_count,
        "succeeded": record.succeeded,
        "failed": record.failed,
        "cancelled": record.cancelled,
        "running": 0,
        "state": "active" if record.pending else "ended",
        "stopping": False,
        "waits_for": _short(record.trouble),
        "left_seconds": None if left_seconds is None else _rough(left_seconds),
        "can_retry": False,
    }


def other_entry(submission: SubmissionStatus, now: float, status: PoolStatus) -> dict[str, Any]:
    """Return the entry of a submission of another program, as `submission_entry`."""
    jobs = (worker.run.job_id for worker in status.workers if worker.run is not None)
    running = sum(job.rpartition("-")[0] == submission.id for job in jobs)
    return {
        "prompt": _short(submission.prompt),
        "model": submission.model,
        "source": ELSEWHERE,
        "user": submission.user,
        "detached": False,
        "created_at": round(now - submission.seconds),
        "jobs": submission.jobs,
        "succeeded": submission.succeeded,
        "failed": submission.failed,
        "cancelled": submission.cancelled,
        "running": running,
        "state": "active" if submission.unfinished else "ended",
        "stopping": False,
        "waits_for": "",
        "left_seconds": None,
        "can_retry": False,
    }


def _other_tasks(
    status: PoolStatus, known: Set[str], journaled: Container[str], most: int
) -> dict[str, dict[str, Any]]:
    """Return the tasks of submissions that this server does not follow, as far as the owner may see them."""
    found: dict[str, dict[str, Any]] = {}
    for worker in status.workers:
        run = worker.run
        if run is None or not run.job_id or len(found) >= most:
            continue
        submission, _, place = run.job_id.rpartition("-")
        name = name_of(submission)
        if submission in known or name in known or not place.isdecimal():
            continue
        shown = name if name in journaled else submission
        found[f"{shown}/{place}"] = {
            "submission": shown,
            "index": int(place),
            "job": run.job_id,
            "stage": run.stage,
            "worker": str(worker.id),
            "step": run.step,
            "steps": run.steps,
            "prompt": _short(run.prompt),
            "model": run.model,
            "source": JOURNAL if name in journaled else ELSEWHERE,
        }
    return found


def end_entry(submission: HttpSubmission, place: int) -> dict[str, Any]:
    """Return the entry of the end at `place` of a submission."""
    end, (number, at) = submission.ends[place], submission.end_marks[place]
    prompt, model = submission.texts_of(end.index)
    return {
        "number": number,
        "at": round(at),
        "submission": submission.id,
        "index": end.index,
        "job": end.job_id,
        "state": end.state,
        "prompt": _short(prompt),
        "model": model,
        "seed": end.seed,
        "kind": end.kind,
        "message": _short(end.message),
        "file": "" if end.path is None else end.path.name,
        "address": end.address,
        "worker": end.facts.get("worker", ""),
        "seconds": end.facts.get("seconds"),
    }


def latest_ends(submissions: Sequence[HttpSubmission], most: int) -> list[tuple[HttpSubmission, int, JobEnd]]:
    """Return the latest ends of all submissions, each with its place in its submission, newest first."""
    ended = [each for each in submissions if each.ends]
    # those after the first `most` have only ends that are older than all of these
    newest = heapq.nlargest(most, ended, key=lambda each: each.end_marks[-1][0])
    found = [
        (submission.end_marks[place][0], submission, place)
        for submission in newest
        for place in range(max(0, len(submission.ends) - most), len(submission.ends))
    ]
    latest = heapq.nlargest(most, found, key=lambda each: each[0])
    return [(submission, place, submission.ends[place]) for _, submission, place in latest]


def prompts_of_running(submissions: Sequence[HttpSubmission]) -> dict[str, str]:
    """Return the prompts of the jobs that run, by job id."""
    found = {}
    for submission in submissions:
        for task in submission.running:
            request = submission.request_of(task.index)
            if request is not None:
                found[task.job_id] = _short(request.prompt)
    return found


def _shown(submissions: Sequence[HttpSubmission]) -> list[HttpSubmission]:
    """Return the active submissions before those that are over, each newest first."""
    active = [each for each in reversed(submissions) if not each.over][:MOST_SUBMISSIONS]
    over = [each for each in reversed(submissions) if each.over][: MOST_SUBMISSIONS - len(active)]
    return [*active, *over]


def _tasks(submissions: Sequence[HttpSubmission]) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    for submission in submissions:
        for task in submission.running:
            if len(found) == MOST_TASKS:
                return found
            request = submission.request_of(task.index)
            fields = {
                "submission": submission.id,
                "index": task.index,
                "job": task.job_id,
                "stage": task.stage,
                "worker": task.worker,
                "step": task.step,
                "steps": task.steps,
                "prompt": "" if request is None else _short(request.prompt),
                "model": "" if request is None else request.model,
                "source": HERE,
            }
            found.append((f"{submission.id}/{task.index}", fields))
    return found


def _worker(worker: WorkerStatus, now: float, prompts: Mapping[str, str]) -> dict[str, Any]:
    run = worker.run
    return {
        "state": worker.state,
        "device": worker.device,
        "node": worker.node_name,
        "used": worker.used_bytes,
        "capacity": worker.capacity_bytes,
        # sorted: the order of use would change with every run
        "parts": [resident_entry(part) for part in sorted(worker.parts, key=lambda part: part.component)],
        "job": "" if run is None else run.job_id,
        "user": "" if run is None else run.user,
        "stage": "" if run is None else run.stage,
        "step": 0 if run is None else run.step,
        "steps": 0 if run is None else run.steps,
        "since": None if run is None else round(now - run.seconds),
        "stopping": run is not None and run.stopping,
        "mates": 0 if run is None else run.mates,
        "gpus": 1 if run is None else run.gpus,
        "prompt": "" if run is None else prompts.get(run.job_id, _short(run.prompt)),
        "runs": worker.runs,
        "runs_resident": worker.runs_resident,
        "trouble": _short(worker.not_up or worker.trouble or "; ".join(worker.unavailable)),
        "leaves_at": None if worker.leaves_in is None else round(now + worker.leaves_in),
        "silent": worker.silent_seconds > 0,
        "order": worker.order,
        "ordered_since": None if worker.order_seconds is None else round(now - worker.order_seconds),
    }


def resident_entry(part: ResidentPart) -> dict[str, Any]:
    """Return a component; its key is "MODEL/ROLE@HASH"."""
    return {
        "model": model_of(ComponentKey(part.component)),
        "role": part.component.rsplit("@", 1)[0].rpartition("/")[2],
        "bytes": part.resident_bytes,
        "of": part.whole_bytes,
        "patched": part.patched,
    }


def _stages(tasks: Mapping[str, int]) -> dict[str, int]:
    return {stage: tasks.get(stage, 0) for stage in _STAGES}


def _largest_users(status: PoolStatus) -> dict[str, float]:
    """Return the GPU-seconds of the users with the most waiting tasks, then of those with the most GPU-seconds."""
    seconds = dict.fromkeys(status.waiting_by_user, 0.0) | dict(status.seconds_by_user)
    waiting = {user: sum(tasks.values()) for user, tasks in status.waiting_by_user.items()}
    chosen = heapq.nlargest(MOST_QUEUES, seconds, key=lambda user: (waiting.get(user, 0), seconds[user]))
    return {user: seconds[user] for user in chosen}


def _largest(queues: Mapping[str, dict[str, int]]) -> dict[str, dict[str, Any]]:
    chosen = heapq.nlargest(MOST_QUEUES, queues, key=lambda name: sum(queues[name].values()))
    return {name: queues[name] for name in chosen}


def _rough(seconds: float) -> float:
    """Return a time with two digits, as an estimate has no more."""
    return float(f"{seconds:.2g}")


def _short(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
