"""Start-time fair queueing: each user's share of the GPUs. Knows jobs and seconds, no workers.

Every user has an account in virtual seconds: GPU-seconds divided by the user's weight. A waiting job gets a virtual
start time; jobs of one priority go in the order of these. Rules
1. A virtual start time is the seconds that the user has paid, plus those reserved for the user's jobs before it; never
   less than the latest virtual start of a started task (`virtual_seconds`). So unused time is not saved up, and nobody
   pays later for GPUs that were idle otherwise. A job that goes first for its deadline counts as the first of its user.
2. A virtual start time does not change once assigned. It is assigned some time ahead (`ahead_seconds`), not at
   submission: the real time of runs (with the loads that they caused) is charged when they end, and counts in every
   virtual start time that is assigned afterwards.
3. A single user needs none: jobs go as submitted. They are assigned while two users have jobs.
4. Priorities come before shares: there are virtual start times for each priority of a user, and one account for all of
   them. They count the reservations of the same and of higher priorities.

Published as start-time fair queueing, and for GPU functions with a window in which loaded functions may continue, as
MQFQ-Sticky (arXiv 2507.08954); the window is `share_window_end`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from modelpool.pool.values.specs.spec import JobId, UserId
from modelpool.scheduler.model.user_account import NO_VIRTUAL_START, UserAccount, UserFlow
from modelpool.scheduler.model.user_share import EVERYBODY, UserShare

if TYPE_CHECKING:
    from modelpool.scheduler.model.jobs import Job, Order

#: minimum number of jobs of each user and priority with a virtual start time that have not begun
LEAST_AHEAD = 4
#: accounts of users without jobs that are kept
MOST_IDLE_ACCOUNTS = 10_000
#: weight of the newest run in the average load seconds of a user's runs. An assumption: about ten count
NEWEST_LOAD = 0.1


class Shares:
    """The accounts of all users, and the virtual start times of their jobs.

    Methods return the jobs that got a virtual start time: they have to be queued again. `reserve(job, flow)` reserves
    the expected seconds of a job's tasks.
    """

    def __init__(self, shares: Iterable[UserShare], reserve: Callable[[Job, UserFlow], None]) -> None:
        self._named = {share.user: share for share in shares}
        #: how far ahead of `virtual_seconds` virtual start times are assigned
        self.ahead_seconds = 0.0
        self._reserve = reserve
        self.accounts: dict[UserId, UserAccount] = {}
        #: the latest virtual start of a placed task; for a single user, the seconds paid; never falls
        self.virtual_seconds = 0.0
        #: users with a live job
        self._live: dict[UserId, UserAccount] = {}

    def account(self, user: UserId) -> UserAccount:
        """The user's account; created on first use."""
        account = self.accounts.get(user)
        if account is None:
            share = self.share_of(user)
            account = self.accounts[user] = UserAccount(share, paid=self.virtual_seconds)
            if len(self.accounts) > MOST_IDLE_ACCOUNTS:
                self._close_idle(account)
        return account

    def share_of(self, user: UserId) -> UserShare:
        """The user's configured share."""
        return self._named.get(user) or self._named.get(EVERYBODY) or UserShare(user=EVERYBODY)

    def join(self, job: Job) -> list[Job]:
        """Add a waiting job."""
        account = self.account(job.spec.user)
        flow = account.flows.get(job.priority)
        if flow is None:
            flow = account.flows[job.priority] = UserFlow(account, job.priority)
        flow.unscheduled[job.spec.job_id] = job
        account.live += 1
        is_second = account.live == 1 and len(self._live) == 1  # from now on users share
        self._live[job.spec.user] = account
        if not is_second:
            return self._assign_starts(flow)
        flows = [flow for other in self._live.values() for flow in other.flows.values()]
        return [scheduled for flow in flows for scheduled in self._assign_starts(flow)]

    def begin(self, job: Job) -> list[Job]:
        """A task of a job was placed."""
        account = self.account(job.spec.user)
        flow, shared = account.flows[job.priority], len(self._live) > 1
        scheduled = self._assign_start(flow, job) if shared and job.virtual_start == NO_VIRTUAL_START else []
        due = job.virtual_start
        if due == NO_VIRTUAL_START:
            flow.unscheduled.pop(job.spec.job_id, None)
            flow.begun[job.spec.job_id] = job
            due = account.paid
        if due > self.virtual_seconds:
            self.virtual_seconds = max(self.virtual_seconds, _turn_of(flow, job)) if job.urgent else due
        job.begun = True
        return scheduled + self._assign_starts(flow) if shared else scheduled

    def leave(self, job: Job) -> list[Job]:
        """Remove a job that ended, begun or not."""
        account = self.account(job.spec.user)
        flow = account.flows[job.priority]
        for jobs in (flow.unscheduled, flow.scheduled, flow.begun):
            jobs.pop(job.spec.job_id, None)
        account.live -= 1
        if not account.live:
            del self._live[job.spec.user]
            account.flows.clear()  # tasks that still run are charged when they end
        return self._assign_starts(flow)

    def pay(self, user: UserId, seconds: float, load_seconds: float) -> None:
        """Charge for a run that took `seconds` of GPU time, `load_seconds` of them for loading."""
        account = self.account(user)
        account.paid += seconds / account.share.weight
        account.seconds += seconds
        account.load_seconds += NEWEST_LOAD * (load_seconds - account.load_seconds)

    def move(self, job: Job, priority: int) -> list[Job]:
        """Change the priority of a live job; it keeps its virtual start time."""
        account, job_id = self.account(job.spec.user), job.spec.job_id
        before = account.flows[job.priority]
        after = account.flows.setdefault(priority, UserFlow(account, priority))
        job.priority = priority
        for name in ("unscheduled", "scheduled", "begun"):
            jobs: dict[JobId, Job] = getattr(before, name)
            if jobs.pop(job_id, None) is not None:
                getattr(after, name)[job_id] = job
        if job_id in after.scheduled:
            after.virtual_start = max(after.virtual_start, job.virtual_start)
        return self._assign_starts(before) + self._assign_starts(after)

    def _assign_starts(self, flow: UserFlow) -> list[Job]:
        """Assign virtual start times to as many jobs of the flow as needed, if other users wait too."""
        if len(self._live) < 2:
            return []
        assigned: list[Job] = []
        horizon = self.virtual_seconds + self.ahead_seconds
        while len(flow.scheduled) < LEAST_AHEAD or flow.virtual_start < horizon:
            job = next(iter((flow.begun or flow.unscheduled).values()), None)  # jobs that began go first
            if job is None:
                break
            assigned += self._assign_start(flow, job)
        return assigned

    def _assign_start(self, flow: UserFlow, job: Job) -> list[Job]:
        account, job_id = flow.account, job.spec.job_id
        due = account.paid + account.reserved_from(flow.priority)
        if due < self.virtual_seconds:  # unused time is forfeited
            account.paid += self.virtual_seconds - due
            due = self.virtual_seconds
        del (flow.begun if job_id in flow.begun else flow.unscheduled)[job_id]
        flow.scheduled[job_id] = job
        job.virtual_start = flow.virtual_start = max(flow.virtual_start, due)
        self._reserve(job, flow)
        return [job]

    def _close_idle(self, opened: UserAccount) -> None:
        for user, account in list(self.accounts.items()):
            if not account.live and account is not opened and account.paid <= self.virtual_seconds:
                del self.accounts[user]


def _turn_of(flow: UserFlow, job: Job) -> float:
    """Return the virtual start at which a job begins that goes first for its deadline: the first of its user's jobs
    that have not begun. Its own may be far behind, and a new user would wait for all jobs in between."""
    waiting = (each.virtual_start for each in flow.scheduled.values() if each is job or not each.begun)
    return next(waiting, flow.account.paid)


def share_window_end(first: Order, window_seconds: float) -> float:
    """The latest virtual start that may go before the first waiting task in order because its weights are loaded.

    Infinite if that task has none: no other user waits.
    """
    virtual_start: float = first[1]
    return virtual_start + window_seconds
