"""Built-in workloads by name.

Proves: each can be drawn with what it says of itself; a parameter that is given counts; the same seed is the same work;
what cannot be is told with the name of the parameter.
"""

from __future__ import annotations

from random import Random

import pytest

from modelpool.benchmarks.lab.built_in import WORKLOADS
from modelpool.pool.values.core.errors import UnknownName, UnusableField
from modelpool.scheduler.simulator.workloads.built_in import BUILT_IN as PRODUCT_WORKLOADS
from modelpool.scheduler.simulator.workloads.workload import Workload

BUILT_IN = {**PRODUCT_WORKLOADS, **WORKLOADS}
NAMES = pytest.mark.parametrize("name", sorted(BUILT_IN))


def drawn(name: str, text: str = "", seed: int = 0) -> Workload:
    entry = BUILT_IN[name]
    return entry.make(Random(seed), **entry.parse(text))


@NAMES
def test_each_can_be_drawn_as_it_says_of_itself(name: str) -> None:
    entry = BUILT_IN[name]
    told = ",".join(f"{key}={value}" for key, value in entry.parameters.items())
    assert entry.parse(told) == entry.parameters
    assert entry.line.endswith(".")
    workload = drawn(name)
    assert len(workload.jobs) > 100
    assert workload == drawn(name, told)
    assert workload != drawn(name, seed=1)


@pytest.mark.parametrize("name", ["zipf", "shifting", "sizes", "batch"])
def test_as_many_jobs_as_were_asked_for(name: str) -> None:
    assert len(drawn(name, "jobs=37").jobs) == 37


def test_parameters_count() -> None:
    assert len({c.key.partition("/")[0] for c in drawn("zipf", "models=5").components}) == 5
    assert drawn("zipf", "rate=0").seconds == 0.0
    assert drawn("zipf", "rate=1").seconds > drawn("zipf", "rate=4").seconds > 0.0
    assert {s.job.user for s in drawn("users", "users=3").jobs} == {"user-0", "user-1", "user-2"}
    assert drawn("batch").seconds == 0.0
    adapters = {a for s in drawn("zipf", "loras=2").jobs for t in s.job.tasks for u in t.uses for a in u.adapters}
    assert {a.rpartition("/")[2] for a in adapters} == {"lora-0", "lora-1"}


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("jobs=many", UnusableField, "zipf: jobs: found 'many', expected a whole number from 1"),
        ("jobs=0", UnusableField, "zipf: jobs: found '0', expected a whole number from 1"),
        ("rate=nan", UnusableField, "zipf: rate: found 'nan', expected a number from 1e-05 to 1,000,000.0, or 0"),
        ("rate=-1", UnusableField, "zipf: rate: found '-1', expected a number from 1e-05 to"),
        ("jobs", UnusableField, "zipf: found 'jobs', expected NAME=VALUE, such as jobs=1000,models=12"),
        ("job=3", UnknownName, r"unknown parameter of zipf 'job'; did you mean 'jobs'\?"),
    ],
)
def test_what_cannot_be_is_told(text: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        BUILT_IN["zipf"].parse(text)


def test_a_gap_of_nothing_is_refused() -> None:
    with pytest.raises(UnusableField, match=r"bursts: gap: found '0', expected a number from 0\.001 to 1,000,000\.0"):
        BUILT_IN["bursts"].parse("gap=0")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("zipf:jobs=1000000000", "zipf: jobs: found '1000000000', expected a whole number from 1 to 1,000,000"),
        ("zipf:models=1000000000", "zipf: models"),
        ("zipf:models=1000,loras=1000", "zipf: models x loras: found 1000000, expected at most 100,000"),
        ("zipf:rate=1e-320", "zipf: rate"),
        ("zipf:steps=1" + "0" * 400, "zipf: steps: found '10{39}[.]{3}'"),
        ("zipf:steps=1" + "0" * 5000, "zipf: steps"),
        ("zipf:rate=1e308", "zipf: rate"),
        ("users:users=100000000", "users: users"),
        ("katz:gpus=100000000", "katz: gpus"),
        ("shifting:shift=1e-9", "shifting: shift"),
        ("bursts:gap=1e-9", "bursts: gap"),
        ("batch:seeds=99999999999", "batch: seeds"),
    ],
)
def test_what_would_take_hours_or_all_memory_is_refused(asked: str, said: str) -> None:
    """Found by hand: these hung, filled the memory, or ended in an error that named no parameter."""
    name, _, text = asked.partition(":")
    with pytest.raises(UnusableField, match=said):
        BUILT_IN[name].parse(text)


def test_bursts_that_are_too_many_together_are_refused() -> None:
    entry = BUILT_IN["bursts"]
    with pytest.raises(UnusableField, match=r"bursts: gap: found 0\.001, expected at least 0\.0?4: bursts of at most"):
        entry.make(Random(1), **entry.parse("jobs=500,rate=0.5,burst=40,gap=0.001"))


def test_shifts_between_two_jobs_cost_no_more_than_one() -> None:
    assert len(drawn("shifting", "jobs=30,rate=0.00001,shift=0.001").jobs) == 30
