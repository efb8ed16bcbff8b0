"""The follower against a model: a pool with events that come in any order, late and twice, with a ledger or a
journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from modelpool.actors.outputs.results.job_follower import JobFollower
from modelpool.actors.outputs.results.job_ledger import MOST_REPEATS, EndState, JobLedger
from tests.tiers import examples

Event = tuple[int, str]

MOST_JOBS = 6
STATES: st.SearchStrategy[EndState] = st.sampled_from(("succeeded", "failed", "cancelled"))


class FollowerMachine(RuleBasedStateMachine):
    """One submission. `ends` is what its reader was told, or what its journal holds; each job of the model is in the
    pool, being written, to be sent again, or has ended."""

    #: every pair of job and id that was ever sent: the pool may report it at any time, and again
    events = Bundle("events")

    @initialize(target=events, is_journaled=st.booleans(), count=st.integers(1, MOST_JOBS))
    def begin(self, is_journaled: bool, count: int) -> object:
        self.is_journaled = is_journaled
        self.ids = 0
        self.jobs: set[int] = set()
        self.in_pool: dict[int, str] = {}
        self.writing: set[int] = set()
        self.again: set[int] = set()
        self.ends: dict[int, EndState] = {}
        self.withdrawn_ids: set[str] = set()
        self.losses: Counter[int] = Counter()
        self.requested_again: Counter[int] = Counter()
        self.cancelled_jobs: set[int] = set()
        self.is_cancelled = self.is_held = self.is_given_up = self.is_sealed = False
        self.start_follower()
        return self.submit_some(count, 0)

    def start_follower(self) -> None:
        self.ledger: JobLedger[EndState] | None = None if self.is_journaled else JobLedger(str)
        self.follower: JobFollower[EndState] = JobFollower(self.ledger)

    def send(self, jobs: Sequence[int]) -> list[Event]:
        self.ids += 1
        sent = f"id-{self.ids}"
        self.follower.sent(jobs, sent)
        self.in_pool |= dict.fromkeys(jobs, sent)
        self.again -= set(jobs)
        return [(job, sent) for job in jobs]

    def end(self, job: int, state: EndState) -> None:
        """As each shell does: what does not count is told to nobody."""
        assert self.follower.end(job, state), "a job that was not lost ends once"
        assert job not in self.ends
        self.ends[job] = state
        self.in_pool.pop(job, None)
        self.writing.discard(job)

    @precondition(lambda self: len(self.jobs) < MOST_JOBS and not self.is_sealed)
    @rule(target=events, count=st.integers(1, 3), at=st.integers(0, 9))
    def submit(self, count: int, at: int) -> object:
        return self.submit_some(count, at)

    def submit_some(self, count: int, at: int) -> object:
        added = self.follower.submit(count, float(at))
        if self.is_cancelled:
            assert not added
            return multiple()
        assert list(added) == list(range(len(self.jobs), len(self.jobs) + count))
        self.jobs |= set(added)
        assert all(self.follower.passed_seconds(job, 10.0) == 10.0 - at for job in added), "each since its own start"
        return multiple(*self.send(added))

    @precondition(lambda self: len(self.ends) > 2)
    @rule()
    def seal(self) -> None:
        self.is_sealed = True
        if self.ledger is not None:
            self.ledger.seal()

    @precondition(lambda self: self.in_pool)
    @rule(data=st.data(), state=STATES)
    def report_a_job_in_the_pool(self, data: st.DataObject, state: EndState) -> None:
        self.report(data.draw(st.sampled_from(sorted(self.in_pool.items()))), state)

    @rule(event=events, state=STATES)
    def report_any(self, event: Event, state: EndState) -> None:
        self.report(event, state)

    def report(self, event: Event, state: EndState) -> None:
        job, sent = event
        counts = self.in_pool.get(job) == sent and job not in self.writing
        assert self.follower.arrived(job, sent) == counts, "under the latest id, and once"
        if not counts:
            return
        self.writing.add(job)
        if state == "failed":
            self.end(job, "failed")
        elif state == "cancelled":
            is_end = self.is_cancelled or self.is_given_up or job in self.cancelled_jobs
            runs_again = self.is_journaled or (sent in self.withdrawn_ids and not is_end)
            assert self.follower.withdrawn(job, sent) == runs_again
            if runs_again:
                self.move_to_again(job)
            else:
                self.end(job, "cancelled")

    def move_to_again(self, job: int) -> None:
        self.in_pool.pop(job, None)
        self.writing.discard(job)
        self.again.add(job)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), is_written=st.booleans())
    def write(self, data: st.DataObject, is_written: bool) -> None:
        job = data.draw(st.sampled_from(sorted(self.writing)))
        if is_written:
            self.end(job, "succeeded")
        elif not self.lose(job):
            self.end(job, "failed")

    @precondition(lambda self: not self.is_journaled and "succeeded" in self.ends.values())
    @rule(data=st.data())
    def lose_an_output_that_was_not_written(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(job for job, end in self.ends.items() if end == "succeeded")))
        if self.lose(job):
            del self.ends[job]

    def lose(self, job: int) -> bool:
        is_wanted = not self.is_cancelled and job not in self.cancelled_jobs
        self.losses[job] += is_wanted
        runs_again = is_wanted and self.losses[job] <= MOST_REPEATS
        assert self.follower.output_lost(job) == runs_again
        if runs_again:
            self.move_to_again(job)
            self.requested_again[job] += 1
        return runs_again

    @precondition(lambda self: not self.is_held)
    @rule(target=events, most=st.sampled_from((1, 2, None)))
    def send_again(self, most: int | None) -> object:
        taken = self.follower.take_again(most)
        assert not set(taken) & set(self.follower.take_again() if most is None else ()), "none a second time"
        assert len(taken) == min(len(self.again), most or MOST_JOBS + 3)
        assert len(set(taken)) == len(taken), "each once"
        assert set(taken) <= self.again
        return multiple(*self.send(taken))

    @precondition(lambda self: not self.is_journaled and len(self.ends) > 2)
    @rule()
    def cancel(self) -> None:
        self.is_cancelled = self.is_sealed = True
        self.end_waiting(self.follower.cancel(), self.again)

    @precondition(lambda self: not self.is_journaled and self.jobs - self.ends.keys())
    @rule(data=st.data())
    def cancel_job(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.jobs - self.ends.keys())))
        self.cancelled_jobs.add(job)
        assert self.follower.cancel_job(job) == (job in self.again)
        self.end_waiting([job] if job in self.again else [], self.again & {job})

    def end_waiting(self, told: list[int], expected: set[int]) -> None:
        assert set(told) == expected, "whatever waits to be sent again ends now"
        self.again -= expected
        for job in told:
            self.end(job, "cancelled")

    @precondition(lambda self: not self.is_journaled)
    @rule()
    def hold(self) -> None:
        ids = set(self.in_pool.values())
        assert self.follower.hold(ids) == (not self.is_cancelled)
        if not self.is_cancelled:
            self.is_held, self.withdrawn_ids = True, self.withdrawn_ids | ids
        assert self.follower.is_held == self.is_held

    @rule()
    def release(self) -> None:
        self.follower.release()
        self.is_held = self.is_given_up = False

    @precondition(lambda self: self.is_held)
    @rule()
    def give_up(self) -> None:
        self.is_held, self.is_given_up = False, True
        self.end_waiting(self.follower.give_up(), self.again)

    @precondition(lambda self: self.is_journaled)
    @rule(target=events)
    def restart_the_controller(self) -> object:
        """What has no outcome in the journal is sent to the next one; events of the earlier one mean nothing."""
        self.start_follower()
        self.in_pool, self.writing, self.again = {}, set(), set()
        self.losses.clear()
        self.requested_again.clear()
        self.follower.submit(len(self.jobs))
        return multiple(*self.send(sorted(self.jobs - self.ends.keys())))

    @invariant()
    def nothing_is_remembered_of_ids_without_jobs(self) -> None:
        """The ids from which jobs were withdrawn stayed: a job of one that somebody else cancelled later ran again."""
        used = Counter(self.in_pool.values())
        if not self.is_held:
            self.withdrawn_ids &= used.keys()
        assert self.follower._withdrawn_ids == self.withdrawn_ids
        assert self.follower._sent_under == used
        assert all(self.follower.is_in_use(f"id-{n}") == (f"id-{n}" in used) for n in range(1, self.ids + 1))

    @invariant()
    def each_job_is_in_one_place(self) -> None:
        places = [*self.in_pool, *self.again, *self.ends]
        assert sorted(places) == sorted(self.jobs)
        assert self.follower.in_pool == len(self.in_pool)
        assert all(count <= MOST_REPEATS for count in self.requested_again.values())

    @invariant()
    def counts_agree(self) -> None:
        if self.ledger is not None:
            assert +self.ledger.counts == Counter(self.ends.values())
            assert self.ledger.unended == len(self.jobs) - len(self.ends)
            assert self.ledger.over == (self.is_sealed and len(self.ends) == len(self.jobs))

    def teardown(self) -> None:
        """The pool always comes to an end: then each job has exactly one."""
        if not hasattr(self, "follower"):  # no rule has run
            return
        self.release()
        self.send(self.follower.take_again())
        for job, sent in tuple(self.in_pool.items()):
            if job not in self.writing:
                assert self.follower.arrived(job, sent)
            self.end(job, "succeeded")
        self.seal()
        assert self.ends.keys() == self.jobs
        self.counts_agree()
        if self.ledger is not None:
            assert self.ledger.over


TestFollower = FollowerMachine.TestCase
TestFollower.settings = settings(max_examples=examples(700), stateful_step_count=40, deadline=None)


@given(
    states=st.lists(STATES, min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
    is_journaled=st.booleans(),
)
def test_the_order_of_events_and_late_ones_change_nothing(
    states: list[EndState], order: object, is_journaled: bool
) -> None:
    """Each event comes twice, and once more from an earlier submission with another end."""
    events = [(index, "new", state) for index, state in enumerate(states)] * 2
    events += [(index, "old", "failed") for index in range(len(states))]
    order.shuffle(events)  # type: ignore[attr-defined]
    ledger: JobLedger[EndState] | None = None if is_journaled else JobLedger(str)
    follower = JobFollower(ledger)
    jobs = follower.submit(len(states))
    follower.sent(jobs, "old")
    follower.sent(jobs, "new")
    told = [
        (index, state) for index, sent, state in events if follower.arrived(index, sent) and follower.end(index, state)
    ]
    assert sorted(told) == list(enumerate(states))
    assert follower.in_pool == 0
    assert ledger is None or +ledger.counts == Counter(states)


def test_an_end_of_a_job_that_was_not_sent_counts_where_the_ledger_is_here() -> None:
    """An HTTP server reads ends from another follower; it sends nothing itself."""
    ledger: JobLedger[EndState] = JobLedger(str)
    follower = JobFollower(ledger)
    follower.submit(2)
    assert [follower.end(1, "failed"), follower.end(1, "succeeded"), follower.end(0, "succeeded")] == [
        True,
        False,
        True,
    ]
    assert (ledger.count("failed"), ledger.count("succeeded")) == (1, 1)


def test_a_job_that_is_sent_under_an_id_after_all_of_its_jobs_were_withdrawn_was_not_withdrawn() -> None:
    """Its pool has forgotten the id by then. A job that somebody else cancelled ran again, for ever."""
    ledger: JobLedger[EndState] = JobLedger(str)
    follower = JobFollower(ledger)
    follower.sent(follower.submit(2), "first")
    assert follower.hold(["first"])
    for job in (0, 1):
        assert follower.arrived(job, "first")
        assert follower.withdrawn(job, "first"), "the folder could not be written"
    follower.release()
    follower.sent(follower.take_again(), "second")
    follower.sent(follower.submit(1), "first")
    assert follower.arrived(2, "first")
    assert not follower.withdrawn(2, "first"), "somebody else has cancelled it"


def test_a_job_that_is_being_sent_while_its_submission_is_withdrawn_is_sent_again() -> None:
    follower = JobFollower(JobLedger[EndState](str))
    assert follower.hold(["first"]), "it has no jobs in the pool"
    follower.sent(follower.submit(1), "first")
    assert follower.arrived(0, "first")
    assert follower.withdrawn(0, "first")


def test_a_refused_job_is_in_the_pool_no_longer() -> None:
    follower: JobFollower[EndState] = JobFollower()
    follower.sent(follower.submit(3), "first")
    follower.refused([1])
    assert follower.in_pool == 2
    assert not follower.arrived(1, "first")
    assert not follower.end(1, "failed"), "the journal has its outcome"
    assert follower.arrived(2, "first")
