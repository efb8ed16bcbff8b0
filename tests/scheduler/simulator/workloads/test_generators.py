"""Every generated workload is well formed, follows its seed, and has what its name says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import pytest

from modelpool.pool.values.specs.spec import JobSpec, Role
from modelpool.scheduler.model.jobs import problem_with
from modelpool.scheduler.model.messages import Submitted
from modelpool.scheduler.simulator.workloads.generators import (
    UserDemand,
    bursting,
    heterogeneous,
    many_users,
    offline_batch,
    shifting,
    zipf,
)
from modelpool.scheduler.simulator.workloads.mix import Mix
from modelpool.scheduler.simulator.workloads.models import InventedModel
from modelpool.scheduler.simulator.workloads.trace_lines import from_lines, to_lines
from modelpool.scheduler.simulator.workloads.workload import Workload

MODELS = [InventedModel(f"m{n}") for n in range(6)]
MIX = Mix(MODELS, ["", "x", "x+y"], controlnets=["", "pose"])
DEMANDS = (UserDemand("bulk", 60), UserDemand("ann", 10, 0.5, 20.0), UserDemand("bob", 10, 0.5))

GENERATED: dict[str, Callable[[Random], Workload]] = {
    "zipf": lambda rng: zipf(MIX, 80, rng),
    "zipf in time": lambda rng: zipf(MIX, 80, rng, 2.0),
    "shifting": lambda rng: shifting(MIX, 80, rng, 2.0, 10.0),
    "bursting": lambda rng: bursting(MIX, 80, rng, 2.0, 10, 8.0),
    "heterogeneous": lambda rng: heterogeneous(80, rng, 0.1),
    "offline batch": lambda rng: offline_batch(MODELS[:2], ["", "x+y"], 80, rng),
    "many users": lambda rng: many_users(MIX, DEMANDS, rng),
}


def model_of(job: JobSpec) -> str:
    return job.tasks[1].uses[0].component.split("/")[0]


@pytest.mark.parametrize("name", GENERATED)
def test_jobs_are_well_formed_and_follow_the_seed(name: str) -> None:
    first, second, other = (GENERATED[name](Random(seed)) for seed in (1, 1, 2))
    assert first == second
    assert first != other
    known = {spec.key for spec in first.components}
    assert [problem_with(submitted.job, known) for submitted in first.jobs] == [None] * len(first.jobs)
    assert all(key in known for s in first.jobs for task in s.job.tasks for use in task.uses for key in use.adapters)
    assert from_lines(to_lines(first)) == first


def most_popular(jobs: Sequence[Submitted]) -> str:
    return Counter(model_of(submitted.job) for submitted in jobs).most_common(1)[0][0]


def test_the_most_popular_model_changes_only_when_popularity_shifts() -> None:
    workload = shifting(Mix(MODELS, model_exponent=2.0), 1200, Random(3), 2.0, 100.0)
    periods = [[s for s in workload.jobs if 100 * n <= s.at < 100 * (n + 1)] for n in range(5)]
    assert len({most_popular(period) for period in periods}) > 1
    steady = zipf(Mix(MODELS, model_exponent=2.0), 1200, Random(3), 2.0)
    periods = [[s for s in steady.jobs if 100 * n <= s.at < 100 * (n + 1)] for n in range(5)]
    assert {most_popular(period) for period in periods} == {"m0"}


def test_a_burst_is_of_one_model_and_one_patch_set() -> None:
    """Bursts of 40 within 2 s over a calm job in 10 s: in the busiest two seconds nearly all ask for the same weights.
    Two bursts may meet, so it is at least half of them."""
    workload = bursting(Mix(MODELS, ["", "x", "x+y"]), 60, Random(5), 0.1, 40, 60.0, 2.0)
    assert len(workload.jobs) >= 60 + 40
    assert (len(workload.jobs) - 60) % 40 == 0
    near = max(([s for s in workload.jobs if t <= s.at < t + 2.0] for t in range(int(workload.seconds))), key=len)
    wanted = Counter(submitted.job.tasks[1].uses for submitted in near)
    assert len(near) >= 20
    assert wanted.most_common(1)[0][1] * 2 >= len(near)


def test_a_batch_has_several_seeds_of_a_prompt_and_one_name() -> None:
    workload = offline_batch(MODELS[:2], ["", "x"], 80, Random(1), seeds_per_prompt=4)
    encodes = Counter(submitted.job.tasks[0].task_id for submitted in workload.jobs)
    assert set(encodes.values()) == {4}
    assert {submitted.job.batch for submitted in workload.jobs} == {"batch"}
    assert {submitted.at for submitted in workload.jobs} == {0.0}
    assert len(Counter(submitted.job.tasks[1].uses[0].patch_digest for submitted in workload.jobs)) == 3


def test_users_ask_for_as_much_as_they_demand() -> None:
    workload = many_users(MIX, DEMANDS, Random(1))
    assert Counter(submitted.job.user for submitted in workload.jobs) == {"bulk": 60, "ann": 10, "bob": 10}
    assert all(submitted.at == 0.0 for submitted in workload.jobs if submitted.job.user == "bulk")
    assert all(submitted.at > 20.0 for submitted in workload.jobs if submitted.job.user == "ann")


def test_sizes_differ_by_more_than_ten_times() -> None:
    workload = heterogeneous(10, Random(1))
    sizes = [spec.upload_bytes for spec in workload.components if spec.role is Role.DIFFUSION_MODEL]
    assert max(sizes) > 10 * min(sizes)
