"""Each peer does what its rule says, on scenes worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from modelpool.benchmarks.lab.policies import POLICIES
from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, NodeId, Role
from modelpool.scheduler.model.messages import Outcome
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.faults import Disturbances
from modelpool.scheduler.simulator.hosts import SimulatedNode
from tests.benchmarks.lab.scenes import job, model, order, play, workers

A, B, C, D = (model(name) for name in "abcd")


def test_in_turn() -> None:
    cluster = play("round_robin", [job(f"j{n}", "a") for n in range(5)], workers(9, 9, 9), [A])
    assert order(cluster) == ["j0 g0", "j1 g1", "j2 g2", "j3 g0", "j4 g1"]


def test_in_turn_leaves_out_who_is_too_small() -> None:
    large = [job(f"j{n}", "a", activation_gib=2) for n in range(3)]
    assert order(play("round_robin", large, workers(9, 1), [A])) == ["j0 g0", "j1 g0", "j2 g0"]


def test_by_chance_is_what_the_chance_that_is_handed_in_says() -> None:
    jobs, gpus = [job(f"j{n}", "a", 1.0) for n in range(200)], workers(9, 9)

    def shares(seed: int) -> list[str]:
        core, memory = POLICIES["random"].make(gpus, [A], Random(seed))
        cluster = VirtualCluster(core, gpus, memory=memory)
        cluster.start([A])
        for submitted in jobs:
            cluster.post(submitted)
        cluster.run()
        return sorted(order(cluster))

    assert shares(1) == shares(1) != shares(2)
    assert 60 < sum(line.endswith("g0") for line in shares(1)) < 140


def test_fewest_in_flight() -> None:
    """g0 has a long one: all that follows, one after the other, goes to g1."""
    jobs = [job("long", "a", 100.0), *[job(f"j{n}", "a", 1.0, at=1.0 + 5.0 * n) for n in range(3)]]
    assert order(play("least_loaded", jobs, workers(9, 9), [A])) == ["long g0", "j0 g1", "j1 g1", "j2 g1"]


def test_sticky_stays_where_the_model_is_and_takes_new_ones_where_there_are_fewest() -> None:
    """b goes to the other replica, which has none; a and b stay; c goes to either."""
    jobs = [job(f"j{n}", name, 1.0, at=20.0 * n) for n, name in enumerate("abababab")]
    cluster = play("sticky", jobs, workers(99, 99), [A, B])
    first, second = (line.split()[1] for line in order(cluster)[:2])
    assert first != second
    assert [line.split()[1] for line in order(cluster)] == [first, second] * 4
    assert cluster.totals.uploaded_bytes == 8 * GIB


def test_sticky_spills_over_after_five_and_a_second() -> None:
    """The sixth request waits a second for a replica that has its model, and then goes to the other one."""
    cluster = play("sticky", [job(f"j{n}", "a", 100.0) for n in range(6)], workers(99, 99), [A])
    sixth = next(run for run in cluster.runs if run.job_id == "j5")
    assert len({run.worker_id for run in cluster.runs if run.job_id != "j5"}) == 1
    assert sixth.worker_id != cluster.runs[-1].worker_id
    assert sixth.started_at == pytest.approx(1.0)


def test_sticky_forgets_the_model_that_was_used_longest_ago() -> None:
    """Three models a replica: with d, a goes, though all four would fit; and a has to be loaded again."""
    jobs = [job(f"j{n}", name, 1.0, at=20.0 * n) for n, name in enumerate("abcda")]
    cluster = play("sticky", jobs, workers(99), [A, B, C, D])
    assert [run.uploaded_bytes // GIB for run in cluster.runs] == [4, 4, 4, 4, 4]


def test_sticky_by_lora_knows_replicas_by_their_loras() -> None:
    """One replica has the model with x, the other with y; each gets its own again. By the model alone both do."""
    loras = [ComponentSpec(ComponentKey(f"a/lora/{n}"), Role.LORA, GIB, GIB) for n in "xy"]
    jobs = [job(f"j{n}", "a", 1.0, at=20.0 * n, lora=f"a/lora/{'xy'[n % 2]}") for n in range(8)]
    by_lora, by_model = (play(name, jobs, workers(9, 9), [A, *loras]) for name in ("sticky_by_lora", "sticky"))
    assert by_lora.totals.patch_switches == 0
    assert len({(run.adapters, run.worker_id) for run in by_lora.runs}) == 2
    assert by_model.totals.patch_switches > 0


def test_pressure_prefers_the_current_model_over_older_requests() -> None:
    jobs = [job("j0", "a", 5.0), job("j1", "b", 5.0, at=1.0), job("j2", "a", 5.0, at=2.0)]
    assert order(play("pressure", jobs, workers(99), [A, B])) == ["j0 g0", "j2 g0", "j1 g0"]


def test_pressure_waits_a_second_and_a_half_before_it_loads() -> None:
    cluster = play("pressure", [job("j0", "a")], workers(99, 99), [A])
    assert cluster.runs[0].started_at == pytest.approx(1.5)


def test_pressure_loads_at_once_where_only_one_backend_is_free() -> None:
    assert play("pressure", [job("j0", "a")], workers(99), [A]).runs[0].started_at == 0.0
    busy = [job("j0", "a", 30.0), job("j1", "b", at=9.0)]
    assert [run.started_at for run in play("pressure", busy, workers(99, 99), [A, B]).runs] == [9.0, 1.5]


def test_pressure_loads_what_more_wait_for() -> None:
    """When g0 is free b has waited longer, by less than the 10 seconds that one more request for c is worth."""
    jobs = [job("j0", "a", 20.0), job("j1", "b", at=2.0), job("j2", "c", at=9.0), job("j3", "c", at=9.0)]
    assert order(play("pressure", jobs, workers(99), [A, B, C])) == ["j0 g0", "j2 g0", "j3 g0", "j1 g0"]


def test_pressure_lets_one_backend_at_a_time_load_a_model() -> None:
    """The second request goes to the first backend where the model is, or loads it when the first load is over."""
    jobs = [job("j0", "a", 30.0), job("j1", "a", 30.0, at=1.0)]
    cluster = play("pressure", jobs, workers(99, 99), [A])
    assert [run.started_at for run in cluster.runs] == [pytest.approx(1.5), pytest.approx(32.5)]


@pytest.mark.parametrize(("between", "reached"), [(31, True), (32, False)])
def test_affinity_looks_32_ahead(between: int, reached: bool) -> None:
    """The device is warm for a. Behind the head, which wants b, come so many others for b, then one for a."""
    jobs = [job("warm", "a", 1.0), job("head", "b", 1.0)]
    jobs += [job(f"j{n}", "b", 1.0) for n in range(between)]
    jobs += [job("reached", "a", 1.0)]
    began = order(play("affinity", jobs, workers(6), [A, B]))
    assert (began[1] == "reached g0") is reached


@pytest.mark.parametrize("other", [{"user": "ben"}, {"priority": -1}])
def test_affinity_overtakes_within_one_user_and_priority_only(other: dict[str, str | int]) -> None:
    jobs = [job("warm", "a", 1.0), job("head", "b", 1.0), job("late", "a", 1.0, **other)]  # type: ignore[arg-type]
    assert order(play("affinity", jobs, workers(6), [A, B])) == ["warm g0", "head g0", "late g0"]


def test_affinity_gives_the_head_to_the_device_that_is_warm_for_it() -> None:
    jobs = [job("j0", "a", 1.0), job("j1", "b", 1.0), job("j2", "b", 1.0, at=9.0), job("j3", "a", 1.0, at=19.0)]
    assert order(play("affinity", jobs, workers(6, 6), [A, B])) == ["j0 g0", "j1 g1", "j2 g1", "j3 g0"]


def test_storage_aware_goes_where_the_bytes_are() -> None:
    """To the GPU that has them at once; for what nobody has, where it starts soonest."""
    jobs = [job("j0", "a", 1.0), job("j1", "b", 1.0, at=0.1), job("j2", "b", 1.0, at=9.0), job("j3", "a", 1.0, at=19.0)]
    assert order(play("storage_aware", jobs, workers(6, 6), [A, B])) == ["j0 g0", "j1 g1", "j2 g1", "j3 g0"]


def test_storage_aware_waits_for_the_memory_tier_no_longer_than_it_saves() -> None:
    """From disks the model takes 4 s. The third job waits for 2.5 s where it is, the fourth would wait for 5."""
    nodes = [SimulatedNode(NodeId("one"), 64 * GIB, 1.0 * GIB), SimulatedNode(NodeId("two"), 64 * GIB, 1.0 * GIB)]
    warm, cold = workers(6, node="one")[0], workers(6, 6, node="two")[1]
    jobs = [job("j0", "a", 1.0), *[job(f"j{n}", "a", 2.5, at=20.0) for n in (1, 2, 3)]]
    began = order(play("storage_aware", jobs, [warm, cold], [A], nodes))
    assert began == ["j0 g0", "j1 g0", "j3 g1", "j2 g0"]


def test_storage_aware_knows_disks_before_the_first_job_has_its_place() -> None:
    """Of two machines the second reads four times as fast. Jobs that are there before any worker is, go there first."""
    nodes = [SimulatedNode(NodeId("one"), 64 * GIB, 0.5 * GIB), SimulatedNode(NodeId("two"), 64 * GIB, 2.0 * GIB)]
    slow, fast = workers(6, node="one")[0], workers(6, 6, node="two")[1]
    gpus = [replace(gpu, start_seconds=1.0) for gpu in (slow, fast)]
    cluster = play("storage_aware", [job("j0", "a", 1.0), job("j1", "a", 1.0)], gpus, [A], nodes)
    assert {run.worker_id for run in cluster.runs} == {"g1"}


def test_storage_aware_does_not_wait_for_a_machine_that_does_not_start() -> None:
    core, memory = POLICIES["storage_aware"].make(workers(6, 6))
    fails = Disturbances(start_fails=lambda command: command.worker_id == "g0")
    cluster = VirtualCluster(core, workers(6, 6), memory=memory, disturbances=fails)
    cluster.start([A])
    cluster.post(job("j0", "a", 1.0))
    cluster.run()
    assert [(run.worker_id, run.ended_well) for run in cluster.runs] == [("g1", True)]


def test_storage_aware_counts_adapters() -> None:
    """Both have the model, with other patches: it goes where its own are, though the other is first."""
    loras = [ComponentSpec(ComponentKey(f"a/lora/{n}"), Role.LORA, GIB, GIB) for n in "xy"]
    jobs = [
        job("j0", "a", 5.0, lora="a/lora/x"),
        job("j1", "a", 5.0, lora="a/lora/y"),
        job("j2", "a", 5.0, at=30.0, lora="a/lora/y"),
    ]
    assert order(play("storage_aware", jobs, workers(9, 9), [A, *loras])) == ["j0 g0", "j1 g1", "j2 g1"]


def test_lru_takes_the_first_that_waits() -> None:
    jobs = [job(f"j{n}", name, 1.0 + n) for n, name in enumerate("abab")]
    assert order(play("lru", jobs, workers(6, 6), [A, B])) == ["j0 g0", "j1 g1", "j2 g0", "j3 g1"]


def test_an_infinite_cache_loads_nothing() -> None:
    cluster = play("infinite_cache", [job(f"j{n}", name) for n, name in enumerate("abcd")], workers(1, 1), [A, B, C, D])
    assert cluster.totals.load_seconds == cluster.totals.uploaded_bytes == cluster.totals.streamed_bytes == 0
    assert cluster.now == pytest.approx(20.0)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_fits_nowhere_fails_and_holds_up_nobody(policy: str) -> None:
    cluster = play(policy, [job("needy", "a", activation_gib=99), job("j1", "a")], workers(9), [A])
    assert cluster.outcomes == {"needy": Outcome.FAILED, "j1": Outcome.SUCCEEDED}
