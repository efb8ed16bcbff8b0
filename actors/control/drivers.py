"""`Drivers`: the drivers of a pool, with their events and unfinished submissions. Knows neither core nor graphs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from modelpool.actors.control.client_events import ClientEvents
from modelpool.actors.control.connection import UnknownDriver
from modelpool.actors.control.fleet import Clock
from modelpool.actors.control.parked_jobs import JobPack, QueuedJob
from modelpool.actors.control.preview_wishes import PreviewWishes
from modelpool.actors.control.submission_list import SubmissionList
from modelpool.actors.worker.wire.messages import ClientId, JobEnded, SubmissionId
from modelpool.pool.values.specs.spec import JobId

SILENCE_SECONDS = 30.0
SWEEP_SECONDS = 2.0


@dataclass(slots=True)
class OpenSubmission:
    """A submission, kept while it has unfinished parts."""

    #: calls that wait for the catalog
    checking: int = 0
    #: checked by `check_each`: their driver has not decided yet whether to queue them
    undecided: dict[int, QueuedJob] = field(default_factory=dict)
    #: converted and checked, not yet queued, and their number
    held: list[JobPack] = field(default_factory=list)
    held_jobs: int = 0
    #: queued, but their turn is far
    parked: dict[JobPack, None] = field(default_factory=dict)
    #: queued and unresolved, in order
    live: dict[JobId, None] = field(default_factory=dict)
    #: indexes of held and parked jobs that were cancelled one by one
    ended_early: set[int] = field(default_factory=set)
    #: indexes of jobs that were cancelled one by one before they were held: they end when they are
    cancelled_early: set[int] = field(default_factory=set)
    cancelled: bool = False
    #: arrival of its first part, on the core's clock: deadlines count from here
    began_at: float = 0.0
    #: minimum run times of its queued jobs with an earlier deadline
    hopeless_seconds: list[float] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether it has no unfinished part."""
        return not (self.checking or self.undecided or self.held or self.parked or self.live)


@dataclass(slots=True)
class Driver:
    """A driver that has entered the pool."""

    events: ClientEvents
    submissions: dict[SubmissionId, OpenSubmission] = field(default_factory=dict)


class Drivers:
    """The drivers of one pool. One that is silent for `SILENCE_SECONDS` is gone."""

    def __init__(self, clock: Clock, previews: PreviewWishes) -> None:
        """`previews` are forgotten with their submission."""
        self._clock = clock
        self._previews = previews
        self.known: dict[ClientId, Driver] = {}
        #: what users read about submissions of drivers that may be gone
        self.listed = SubmissionList()

    def enter(self, client_id: ClientId) -> None:
        """Register a driver. From now on it must poll for events. Idempotent."""
        self.known.setdefault(client_id, Driver(ClientEvents(self._clock.now())))

    def leave(self, client_id: ClientId) -> tuple[OpenSubmission, ...]:
        """Remove a driver; return its unfinished submissions. Idempotent."""
        driver = self.known.pop(client_id, None)
        if driver is None:
            return ()
        driver.events.close()
        for submission_id in driver.submissions:
            self._previews.set(submission_id, None)
        return tuple(driver.submissions.values())

    def get(self, client_id: ClientId) -> Driver:
        """Return a driver. Raises UnknownDriver."""
        if client_id not in self.known:
            raise UnknownDriver(
                f"this pool does not know driver {client_id}; silent drivers are dropped after {SILENCE_SECONDS:.0f} s"
            )
        return self.known[client_id]

    def submission(self, client_id: ClientId, submission_id: SubmissionId) -> OpenSubmission | None:
        """Return an unfinished submission; None if it is over, or its driver is gone."""
        driver = self.known.get(client_id)
        return None if driver is None else driver.submissions.get(submission_id)

    def ended(self, client_id: ClientId, end: JobEnded) -> None:
        """Note the end of a job, and pass it on to its driver, if there is one."""
        self.listed.ended(end.submission_id, end.outcome)
        driver = self.known.get(client_id)
        if driver is None:
            return
        driver.events.ended(end)
        if end.submission_id in driver.submissions:
            driver.submissions[end.submission_id].live.pop(end.job_id, None)
            self.drop_over(driver, end.submission_id)

    def drop_over(self, driver: Driver, submission_id: SubmissionId) -> None:
        """Forget a submission that is over."""
        if submission_id in driver.submissions and driver.submissions[submission_id].over:
            del driver.submissions[submission_id]
            self._previews.set(submission_id, None)
            if not driver.submissions:
                driver.events.all_ended()

    def progressed(self) -> None:
        """Note that running tasks may have changed."""
        for driver in self.known.values():
            driver.events.progressed()

    def close(self) -> None:
        """Wake waiting calls for the last time."""
        for driver in self.known.values():
            driver.events.close()

    async def keep_sweeping(self, leave: Callable[[ClientId], Awaitable[None]]) -> None:
        """Call `leave` for drivers that are gone, until cancelled."""
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            now = self._clock.now()
            for client_id, driver in tuple(self.known.items()):
                if driver.events.quiet_seconds(now) > SILENCE_SECONDS:
                    await leave(client_id)
