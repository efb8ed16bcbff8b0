"""Whose turn it is: each user's share of the GPUs, by start-time fair queueing. Knows jobs and seconds, no worker.

Every user has an account in virtual seconds: GPU-seconds divided by the user's weight. A job that waits gets a tag, the
virtual time at which its user's turn comes for it; jobs of one priority go by their tags. Rules
1. A tag is what the user has paid for, and what is reserved for the user's jobs with tags before it; never less than
   the latest tag that a task ran by (`virtual_seconds`). So nobody saves up time by not using it, and nobody pays
   later for GPUs that were idle otherwise.
2. A tag once given stays. Tags are given some way ahead (`ahead_seconds`), not all at submission: what runs turn out to
   take (loads that they caused included) is paid when they end, and counts in every tag that is given afterwards.
3. A user alone needs no tags: jobs go as submitted. Tags are given while two users have jobs.
4. Priorities come before shares: there are tags for each priority of a user, and one account for all of them. A tag
   counts what is reserved for the same and for higher priorities.

Published as start-time fair queueing, and for GPU functions with a window in which what is loaded may go on, as
MQFQ-Sticky (arXiv 2507.08954); the window is `turn_end`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from modelpool.pool.specs.spec import JobId, UserId
from modelpool.scheduler.tables.user_account import NO_TAG, Account, Flow
from modelpool.scheduler.tables.user_share import EVERYBODY, UserShare

if TYPE_CHECKING:
    from modelpool.scheduler.tables.jobs import Job, Order

#: jobs of each user and priority that have a tag before they begin, at least
LEAST_AHEAD = 4
#: accounts of users without jobs that are kept
MOST_IDLE_ACCOUNTS = 10_000
#: weight of the newest run in the average of what loading adds to a user's runs. An assumption: about ten count
NEWEST_LOAD = 0.1


class Shares:
    """The accounts of all users, and the tags of their jobs.

    Methods return the jobs that got a tag: they are to be filed anew. `reserve(job, flow)` sets aside what the tasks
    of a job should take.
    """

    def __init__(self, shares: Iterable[UserShare], reserve: Callable[[Job, Flow], None]) -> None:
        self._named = {share.user: share for share in shares}
        #: how far ahead of `virtual_seconds` jobs get tags
        self.ahead_seconds = 0.0
        self._reserve = reserve
        self.accounts: dict[UserId, Account] = {}
        #: the latest tag that a task was placed by; what a user alone has paid; never falls
        self.virtual_seconds = 0.0
        #: users with a live job
        self._live: dict[UserId, Account] = {}

    def account(self, user: UserId) -> Account:
        """The user's account, opened when there is none."""
        account = self.accounts.get(user)
        if account is None:
            share = self.share_of(user)
            account = self.accounts[user] = Account(share, paid=self.virtual_seconds)
            if len(self.accounts) > MOST_IDLE_ACCOUNTS:
                self._close_idle(account)
        return account

    def share_of(self, user: UserId) -> UserShare:
        """What the user may have."""
        return self._named.get(user) or self._named.get(EVERYBODY) or UserShare(user=EVERYBODY)

    def join(self, job: Job) -> list[Job]:
        """A new job waits."""
        account = self.account(job.spec.user)
        flow = account.flows.get(job.priority)
        if flow is None:
            flow = account.flows[job.priority] = Flow(account, job.priority)
        flow.untagged[job.spec.job_id] = job
        account.live += 1
        is_second = account.live == 1 and len(self._live) == 1  # from now on there are turns
        self._live[job.spec.user] = account
        if not is_second:
            return self._give_tags(flow)
        flows = [flow for other in self._live.values() for flow in other.flows.values()]
        return [tagged for flow in flows for tagged in self._give_tags(flow)]

    def begin(self, job: Job) -> list[Job]:
        """A task of a job was placed."""
        account = self.account(job.spec.user)
        flow, shared = account.flows[job.priority], len(self._live) > 1
        tagged = self._give_tag(flow, job) if shared and job.tag == NO_TAG else []
        due = job.tag
        if due == NO_TAG:
            flow.untagged.pop(job.spec.job_id, None)
            flow.begun[job.spec.job_id] = job
            due = account.paid
        if due > self.virtual_seconds:
            self.virtual_seconds = due
        job.begun = True
        return tagged + self._give_tags(flow) if shared else tagged

    def leave(self, job: Job) -> list[Job]:
        """A job is over, begun or not."""
        account = self.account(job.spec.user)
        flow = account.flows[job.priority]
        for jobs in (flow.untagged, flow.tagged, flow.begun):
            jobs.pop(job.spec.job_id, None)
        account.live -= 1
        if not account.live:
            del self._live[job.spec.user]
            account.flows.clear()  # tasks that still run pay when they end
        return self._give_tags(flow)

    def pay(self, user: UserId, seconds: float, load_seconds: float) -> None:
        """A run that ended took so many GPU-seconds, so many of them for loading."""
        account = self.account(user)
        account.paid += seconds / account.share.weight
        account.seconds += seconds
        account.load_seconds += NEWEST_LOAD * (load_seconds - account.load_seconds)

    def move(self, job: Job, priority: int) -> list[Job]:
        """A live job has another priority now; a tag that it has, it keeps."""
        account, job_id = self.account(job.spec.user), job.spec.job_id
        before = account.flows[job.priority]
        after = account.flows.setdefault(priority, Flow(account, priority))
        job.priority = priority
        for name in ("untagged", "tagged", "begun"):
            jobs: dict[JobId, Job] = getattr(before, name)
            if jobs.pop(job_id, None) is not None:
                getattr(after, name)[job_id] = job
        if job_id in after.tagged:
            after.tag = max(after.tag, job.tag)
        return self._give_tags(before) + self._give_tags(after)

    def _give_tags(self, flow: Flow) -> list[Job]:
        """Have so many jobs of the flow tagged as there should be, where others wait too."""
        if len(self._live) < 2:
            return []
        given: list[Job] = []
        horizon = self.virtual_seconds + self.ahead_seconds
        while len(flow.tagged) < LEAST_AHEAD or flow.tag < horizon:
            job = next(iter((flow.begun or flow.untagged).values()), None)  # first what is left of jobs that began
            if job is None:
                break
            given += self._give_tag(flow, job)
        return given

    def _give_tag(self, flow: Flow, job: Job) -> list[Job]:
        account, job_id = flow.account, job.spec.job_id
        due = account.paid + account.reserved_from(flow.priority)
        if due < self.virtual_seconds:  # what was not used is gone
            account.paid += self.virtual_seconds - due
            due = self.virtual_seconds
        del (flow.begun if job_id in flow.begun else flow.untagged)[job_id]
        flow.tagged[job_id] = job
        job.tag = flow.tag = max(flow.tag, due)
        self._reserve(job, flow)
        return [job]

    def _close_idle(self, opened: Account) -> None:
        for user, account in list(self.accounts.items()):
            if not account.live and account is not opened and account.paid <= self.virtual_seconds:
                del self.accounts[user]


def turn_end(first: Order, window_seconds: float) -> float:
    """The latest tag that may go before the first waiting task in order because its weights are where they are.

    Any, where that one has no tag: nobody else waits.
    """
    tag: float = first[1]
    return tag + window_seconds
