"""Built-in workloads by name.

Proves: each can be drawn with what it says of itself; a parameter that is given counts; the same seed is the same work;
what cannot be is told with the name of the parameter.
"""

from __future__ import annotations

from random import Random

import pytest

from pool.errors import UnknownName, UnusableField
from scheduler.workloads.built_in import BUILT_IN
from scheduler.workloads.workload import Workload

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
        ("rate=nan", UnusableField, "zipf: rate: found 'nan', expected a number from 0"),
        ("rate=-1", UnusableField, "zipf: rate: found '-1', expected a number from 0"),
        ("jobs", UnusableField, "zipf: found 'jobs', expected NAME=VALUE, such as jobs=1000,models=12"),
        ("job=3", UnknownName, r"unknown parameter of zipf 'job'; did you mean 'jobs'\?"),
    ],
)
def test_what_cannot_be_is_told(text: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        BUILT_IN["zipf"].parse(text)


def test_a_gap_of_nothing_is_refused() -> None:
    with pytest.raises(UnusableField, match="bursts: gap: found '0', expected a number above 0"):
        BUILT_IN["bursts"].parse("gap=0")
