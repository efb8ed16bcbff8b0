"""Weights come from a machine's memory or from its disks: what that costs, and what reports teach of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentSpec,
    NodeId,
    Role,
    RunCost,
    TaskId,
    TaskReport,
    TaskSpec,
    WorkerId,
    WorkerSpec,
)
from modelpool.pool.weights.plan.eviction_plan import Residency, Resident
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.model.workers import Worker
from tests.scheduler.world import sample

MIB = 1 << 20
PAINT, OTHER, LORA = ComponentKey("paint"), ComponentKey("other"), ComponentKey("lora")
SIZES = (
    ComponentSpec(PAINT, Role.DIFFUSION_MODEL, 800 * MIB, 800 * MIB),
    ComponentSpec(LORA, Role.LORA, 100 * MIB, 100 * MIB),
)
LINK, DISK = 400.0 * MIB, 100.0 * MIB
PATCH_SECONDS = 0.5


def worker_on(node: str, worker_id: str = "a", storage: float = DISK, device: str = "") -> Worker:
    spec = WorkerSpec(
        WorkerId(worker_id), 1, 4096 * MIB, LINK, device, node=NodeId(node), storage_bytes_per_second=storage
    )
    worker = Worker(WorkerId(worker_id), 1, spec=spec)
    worker.link_bytes_per_second = LINK
    worker.update_residency(Residency(spec.capacity_bytes))
    return worker


def costs_now() -> Costs:
    costs = Costs(PATCH_SECONDS)
    costs.know(SIZES)
    return costs


def paint(patch: str = "") -> TaskSpec:
    """Sampling with the one model, patched by the one LoRA or not at all."""
    task = sample(patch=patch)
    use = replace(task.uses[0], component=PAINT, patch_digest=patch, adapters=(LORA,) if patch else (), patched_bytes=0)
    return replace(task, uses=(replace(use, patched_bytes=80 * MIB if patch else 0),), run_seconds=1.0)


def ended(worker: Worker, **figures: object) -> TaskReport:
    assert worker.residency is not None
    return TaskReport(TaskId("t"), 1, worker.worker_id, 1, worker.residency, RunCost(**figures))  # type: ignore[arg-type]


def seconds(costs: Costs, worker: Worker, task: TaskSpec) -> float:
    found = costs.extra_seconds(task, costs.acquire(task), worker)
    assert found is not None
    return found


def run(costs: Costs, worker: Worker, task: TaskSpec, **figures: object) -> None:
    """Place it, let it leave what it leaves, and hear its report."""
    cost_class = costs.acquire(task)
    costs.run_started(cost_class, worker)
    worker.update_residency(costs.residency_after(cost_class, worker))
    costs.at += 100.0
    costs.learn(task, cost_class, worker, ended(worker, **figures))


def test_the_first_worker_of_a_machine_waits_for_the_disk_and_the_next_for_the_link() -> None:
    costs, first, second, elsewhere = costs_now(), worker_on("n"), worker_on("n", "b"), worker_on("m", "c")
    assert seconds(costs, first, paint()) == 8.0
    assert seconds(costs, second, paint()) == 8.0
    costs.run_started(costs.acquire(paint()), first)
    assert seconds(costs, second, paint()) == 2.0, "it was assumed to be read"
    assert seconds(costs, elsewhere, paint()) == 8.0


def test_a_disk_that_is_done_sooner_than_expected_is_free_sooner() -> None:
    """A speed that was told wrong would let waits pile up otherwise, and nobody would go there to learn it."""
    costs, first = costs_now(), worker_on("n")
    cost_class = costs.acquire(paint())
    costs.run_started(cost_class, first)
    costs.at = 3.0
    figures = {"load_seconds": 2.0, "uploaded_bytes": 800 * MIB, "storage_bytes": 800 * MIB}
    costs.learn(paint(), cost_class, first, ended(first, run_seconds=1.0, **figures))
    node = costs.nodes.of(first.spec)
    assert node is not None
    assert node.free_at == 3.0
    assert node.storage_bytes_per_second == 400.0 * MIB


def test_a_worker_that_says_nothing_of_its_machine_has_all_files_at_hand() -> None:
    costs, worker = costs_now(), worker_on("")
    assert seconds(costs, worker, paint("x")) == 2.0


def test_a_disk_of_unknown_speed_is_as_fast_as_the_link() -> None:
    costs, worker = costs_now(), worker_on("n", storage=0.0)
    assert seconds(costs, worker, paint("x")) == 2.0


def test_loras_are_read_where_patches_are_applied_anew() -> None:
    """A patch switch reads the LoRA and uploads what it patches; with the patches there, nothing is read."""
    costs, worker = costs_now(), worker_on("n")
    run(costs, worker, paint(), load_seconds=8.0, run_seconds=1.0, uploaded_bytes=800 * MIB, storage_bytes=800 * MIB)
    assert seconds(costs, worker, paint()) == 0.0
    assert seconds(costs, worker, paint("x")) == pytest.approx(1.0 + PATCH_SECONDS), "100 MiB of LoRA from the disk"
    run(costs, worker, paint("x"), load_seconds=1.5, run_seconds=1.0, uploaded_bytes=80 * MIB, storage_bytes=100 * MIB)
    assert seconds(costs, worker, paint("x")) == 0.0
    worker.update_residency(Residency(4096 * MIB, (Resident(PAINT, 800 * MIB, "other", 80 * MIB),)))
    expected = 160 * MIB / worker.link_bytes_per_second + PATCH_SECONDS
    assert seconds(costs, worker, paint("x")) == pytest.approx(expected), "the LoRA is in memory now"


def test_a_lora_whose_size_comes_late_is_counted_from_then_on() -> None:
    costs, worker = Costs(PATCH_SECONDS), worker_on("n")
    costs.know(SIZES[:1])
    assert seconds(costs, worker, paint("x")) == 8.0
    costs.know(SIZES[1:])
    assert seconds(costs, worker, paint("x")) == 9.0


def test_a_worker_that_moves_to_another_machine_is_judged_there() -> None:
    """What was known of it holds for its residency and link, and yet not for its files."""
    costs, worker = costs_now(), worker_on("n")
    costs.run_started(costs.acquire(paint()), worker)
    costs.at = 100.0
    assert seconds(costs, worker, paint()) == 2.0
    assert worker.spec is not None
    worker.spec = replace(worker.spec, incarnation=2, node=NodeId("m"))
    worker.version += 1
    assert seconds(costs, worker, paint()) == 8.0


def test_the_speed_of_a_disk_is_learnt_from_loads_that_waited_for_it() -> None:
    costs, worker = costs_now(), worker_on("n")
    run(costs, worker, paint(), load_seconds=16.0, run_seconds=1.0, uploaded_bytes=800 * MIB, storage_bytes=800 * MIB)
    assert seconds(costs, worker_on("n", "b"), paint("x")) == pytest.approx(2.0), "its files are there"
    node = costs.nodes.of(worker.spec)
    assert node is not None
    assert node.storage_bytes_per_second == pytest.approx(50.0 * MIB)
    assert worker.link_bytes_per_second == LINK, "what waited for a disk says nothing of the link"


def test_a_disk_that_keeps_up_with_the_link_is_not_taken_for_as_slow_as_that() -> None:
    costs, worker = costs_now(), worker_on("n", storage=1000.0 * MIB)
    run(costs, worker, paint(), load_seconds=2.0, run_seconds=1.0, uploaded_bytes=800 * MIB, storage_bytes=800 * MIB)
    node = costs.nodes.of(worker.spec)
    assert node is not None
    assert node.storage_bytes_per_second == 1000.0 * MIB


def test_seconds_of_a_patch_switch_are_learnt_once_the_link_is_known() -> None:
    """By kind of GPU, from the third one on, and one outlier moves them little."""
    costs, worker, other = costs_now(), worker_on("", device="g"), worker_on("", "b", device="g")
    stranger = worker_on("", "c", device="h")
    for _ in range(2):
        run(costs, worker, paint(), load_seconds=2.0, run_seconds=1.0, uploaded_bytes=800 * MIB)
        worker.update_residency(Residency(4096 * MIB))
    switch = {"run_seconds": 1.0, "uploaded_bytes": 80 * MIB, "patch_switches": 1}
    for number, load_seconds in enumerate((2.2, 2.2, 200.0, 2.2)):
        assert (costs.patch_seconds(other) == PATCH_SECONDS) == (number < 3)
        run(costs, worker, paint(f"x{number}"), load_seconds=load_seconds, **switch)
    assert costs.patch_seconds(other) == pytest.approx(2.0)
    assert costs.patch_seconds(stranger) == PATCH_SECONDS
    assert worker.link_bytes_per_second == LINK


def test_one_slow_load_moves_the_link_little_and_a_change_is_learnt() -> None:
    costs, worker = costs_now(), worker_on("")
    cost_class = costs.acquire(paint())
    costs.learn(paint(), cost_class, worker, ended(worker, load_seconds=200.0, uploaded_bytes=800 * MIB))
    assert worker.link_bytes_per_second > 0.8 * LINK
    for _ in range(8):
        costs.learn(paint(), cost_class, worker, ended(worker, load_seconds=4.0, uploaded_bytes=800 * MIB))
    assert worker.link_bytes_per_second == pytest.approx(LINK / 2, rel=0.1)


def test_what_is_remembered_is_what_would_be_reckoned_now() -> None:
    """Whatever comes and goes on machines and workers in between."""
    costs, workers = costs_now(), [worker_on("n"), worker_on("n", "b"), worker_on("m", "c")]
    tasks = [paint(), paint("x"), paint("y")]
    for number in range(40):
        worker, task = workers[number % 3], tasks[number % 7 % 3]
        storage = (0, 50 * MIB, 900 * MIB)[number % 5 % 3]
        load = {"load_seconds": 1.0 + number % 4, "uploaded_bytes": 80 * MIB, "storage_bytes": storage}
        run(costs, worker, task, run_seconds=1.0, patch_switches=number % 2, **load)
        if number % 6 == 0:
            worker.update_residency(Residency(4096 * MIB))
        for each in workers:
            for one in tasks:
                setup = costs.load_estimate(costs.acquire(one), each)
                assert setup is not None
                assert seconds(costs, each, one) == costs.seconds_of(setup, each)


def test_the_time_of_a_batch_is_its_members_shares() -> None:
    costs, worker = costs_now(), worker_on("")
    task = paint()
    cost_class = costs.acquire(task)
    assert costs.batch_seconds(task, cost_class, worker, 4) == 4.0
    costs.learn(task, cost_class, worker, ended(worker, run_seconds=2.0))
    costs.learn(task, cost_class, worker, ended(worker, run_seconds=1.5, batched=4))
    assert costs.batch_seconds(task, cost_class, worker, 4) == pytest.approx(6.0)
    assert costs.resident_seconds(task, cost_class, worker) == 2.0
