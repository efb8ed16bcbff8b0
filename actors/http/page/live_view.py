"""`LiveView`: the state of the pool and of submissions for the viewers of the web page, read once for all of them.

While there are viewers, the pool is asked once in each interval, and otherwise once for each sample of the charts.
Viewers of one owner share a `LiveBoard`. A viewer is
a version number: a slow one keeps nothing, delays nobody, and receives the latest values when it reads on.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from modelpool.actors.http.page.live_board import LiveBoard
from modelpool.actors.http.page.live_entries import (
    POOL_KEY,
    pool_entry,
    pool_sections,
    prompts_of_running,
    submission_sections,
)
from modelpool.actors.http.page.pool_series import SAMPLE_SECONDS, PoolSeries
from modelpool.actors.http.service.problems import HttpProblem
from modelpool.actors.http.service.shown_messages import shown_message
from modelpool.actors.http.service.user_views import status_for
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.pool.values.core.errors import UserError

if TYPE_CHECKING:
    from modelpool.actors.control.detached.records import SubmissionRecord
    from modelpool.actors.control.status import PoolStatus
    from modelpool.actors.http.service.services import Services
    from modelpool.actors.http.service.submissions import HttpSubmission

INTERVAL_SECONDS = 1.0
#: interval of reading the submissions in the pool's journal that came from elsewhere
JOURNAL_SECONDS = 5.0
#: a pool that takes long to answer is asked less often: for this part of the time, but at least in this interval
MOST_ASKING, LONGEST_INTERVAL_SECONDS = 0.25, 5.0
#: viewers of the page, and viewers of one user of a server with keys
MOST_VIEWERS, MOST_OF_USER = 500, 50
_RETRY = {"Retry-After": "30"}
#: the rate of a submission is its latest rate, in samples of one interval
RATE_SAMPLES = 60
#: ends without which there is no rate: one of them would be the time of a single job, or of what it waited for
LEAST_ENDS = 2


@dataclass(frozen=True, slots=True)
class ActiveSubmission:
    """How many jobs of a submission have ended, and how many have not."""

    id: str
    ended: int
    unfinished: int


class LiveView:
    """One for each application. Belongs to one event loop."""

    def __init__(self, services: Services, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._services = services
        self._interval_seconds = interval_seconds
        self._viewers: Counter[str] = Counter()
        #: by owner, of those with viewers
        self._boards: dict[str, LiveBoard] = {}
        self._rates = EndRates()
        self._records: tuple[SubmissionRecord, ...] = ()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._series = PoolSeries()

    async def keep_sampling(self) -> None:
        """Take samples for the charts for ever, so that a page that is opened has the last hour."""
        while True:
            if not self._viewers:  # else `_run` asks
                status, _ = await self._asked()
                if status is not None:
                    self._series.note(status, time.monotonic(), time.time())
            await asyncio.sleep(SAMPLE_SECONDS)

    def check_capacity(self, owner: str) -> None:
        """Raise HttpProblem if there are MOST_VIEWERS (503), or MOST_OF_USER of a user with a key (429)."""
        if (problem := self._refusal(owner)) is not None:
            raise problem

    def _refusal(self, owner: str) -> HttpProblem | None:
        if self._viewers.total() >= MOST_VIEWERS:
            return HttpProblem(503, f"{MOST_VIEWERS} pages follow this server already", _RETRY, "pages")
        if owner and self._viewers[owner] >= MOST_OF_USER:
            return HttpProblem(429, f"{MOST_OF_USER} pages of {owner} follow this server already", _RETRY, "pages")
        return None

    async def changes(self, owner: str) -> AsyncIterator[str]:
        """Yield everything that `owner` may see, and then what changes, as JSON (see `LiveBoard.changes`). Yields
        nothing if others have taken the last places since `check_capacity`."""
        if self._refusal(owner) is not None:
            return
        board = self._boards.setdefault(owner, LiveBoard())
        self._viewers[owner] += 1
        self._start()
        version = 0
        try:
            while True:
                if board.version > version:
                    text, version = board.changes(version), board.version
                    yield text
                else:
                    await self._changed.wait()
        finally:
            self._leave(owner)

    async def close(self) -> None:
        """Stop asking the pool."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def _leave(self, owner: str) -> None:
        self._viewers[owner] -= 1
        if not self._viewers[owner]:
            del self._viewers[owner], self._boards[owner]
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        journal_at = -JOURNAL_SECONDS
        while True:
            began = time.monotonic()
            status, trouble = await self._asked()
            if began - journal_at >= JOURNAL_SECONDS:
                journal_at = began
                self._records = await self._journal()
            sampled = status is not None and self._series.note(status, time.monotonic(), time.time())
            asked_seconds = time.monotonic() - began
            boards = tuple(self._boards.items())
            changed = [self._update(owner, board, status, trouble, sampled) for owner, board in boards]
            if any(changed):
                event, self._changed = self._changed, asyncio.Event()
                event.set()
            pause_seconds = max(self._interval_seconds, min(LONGEST_INTERVAL_SECONDS, asked_seconds / MOST_ASKING))
            await asyncio.sleep(max(0.0, pause_seconds - (time.monotonic() - began)))

    async def _asked(self) -> tuple[PoolStatus | None, str]:
        try:
            return await asyncio.to_thread(self._services.pool.status), ""
        except (PoolLost, UserError, OSError) as problem:
            return None, shown_message(str(problem))

    async def _journal(self) -> tuple[SubmissionRecord, ...]:
        """Return the submissions in the journal; () if the pool has none, or does not answer."""
        try:
            return await asyncio.to_thread(self._services.pool.detached) if await self._services.keeps_jobs() else ()
        except (PoolLost, UserError, OSError):
            return ()

    def _update(self, owner: str, board: LiveBoard, status: PoolStatus | None, trouble: str, sampled: bool) -> bool:
        now, user = time.time(), owner or None
        known = self._services.submissions
        submissions = known.of(owner)
        ids = {each.id for each in submissions}
        records = [
            each for each in self._records if each.submission_id not in ids and (user is None or each.user == user)
        ]
        left_seconds = self._rates.left_seconds(owner, _active(submissions, records), time.monotonic())
        if status is not None:
            # failures of the owner's submissions are among the ends
            others = tuple(job for job in status.failures if not known.has_job(owner, job.job_id))
            status = replace(status, failures=others) if user is None else status_for(status, user, frozenset())
        entries: dict[str, Any] = submission_sections(submissions, left_seconds, records, status, now)
        if status is not None:
            entries.update(pool_sections(status, now, prompts_of_running(submissions)))
        if sampled or not board.version:  # it compares everything that it gets
            entries["samples"] = self._series.entries
        entries["pool"] = {POOL_KEY: pool_entry(status, now, user, trouble)}
        return board.update(entries)


class EndRates:
    """How fast the jobs of active submissions end, from samples of the number of ends."""

    def __init__(self) -> None:
        #: owner -> submission id -> (seconds, ends), oldest first
        self._samples: dict[str, dict[str, deque[tuple[float, int]]]] = {}

    def left_seconds(self, owner: str, active: Iterable[ActiveSubmission], now: float) -> dict[str, float]:
        """Take a sample of each active submission, and return the expected time until it has ended, by its id; those
        of which fewer than LEAST_ENDS have ended since the first sample are missing. Forgets all other submissions of
        `owner`.
        """
        before, samples = self._samples.get(owner, {}), {}
        found = {}
        for submission in active:
            mine = samples[submission.id] = before.get(submission.id, deque(maxlen=RATE_SAMPLES))
            if not submission.ended:  # the time that it waits for other submissions is none of its rate
                mine.clear()
            mine.append((now, submission.ended))
            seconds, ends = now - mine[0][0], submission.ended - mine[0][1]
            if ends >= LEAST_ENDS and seconds:
                found[submission.id] = submission.unfinished * seconds / ends
        self._samples[owner] = samples
        return found


def _active(submissions: Sequence[HttpSubmission], records: Sequence[SubmissionRecord]) -> Iterator[ActiveSubmission]:
    for submission in submissions:
        if not submission.over:
            yield ActiveSubmission(submission.id, len(submission.ends), submission.unfinished)
    for record in records:
        if record.pending:
            yield ActiveSubmission(record.submission_id, record.request_count - record.pending, record.pending)
