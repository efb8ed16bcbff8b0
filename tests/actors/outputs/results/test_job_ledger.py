"""The ledger of a submission against a model: events in any order, late, lost and twice."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from modelpool.actors.outputs.results.job_ledger import MOST_REPEATS, EndState, JobLedger, LostOutputs

INDEXES = st.integers(0, 11)
STATES: st.SearchStrategy[EndState] = st.sampled_from(("succeeded", "failed", "cancelled"))


class LedgerMachine(RuleBasedStateMachine):
    """A submission with end events that arrive in any order, repeatedly, from runs that were repeated. `told` is what a
    reader was told, in order; an end is known by the number of its event."""

    @initialize()
    def begin(self) -> None:
        self.ledger: JobLedger[tuple[EndState, int]] = JobLedger(lambda end: end[0])
        self.lost = LostOutputs()
        self.model: dict[int, tuple[EndState, int]] = {}
        self.events: list[tuple[int, tuple[EndState, int]]] = []
        self.told: list[int] = []
        self.reopened: list[int] = []
        self.losses: dict[int, int] = {}
        self.requests = self.left_out = 0
        self.is_sealed = False

    @precondition(lambda self: not self.is_sealed and self.requests < 12)
    @rule(count=st.integers(1, 4))
    def submit(self, count: int) -> None:
        self.ledger.add(count)
        self.requests += count

    @rule()
    def seal(self) -> None:
        self.ledger.seal()
        self.is_sealed = True

    @precondition(lambda self: self.left_out + len(self.model) < self.requests and not self.is_sealed)
    @rule()
    def refuse_the_last(self) -> None:
        last = self.requests - self.left_out - 1
        if last not in self.model:
            self.ledger.leave_out(1)
            self.left_out += 1

    @rule(index=INDEXES, state=STATES)
    def end(self, index: int, state: EndState) -> None:
        if index < self.requests - self.left_out:
            self.arrive(index, (state, len(self.events)))

    @precondition(lambda self: self.events)
    @rule(data=st.data())
    def repeat_an_event(self, data: st.DataObject) -> None:
        index, end = data.draw(st.sampled_from(self.events))
        if index < self.requests - self.left_out:
            self.arrive(index, end)

    def arrive(self, index: int, end: tuple[EndState, int]) -> None:
        self.events.append((index, end))
        is_first = index not in self.model
        assert self.ledger.end(index, end) == is_first
        if is_first:
            self.model[index] = end
            self.told.append(index)

    @precondition(lambda self: any(state == "succeeded" for state, _ in self.model.values()))
    @rule(data=st.data())
    def lose_an_output(self, data: st.DataObject) -> None:
        """The driver's rule: the job runs again, and fails after too many losses."""
        index = data.draw(st.sampled_from(sorted(i for i, end in self.model.items() if end[0] == "succeeded")))
        self.losses[index] = self.losses.get(index, 0) + 1
        runs_again = self.lost.note(index)
        assert runs_again == (self.losses[index] <= MOST_REPEATS)
        if runs_again:
            assert self.ledger.reopen(index) == self.model.pop(index)
            self.reopened.append(index)
        else:
            self.model[index] = ("failed", len(self.events))
            self.ledger.replace(index, self.model[index])

    @invariant()
    def the_ledger_is_the_model(self) -> None:
        for index in range(12):
            assert self.ledger.end_of(index) == self.model.get(index)
            assert self.ledger.has_ended(index) == (index in self.model)
        for state in ("succeeded", "failed", "cancelled"):
            in_model = sum(end[0] == state for end in self.model.values())
            assert self.ledger.count(state) == self.ledger.counts[state] == in_model

    @invariant()
    def nothing_is_lost_and_nothing_told_twice(self) -> None:
        assert self.ledger.ended + self.ledger.unended == self.requests - self.left_out == self.ledger.expected
        assert self.ledger.unended >= 0
        for index in range(12):
            assert self.told.count(index) == (index in self.model) + self.reopened.count(index)

    @invariant()
    def it_is_over_once_every_job_has_ended(self) -> None:
        everything = set(range(self.requests - self.left_out)) == set(self.model)
        assert self.ledger.over == (self.is_sealed and everything)
        assert self.ledger.sealed == self.is_sealed


TestLedgerMachine = LedgerMachine.TestCase
