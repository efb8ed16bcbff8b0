"""Submissions in words and as JSON, for all commands that show one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelpool.actors.control.detached.job_service import JobsProgress
    from modelpool.actors.control.detached.records import SubmissionRecord


def counts(record: SubmissionRecord) -> str:
    """Return '12 of 50 done, 1 failed'."""
    parts = [f"{record.succeeded} of {record.request_count} done"]
    parts += [f"{record.failed} failed"] if record.failed else []
    parts += [f"{record.cancelled} cancelled"] if record.cancelled else []
    return ", ".join(parts)


def progress_line(now: JobsProgress) -> str:
    """Return the counts of its jobs, the number that run, and the reason for which it waits."""
    running = f", {len(now.running)} running" if now.running else ""
    waiting = f"; {now.waiting_for}" if now.waiting_for else ""
    return f"{now.record.submission_id}: {counts(now.record)}{running}{waiting}"


def plain_record(record: SubmissionRecord) -> dict[str, Any]:
    """Return a submission as JSON values."""
    return {**dataclasses.asdict(record), "state": record.state.value, "pending": record.pending}
