"""What came out of a simulation, as numbers.

Proves: percentiles are values that occurred; time of all GPUs adds up to the GPUs times the makespan, whatever the
runs; figures of a small world by hand are the ones worked out on paper; shares that are even are called even.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentUse,
    JobId,
    JobSpec,
    Stage,
    TaskId,
    TaskSpec,
    UserId,
    WorkerId,
)
from modelpool.scheduler.model.messages import Outcome, Submitted
from modelpool.scheduler.simulator.hosts import StorageReads
from modelpool.scheduler.simulator.metrics import (
    ServiceSpan,
    fair_shares,
    figures,
    jain,
    latency,
    percentile,
    service_ratios,
)
from modelpool.scheduler.simulator.records import SimulationTotals

ANNA, BEN = UserId("anna"), UserId("ben")
TASK = TaskId("t")


@dataclass(frozen=True)
class Run:
    """A run as a simulated cluster records it."""

    job_id: str
    worker_id: WorkerId
    started_at: float
    load_seconds: float
    run_seconds: float
    resident: bool = True
    adapters: tuple[ComponentKey, ...] = ()
    uploaded_bytes: int = 0
    streamed_bytes: int = 0
    patch_switches: int = 0
    ended_well: bool = True
    model: str = "m"
    stage: Stage = Stage.SAMPLE
    task_id: TaskId = TASK
    batched: int = 1
    #: from beginning to end, where that is not its own seconds
    seconds: float | None = None

    @property
    def loaded_at(self) -> float:
        return self.started_at + self.load_seconds * self.batched

    @property
    def ended_at(self) -> float:
        return self.started_at + (self.load_seconds + self.run_seconds if self.seconds is None else self.seconds)


@dataclass(frozen=True)
class Gpu:
    worker_id: WorkerId
    kind: str = "H100"


@dataclass
class World:
    """What figures read of a cluster."""

    gpus: list[Gpu]
    runs: list[Run] = field(default_factory=list)
    submitted: dict[JobId, Submitted] = field(default_factory=dict)
    latency_seconds: dict[JobId, float] = field(default_factory=dict)
    outcomes: dict[JobId, Outcome] = field(default_factory=dict)
    storage: StorageReads = field(default_factory=StorageReads)
    totals: SimulationTotals = field(default_factory=SimulationTotals)

    def add(
        self,
        name: str,
        at: float,
        seconds: float,
        user: str = "",
        outcome: Outcome = Outcome.SUCCEEDED,
        uses: tuple[ComponentUse, ...] = (),
    ) -> None:
        job = JobId(name)
        task = TaskSpec(TASK, Stage.SAMPLE, uses, 0, seconds)
        self.submitted[job] = Submitted(at, JobSpec(job, (task,), TASK, user=UserId(user)))
        self.latency_seconds[job] = seconds
        self.outcomes[job] = outcome


def small_world() -> World:
    """Two GPUs. anna's job from 10 to 20, ben's from 12 to 30 after a load; one each that waits and is cancelled."""
    one, two = WorkerId("a"), WorkerId("b")
    world = World([Gpu(one), Gpu(two, "4090")])
    lora = ComponentKey("m/lora/x")
    world.add("j1", 10.0, 10.0, "anna", uses=(ComponentUse(ComponentKey("m/d"), 0, "x", 1, adapters=(lora,)),))
    world.add("j2", 12.0, 18.0, "ben")
    world.add("j3", 12.0, 8.0, "ben", Outcome.CANCELLED)
    world.add("j4", 12.0, 8.0, "anna", Outcome.CANCELLED)
    world.runs = [
        Run("j1", one, 10.0, 2.0, 8.0, resident=False, uploaded_bytes=100, adapters=(lora,)),
        Run("j2", two, 12.0, 6.0, 12.0, resident=False, streamed_bytes=50, patch_switches=1),
        Run("j2", one, 20.0, 0.0, 5.0, adapters=(lora,)),
    ]
    # once for j1, once more when it had left; another file that is nobody's LoRA
    world.storage = StorageReads(bytes=7, ahead_bytes=3, loads={lora: 2, ComponentKey("m/vae"): 5})
    return world


def test_figures_by_hand() -> None:
    found = figures(small_world())
    assert (found.jobs, found.succeeded, found.failed, found.cancelled) == (4, 2, 0, 2)
    assert (found.makespan_seconds, found.last_arrival_seconds) == (20.0, 2.0)
    assert found.jobs_per_minute == 6.0
    assert (found.latency.p50_seconds, found.latency.p99_seconds, found.latency.mean_seconds) == (10.0, 18.0, 14.0)
    assert (found.running_seconds, found.loading_seconds, found.idle_seconds) == (25.0, 8.0, 7.0)
    assert found.loading_share == 8 / 33
    assert found.busy_share == 33 / 40
    assert (found.resident_share, found.adapters_needed, found.adapters_loaded) == (1 / 3, 2, 2)
    assert found.lora_loads_per_job == 2 / 4
    assert (found.uploaded_bytes, found.streamed_bytes, found.patch_switches) == (100, 50, 1)
    assert (found.storage_bytes, found.ahead_bytes) == (7, 3)
    assert found.cost({"H100": 3.6, "4090": 0.9}) == pytest.approx(4.5 * 20 / 3600)


def test_each_user_is_told_what_he_got() -> None:
    anna, ben = figures(small_world()).users
    assert (anna.user, anna.jobs, anna.gpu_seconds, anna.p99_seconds) == (ANNA, 2, 10.0, 10.0)
    assert (ben.user, ben.jobs, ben.gpu_seconds, ben.p99_seconds) == (BEN, 2, 23.0, 18.0)
    # both had a job waiting from 12 to 20: two GPUs for eight seconds, one each
    assert (anna.service_ratio, ben.service_ratio) == (1.0, 1.0)
    assert figures(small_world()).fairness == 1.0


def test_twice_the_weight_is_due_twice_as_much() -> None:
    anna, ben = figures(small_world(), {ANNA: 3.0}).users
    assert anna.service_ratio == pytest.approx(8 / 12)
    assert ben.service_ratio == pytest.approx(8 / 4)


def test_a_cluster_without_jobs_has_figures() -> None:
    found = figures(World([Gpu(WorkerId("a"))]))
    assert (found.makespan_seconds, found.jobs_per_minute, found.loading_share, found.fairness) == (0.0, 0.0, 0.0, 1.0)
    assert found.latency == latency([])


SECONDS = st.floats(0.0, 1e4, allow_subnormal=False)


@given(st.lists(st.tuples(st.integers(0, 3), SECONDS, SECONDS, SECONDS), max_size=30), st.integers(1, 4))
def test_time_of_all_gpus_adds_up(work: list[tuple[int, float, float, float]], count: int) -> None:
    """Runs one after the other on each GPU, with gaps."""
    world = World([Gpu(WorkerId(f"g{n}")) for n in range(count)])
    free = [0.0] * count
    for number, (which, gap, load, run) in enumerate(work):
        gpu = which % count
        at = free[gpu] + gap
        free[gpu] = at + load + run
        world.add(f"j{number}", 0.0, free[gpu], user=f"u{number % 3}")
        world.runs.append(Run(f"j{number}", world.gpus[gpu].worker_id, at, load, run))
    found = figures(world)
    together = found.running_seconds + found.loading_seconds + found.idle_seconds
    assert together == pytest.approx(found.makespan_seconds * count)
    assert all(min(g.running_seconds, g.loading_seconds, g.idle_seconds) >= 0.0 for g in found.gpus)
    assert sum(g.runs for g in found.gpus) == found.runs == len(work)
    assert sum(u.gpu_seconds for u in found.users) == pytest.approx(found.running_seconds + found.loading_seconds)
    assert 0.0 < found.fairness <= 1.0 + 1e-9


def test_a_gpu_that_is_busy_twice_at_once_is_a_mistake_of_the_simulation() -> None:
    world = small_world()
    world.runs.append(Run("j2", WorkerId("b"), 12.0, 6.0, 12.0))
    with pytest.raises(AssertionError, match="b was busy for"):
        figures(world)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(values: list[float], share: float) -> None:
    ascending = sorted(values)
    found = percentile(ascending, share)
    assert found in values
    assert sum(v <= found for v in values) >= share * len(values) - 1e-6
    assert sum(v < found for v in values) < share * len(values)


def test_of_a_hundred_the_99th_is_p99() -> None:
    """Rounding of 0.99 x 100 must not make it the hundredth."""
    assert percentile(list(range(1, 101)), 0.99) == 99
    assert percentile(list(range(1, 11)), 0.9) == 9
    assert percentile([], 0.5) == 0.0


@pytest.mark.parametrize(("values", "expected"), [([1, 1, 1], 1.0), ([1, 0, 0, 0], 0.25), ([], 1.0), ([0, 0], 1.0)])
def test_jain(values: list[float], expected: float) -> None:
    assert jain(values) == expected


def spans(*told: tuple[UserId, float, float]) -> list[ServiceSpan]:
    return [ServiceSpan(*one) for one in told]


def test_one_who_takes_all_is_seen() -> None:
    """Both have a job, one GPU serves anna alone, then ben: at the end both got the same, while they competed they did
    not."""
    unfinished = spans((ANNA, 0.0, 10.0), (BEN, 0.0, 20.0))
    ratios = service_ratios(unfinished, spans((ANNA, 0.0, 10.0), (BEN, 10.0, 20.0)), {})
    assert ratios == pytest.approx({ANNA: 2.0, BEN: 0.0})
    fair_queue = spans((ANNA, 0.0, 5.0), (BEN, 5.0, 10.0))
    assert service_ratios(unfinished, fair_queue, {}) == pytest.approx({ANNA: 1.0, BEN: 1.0})


def test_who_was_alone_is_compared_with_nobody() -> None:
    unfinished = spans((ANNA, 0.0, 10.0), (BEN, 10.0, 20.0))
    assert service_ratios(unfinished, spans((ANNA, 5.0, 10.0)), {}) == {}


def test_where_there_is_enough_for_all_nothing_is_uneven() -> None:
    """Found in a first run: a user with half the jobs was called badly served on a cluster that stood idle."""
    one_each = spans((ANNA, 0.0, 10.0), (ANNA, 0.0, 10.0), (BEN, 0.0, 10.0))
    assert service_ratios(one_each, one_each, {}) == {}


def test_one_who_wants_little_and_gets_it_is_well_served() -> None:
    """Found in a first run: who has one job, which runs, beside a user with a hundred that wait, has its share."""
    unfinished = spans((BEN, 0.0, 10.0), *[(ANNA, 0.0, 10.0)] * 100)
    ratios = service_ratios(unfinished, spans((BEN, 0.0, 10.0), *[(ANNA, 0.0, 10.0)] * 7), {})
    assert ratios == pytest.approx({ANNA: 1.0, BEN: 1.0})


def test_a_batch_is_shared_by_those_in_it() -> None:
    unfinished = spans((ANNA, 0.0, 6.0), (ANNA, 0.0, 6.0), (BEN, 0.0, 6.0), (BEN, 0.0, 6.0))
    together = [ServiceSpan(ANNA, 0.0, 6.0, 1 / 3), ServiceSpan(BEN, 0.0, 6.0, 2 / 3)]
    assert service_ratios(unfinished, together, {}) == pytest.approx({ANNA: 2 / 3, BEN: 4 / 3})


NUMBERS = st.integers(0, 40).map(lambda number: number / 4)


@given(st.lists(st.tuples(NUMBERS, st.integers(1, 4)), min_size=1, max_size=6), NUMBERS)
def test_shares_are_the_fairest_that_can_be(wants: list[tuple[float, int]], total: float) -> None:
    """All is given that can be used; who got less than it could use got no less for its weight than anybody else."""
    most, weights = [top for top, _ in wants], [float(weight) for _, weight in wants]
    shares = fair_shares(most, weights, total)
    assert sum(shares) == pytest.approx(min(total, sum(most)))
    levels = [share / weight for share, weight in zip(shares, weights, strict=True)]
    for share, top, level in zip(shares, most, levels, strict=True):
        assert -1e-9 <= share <= top
        assert share == pytest.approx(top) or level >= max(levels) - 1e-9


JOBS = st.tuples(st.sampled_from("abc").map(UserId), st.integers(0, 30), st.integers(0, 9), st.integers(1, 9))


@given(st.lists(JOBS, min_size=2, max_size=15), st.dictionaries(st.sampled_from("abc").map(UserId), st.integers(1, 4)))
def test_ratios_are_sums_over_every_second(
    work: list[tuple[UserId, int, int, int]], weights: dict[UserId, int]
) -> None:
    """Each job waits and is then served until it ends, in whole seconds; slices are seconds."""
    unfinished = [ServiceSpan(user, float(at), float(at + wait + run)) for user, at, wait, run in work]
    served = [ServiceSpan(user, float(at + wait), float(at + wait + run)) for user, at, wait, run in work]
    begin, end = min(at for _, at, _, _ in work), max(at + wait + run for _, at, wait, run in work)
    received: Counter[UserId] = Counter()
    due: Counter[UserId] = Counter()
    for second in range(begin, end):
        jobs, runs = (
            Counter(span.user for span in kind if span.begin <= second < span.end) for kind in (unfinished, served)
        )
        if len(jobs) < 2 or runs == jobs:
            continue
        users = sorted(jobs)
        shares = fair_shares([float(jobs[u]) for u in users], [float(weights.get(u, 1)) for u in users], runs.total())
        due.update(dict(zip(users, shares, strict=True)))
        received.update(runs)
    expected = {user: received[user] / seconds for user, seconds in due.items() if seconds > 1e-9}
    told = service_ratios(unfinished, served, {user: float(w) for user, w in weights.items()}, slices=end - begin)
    assert told == pytest.approx(expected)
