"""What part of a load others pay who wait for the same: reckoned by hand. Over a link of 1 B/s PAINT takes 6 s."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse, Role
from modelpool.pool.weights.plan.eviction_plan import Resident
from modelpool.scheduler.decisions.placement.shared_loads import shared_load_seconds
from tests.scheduler.scene import Scene, whole
from tests.scheduler.world import DRAW, PAINT, sample

LORA = ComponentKey("lora")


@pytest.mark.parametrize(
    ("waiting", "holders", "others_pay"),
    [(1, 0, 0.0), (2, 0, 3.0), (3, 0, 4.0), (3, 1, 2.0), (3, 2, 0.0), (3, 5, 0.0)],
)
def test_those_who_wait_pay_in_equal_parts_at_each_holder_and_here(
    waiting: int, holders: int, others_pay: float
) -> None:
    scene = Scene()
    idle = scene.worker("idle")
    for number in range(holders):
        scene.worker(f"holder {number}", whole(PAINT), free_in=5.0)
    tasks = [scene.task(sample(model=PAINT, patch=f"{number}")) for number in range(waiting)]
    assert shared_load_seconds(scene.query(), tasks[0].cost_class, idle) == pytest.approx(others_pay)


def test_what_is_there_with_other_patches_is_paid_by_who_needs_it() -> None:
    scene = Scene()
    part, patched = scene.worker("part", Resident(PAINT, 2)), scene.worker("patched", whole(PAINT, "y"))
    task = scene.task(sample(model=PAINT, patch="x"))
    scene.task(sample(model=PAINT, patch="y"))
    assert [shared_load_seconds(scene.query(), task.cost_class, worker) for worker in (part, patched)] == [0.0, 0.0]


def test_those_who_wait_also_pay_for_the_rest_of_what_is_there_in_part() -> None:
    """Of PAINT's twelve bytes two are there, and the other ten take 5 s: three wait, so two of them pay two thirds."""
    scene = Scene()
    part = scene.worker("part", Resident(PAINT, 2))
    tasks = [scene.task(sample(model=PAINT, seed=seed)) for seed in range(3)]
    assert shared_load_seconds(scene.query(), tasks[0].cost_class, part) == pytest.approx(10 / 3)


@pytest.mark.parametrize(("capacity", "others_pay"), [(64, 3.0), (10, 1.5), (6, 0.5), (4, 0.0)])
def test_what_only_streams_serves_nobody_else(capacity: int, others_pay: float) -> None:
    """Beside 2 bytes for activations and 2 of scratch all of PAINT stays there, half of its twelve, two and none."""
    scene = Scene()
    small = scene.worker("small", capacity=capacity)
    tasks = [scene.task(sample(patch=f"{number}", activation_bytes=2)) for number in range(2)]
    assert shared_load_seconds(scene.query(), tasks[0].cost_class, small) == pytest.approx(others_pay)


def test_nobody_else_pays_for_a_lora_and_what_comes_from_the_disk_takes_its_time() -> None:
    """PAINT and the LoRA come from a disk of half the speed of the link, in 12 and 8 s, the one after the other: of
    PAINT's twelve the other task pays six. A task that waits for DRAW pays nothing."""
    scene = Scene()
    scene.costs.know((ComponentSpec(LORA, Role.LORA, 4, 4),))
    idle = scene.worker("idle", node="n", disk=0.5)
    spec = sample(model=PAINT, patch="x")
    use: ComponentUse = replace(spec.uses[0], adapters=(LORA,))
    task = scene.task(replace(spec, uses=(use,)))
    scene.task(sample(model=PAINT, patch="y"))
    scene.task(sample(model=DRAW))
    query = scene.query()
    assert query.costs.extra_seconds(task.spec, task.cost_class, idle) == 20.0
    assert shared_load_seconds(query, task.cost_class, idle) == pytest.approx(6.0)


@pytest.mark.parametrize("capacity", [64, 10, 6])
def test_a_file_stays_in_memory_for_others_however_little_of_it_stays_on_the_gpu(capacity: int) -> None:
    """A disk brings PAINT's 6 bytes in a minute, which is longer than all that streams: the other task pays half of it,
    whether all of PAINT stays on the GPU, half of it, or two of its twelve bytes."""
    scene = Scene()
    idle = scene.worker("idle", capacity=capacity, node="n", disk=0.1)
    tasks = [scene.task(sample(patch=f"{number}", activation_bytes=2)) for number in range(2)]
    assert shared_load_seconds(scene.query(), tasks[0].cost_class, idle) == pytest.approx(30.0)
