"""Requests that join a running pass at a step, and leave when they are done.

Proves on the shapes model and a simulated device, in float32: whenever a request joins, and whoever else is there, with
whatever sampler, schedule, number of steps and guidance, its bytes are the bytes of a closed pass of the same size;
also if it resumes from a state, if others stop, pause or fail, and if memory runs out. Costs add up. What cannot join
says why.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.engine.engine import Engine
from modelpool.pool.families.definitions import defined_families
from modelpool.pool.inference.sampling.samplers import FUNCTIONS
from modelpool.pool.models.components.diffusion.rows import ARCHITECTURES
from modelpool.pool.values.core.errors import CorruptFile, UnusableField
from modelpool.pool.values.core.joining import pass_key, why_not_joining
from modelpool.pool.values.core.run_options import DeepCache, RunOptions
from modelpool.pool.values.core.sampling_facts import PLAIN_SAMPLING, CfgRescale
from modelpool.pool.values.core.stage_params import (
    ADAPTIVE_SAMPLER,
    BatchMember,
    DecodeParams,
    Encoded,
    GuidanceParams,
    Outcome,
    RunHooks,
    RunState,
    SampleParams,
    StartCondition,
    Stopped,
)
from modelpool.pool.weights.patcher.out_of_memory import RanOutOfMemory
from tests.pool.engine.test_batching import SHAPES, Bench, array
from tests.pool.pipeline import PLENTY_BYTES, open_engine

SIZE = 4


@dataclass
class Arrivals:
    """Members by the step of the pass at which they join; and what came of them."""

    at: dict[int, list[BatchMember]]
    asked: int = -1
    waiting: list[BatchMember] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    #: those that were there at each step
    together: list[int] = field(default_factory=list)
    #: steps that members reported since the pass said that all have, and those at each time that it did
    reported: list[int] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    is_over: bool = False

    def take(self, most: int, going_on: int) -> Sequence[BatchMember]:
        assert not self.is_over
        self.asked += 1
        self.waiting += self.at.pop(self.asked, [])
        if not going_on and not self.waiting and self.at:  # nobody is there: the next ones come sooner
            self.waiting += self.at.pop(min(self.at))
        found, self.waiting = self.waiting[:most], self.waiting[most:]
        self.together.append(going_on + len(found))
        self.is_over = not found and not going_on
        return found

    def ended(self, member: BatchMember, outcome: Outcome) -> None:
        assert member.task.task_id not in self.outcomes, "told twice"
        self.outcomes[member.task.task_id] = outcome

    def stepped(self) -> None:
        self.steps.append(self.reported)
        self.reported = []

    def of(self, member: BatchMember) -> Outcome:
        return self.outcomes[member.task.task_id]


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog([SHAPES], [], "sim")


@pytest.fixture
def bench(catalog: Catalog) -> Iterator[Bench]:
    engine = open_engine("sim", PLENTY_BYTES)
    yield Bench(engine, catalog)
    engine.close()
    assert sim.memory_stats(0).used_bytes == 0


def sampled(bench: Bench, count: int, **schedule: Any) -> list[BatchMember]:
    return [bench.fixed(member, SIZE) for member in bench.samples(count, **schedule)]


def changed(member: BatchMember, number: int, **schedule: Any) -> BatchMember:
    """`member` with another schedule and another name."""
    work = member.work
    assert isinstance(work, SampleParams)
    work = replace(work, schedule=replace(work.schedule, **schedule))
    return replace(member, work=work, task=replace(member.task, task_id=f"{member.task.task_id} {number}"))


def closed(engine: Engine, members: Sequence[BatchMember]) -> list[np.ndarray]:
    """The bytes of each in a closed pass of its own."""
    return [array(engine.run_batch([member])[0]) for member in members]


def assert_bytes(arrivals: Arrivals, members: Sequence[BatchMember], expected: Sequence[np.ndarray]) -> None:
    for member, one in zip(members, expected, strict=True):
        outcome = arrivals.of(member)
        assert isinstance(outcome, tuple), outcome
        assert np.array_equal(array(outcome), one), member.work


def test_whoever_joins_whenever_has_the_bytes_of_a_closed_pass(bench: Bench) -> None:
    """One request of each sampler, with numbers of steps and guidance scales of their own, in one pass that never has
    more than four; each joins as soon as one before it leaves. Then the same ones in another order."""
    samplers = sorted(set(FUNCTIONS) - {ADAPTIVE_SAMPLER})
    (plain,) = sampled(bench, 1)
    members = []
    for number, sampler in enumerate(samplers):
        member = changed(
            plain, number, sampler=sampler, steps=3 + number % 4, noise_schedule=("normal", "karras")[number % 2]
        )
        work = member.work
        assert isinstance(work, SampleParams)
        members.append(replace(member, work=replace(work, seed=number, guidance=GuidanceParams(2.0 + number % 3))))
    keys = {pass_key(member.work, PLAIN_SAMPLING) for member in members}
    assert len(keys) == 1
    assert keys != {""}
    expected = closed(bench.engine, members)
    arrivals = Arrivals({0: members[::-1]})
    bench.engine.run_pass(arrivals)
    assert_bytes(arrivals, members, expected)
    assert max(arrivals.together) == SIZE
    assert all(outcome[1].batched == SIZE for outcome in arrivals.outcomes.values() if isinstance(outcome, tuple))


def test_a_join_at_every_step_changes_no_byte(bench: Bench) -> None:
    """Of two that run, and of the one that joins: with as long texts, and with other ones, which make calls of their
    own. With guidance, and without. Alone, in passes of one row, some bytes differ: else this would prove nothing."""
    guided = sampled(bench, 3, sampler="dpmpp_2m")
    plain = []
    for number, member in enumerate(guided):
        work = member.work
        assert isinstance(work, SampleParams)
        text = member.inputs["positive"]
        assert isinstance(text, Encoded)
        inputs = {"positive": Encoded(np.concatenate([text.context_LD] * (1 + number % 2)))}
        plain.append(replace(changed(member, 100), work=replace(work, guidance=GuidanceParams(1.0)), inputs=inputs))
    for members in (guided, plain):
        expected = closed(bench.engine, members)
        most = []
        for step in range(9):
            arrivals = Arrivals({0: members[:2], step: members[2:]} if step else {0: members})
            bench.engine.run_pass(arrivals)
            assert_bytes(arrivals, members, expected)
            most.append(max(arrivals.together))
        assert most == [3] * 8 + [2], "the last one came when the others had left"
        single = [replace(member, task=replace(member.task, batch_size=1)) for member in members]
        alone = [array(bench.alone(member)) for member in single]
        assert members is plain or any(
            not np.array_equal(one, other) for one, other in zip(alone, expected, strict=True)
        )


def test_one_that_stops_leaves_at_its_step_and_one_that_pauses_continues_in_another_pass(bench: Bench) -> None:
    """A state goes on in a pass with others, which are at other steps, and in a closed one."""
    members = sampled(bench, 4, sampler="uni_pc")
    expected = closed(bench.engine, members)
    done: dict[int, list[int]] = {0: [], 1: [], 2: []}
    saved: list[RunState] = []

    def hooks(place: int, **asks: Callable[[], bool]) -> RunHooks:
        how = {"should_stop": lambda: False, **asks}
        return RunHooks(lambda step, of: done[place].append(step), **how)  # type: ignore[arg-type]

    def keep(states: Callable[[], Sequence[RunState]]) -> None:
        saved.extend(states())

    stops = replace(members[0], hooks=hooks(0, should_stop=lambda: len(done[0]) == 2))
    pauses = replace(members[1], hooks=hooks(1, should_pause=lambda: len(done[1]) == 3))
    goes_on = replace(members[2], hooks=replace(hooks(2), checkpoint=keep))
    arrivals = Arrivals({0: [stops, pauses], 2: [goes_on]})
    bench.engine.run_pass(arrivals)
    assert isinstance(arrivals.of(stops), Stopped)
    assert done == {0: [1, 2], 1: [1, 2, 3], 2: [1, 2, 3, 4, 5, 6]}
    assert_bytes(arrivals, [goes_on], expected[2:3])
    outcome = arrivals.of(pauses)
    assert isinstance(outcome, tuple)
    assert isinstance(outcome[0], RunState)
    assert [state.step for state in saved] == [1, 2, 3, 4, 5]
    resumed = [replace(members[1], resume=outcome[0]), replace(members[2], resume=saved[1])]
    arrivals = Arrivals({0: [members[3]], 2: resumed})
    bench.engine.run_pass(arrivals)
    assert_bytes(arrivals, [members[3], *resumed], [expected[3], expected[1], expected[2]])
    assert np.array_equal(array(bench.engine.run_batch(resumed[:1])[0]), expected[1])


def test_one_that_fails_fails_alone_and_one_that_may_not_join_is_refused(bench: Bench) -> None:
    members = sampled(bench, 4)
    expected = closed(bench.engine, members[:2])
    prompt, work = members[2].inputs["positive"], members[3].work
    assert isinstance(prompt, Encoded)
    assert isinstance(work, SampleParams)
    broken = replace(
        members[2], inputs={**members[2].inputs, "positive": Encoded(prompt.context_LD * np.float32("nan"))}
    )
    cached = replace(members[3], work=replace(work, options=RunOptions(deepcache=DeepCache())))
    arrivals = Arrivals({0: [members[0]], 2: [broken, cached], 3: [members[1]]})
    bench.engine.run_pass(arrivals)
    assert_bytes(arrivals, members[:2], expected)
    assert isinstance(arrivals.of(broken), CorruptFile)
    refused = arrivals.of(cached)
    assert isinstance(refused, UnusableField)
    assert "deepcache" in str(refused)


def test_costs_are_shares_of_the_time_in_the_pass_and_the_load_is_of_those_who_came_first(bench: Bench) -> None:
    members = sampled(bench, 3)
    long = changed(members[2], 1, steps=24)
    arrivals = Arrivals({0: [long, members[0]], 8: [members[1]]})
    bench.engine.run_pass(arrivals)
    first, other, joined = (arrivals.of(member)[1] for member in (long, members[0], members[1]))  # type: ignore[index]
    assert first.uploaded_bytes > 0
    assert first.uploaded_bytes - other.uploaded_bytes in (0, 1)
    assert (joined.uploaded_bytes, joined.load_seconds, joined.resident) == (0, 0.0, True)
    assert first.run_seconds > other.run_seconds + joined.run_seconds, "the others left before it"
    assert first.whole.run_seconds == pytest.approx(SIZE * first.run_seconds)
    assert first.working_bytes > 0, "the last one has what the pass measured"


def test_out_of_memory_begins_all_again_and_changes_no_byte(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that runs out once, at a step at which one has left and one has joined; and one that always does."""
    members = sampled(bench, 3)
    short = changed(members[0], 1, steps=2)
    all_of = [short, *members[1:]]
    expected = closed(bench.engine, all_of)
    from modelpool.pool.engine import open_pass

    real, calls = open_pass.call_as_asked, [0]

    def fails_at(*when: int) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            calls[0] += 1
            if calls[0] in when:
                raise RanOutOfMemory("by the test")
            return real(*given)

        return called

    monkeypatch.setattr(open_pass, "call_as_asked", fails_at(5))
    arrivals = Arrivals({0: [short, members[1]], 3: [members[2]]})
    bench.engine.run_pass(arrivals)
    assert_bytes(arrivals, all_of, expected)
    costs = [arrivals.of(member)[1].oom_steps for member in all_of]  # type: ignore[index]
    assert costs[0] == (), "it had left"
    assert costs[1] == costs[2] != ()
    monkeypatch.setattr(open_pass, "call_as_asked", fails_at(*range(1000)))
    arrivals = Arrivals({0: all_of})
    bench.engine.run_pass(arrivals)
    assert {type(arrivals.of(member)) for member in all_of} == {RanOutOfMemory}


def test_after_another_failure_of_the_model_each_is_run_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    members = sampled(bench, 3)
    expected = closed(bench.engine, members)
    from modelpool.pool.engine import open_pass

    def fails(*given: Any) -> Any:
        raise RuntimeError("by the test")

    monkeypatch.setattr(open_pass, "call_as_asked", fails)
    arrivals = Arrivals({0: members})
    bench.engine.run_pass(arrivals)
    assert_bytes(arrivals, members, expected)


def test_what_does_not_join_says_why(bench: Bench) -> None:
    (member,) = sampled(bench, 1)
    work = member.work
    assert isinstance(work, SampleParams)
    facts = PLAIN_SAMPLING
    cases: list[tuple[str, Any, Any]] = [
        ("sampling", DecodeParams(work.model, work.shape, 4), facts),
        ("dpm_adaptive", replace(work, schedule=replace(work.schedule, sampler=ADAPTIVE_SAMPLER)), facts),
        ("StartCondition", replace(work, conditions=(StartCondition(),)), facts),
        ("deepcache", replace(work, options=RunOptions(deepcache=DeepCache())), facts),
        ("normalises", work, replace(facts, cfg_rescale=list(CfgRescale)[-1])),
        ("no step", replace(work, schedule=replace(work.schedule, first_step=work.schedule.steps)), facts),
    ]
    for words, asked, of in cases:
        assert words in why_not_joining(asked, of), words
        assert not pass_key(asked, of), words
    assert why_not_joining(work, facts) == ""
    assert pass_key(work, facts)
    assert pass_key(replace(work, batch_size=0), facts) == "", "of any size"
    others = [replace(work, batch_size=8), replace(work, guidance=GuidanceParams(1.0))]
    assert len({pass_key(one, facts) for one in (work, *others)}) == 3
    for family in defined_families():
        if ARCHITECTURES[family.name].prepare is not None:
            assert why_not_joining(work, family.sampling), family.name


def test_one_that_is_done_at_the_step_at_which_memory_runs_out_has_left(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result of the second does not fit, after the first was done at the same step. Found: the first was run again
    and ended twice, which the worker answered with a KeyError in the middle of the pass."""
    members = sampled(bench, 2)
    expected = closed(bench.engine, members)
    from modelpool.pool.engine import open_pass

    real, told = open_pass.results_of, [0]

    def fails_once(*given: Any) -> Any:
        told[0] += 1
        if told[0] == 2:
            raise RanOutOfMemory("by the test")
        return real(*given)

    monkeypatch.setattr(open_pass, "results_of", fails_once)
    arrivals = Arrivals({0: members})
    bench.engine.run_pass(arrivals)
    assert_bytes(arrivals, members, expected)
    assert told == [3], "the first has run once"


def test_a_pass_tells_of_a_step_once_all_rows_have_reported_it(bench: Bench) -> None:
    """So that one message can have the steps of all: those that joined later are at earlier ones."""
    members, arrivals = sampled(bench, 3), Arrivals({})
    heard = [
        replace(member, hooks=replace(member.hooks, on_step=lambda done, steps: arrivals.reported.append(done)))
        for member in members
    ]
    arrivals.at = {0: heard[:2], 4: heard[2:]}
    bench.engine.run_pass(arrivals)
    assert arrivals.reported == []
    assert len(arrivals.steps[0]) == 2
    assert any(len(set(steps)) > 1 for steps in arrivals.steps), "rows at different steps"
    for row in (0, 1):
        assert [steps[row] for steps in arrivals.steps if len(steps) > row][:2] == [1, 2]


def test_no_thread_of_a_row_outlives_its_pass(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that exits fails alone; one that catches every error ends with a pass that fails; and a thread that cannot
    start fails its pass. Found: an exit left a row without an outcome."""
    members = sampled(bench, 3)
    expected = closed(bench.engine, members)

    def exits(done: int, steps: int) -> None:
        raise SystemExit(3)

    leaving = replace(members[1], hooks=replace(members[1].hooks, on_step=exits))
    arrivals = Arrivals({0: [members[0], leaving], 2: [members[2]]})
    bench.engine.run_pass(arrivals)
    assert_bytes(arrivals, [members[0], members[2]], [expected[0], expected[2]])
    assert "SystemExit(3)" in str(arrivals.of(leaving))
    from modelpool.pool.engine import open_pass

    real, calls = open_pass.denoised, [0]

    def catches(found: Any, module: Any, predict: Callable[..., Any]) -> Any:
        def asked(call: Any) -> Any:
            for _ in range(3):
                try:
                    return predict(call)
                except Exception:
                    continue
            raise AssertionError

        return real(found, module, asked)

    def lost(*given: Any) -> Any:
        calls[0] += 1
        raise RanOutOfMemory("by the test")

    def no_thread(row: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(open_pass, "denoised", catches)
        patch.setattr(open_pass, "call_as_asked", lost)
        arrivals = Arrivals({0: members})
        bench.engine.run_pass(arrivals)
    assert {type(arrivals.of(member)) for member in members} == {RanOutOfMemory}
    with monkeypatch.context() as patch:
        patch.setattr(open_pass.threading.Thread, "start", no_thread)
        arrivals = Arrivals({0: members})
        bench.engine.run_pass(arrivals)
    assert_bytes(arrivals, members, expected)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("row ")]
