"""How many GPUs share a run, and which: one test for each rule of `gang_choice`."""

from __future__ import annotations

from math import inf

from modelpool.pool.values.specs.spec import TaskId
from modelpool.scheduler.decisions.placement.gang_choice import choose_gang
from modelpool.scheduler.decisions.placement.gang_load import (
    AVERAGED_SECONDS,
    EXPECTED_SECONDS,
    GangLoad,
    reserved_gpus,
)
from modelpool.scheduler.model.gang_times import FORMING_SECONDS
from modelpool.scheduler.model.jobs import Task
from modelpool.scheduler.model.messages import GangMember
from tests.scheduler.scene import AT, Scene, whole
from tests.scheduler.world import PAINT, sample

GIVEN = TaskId("given:1")


def scene_of(names: str, node: str = "n1") -> Scene:
    scene = Scene()
    for name in names:
        scene.worker(name, whole(PAINT), node=node)
    return scene


def long_task(scene: Scene, degrees: tuple[int, ...] = (1, 2, 4), seed: int = 0) -> Task:
    return scene.task(sample(GIVEN, seed=seed, run_seconds=400.0, degrees=degrees))


def chosen(scene: Scene, task: Task, most_times: float = inf, deadline: float = inf, reserved: int = 0) -> list[str]:
    """The workers that share its run; one of them if none do."""
    query = scene.query()
    alone = (scene.workers[0], 0.0)
    choice = choose_gang(query, task, alone, most_times, deadline, reserved)
    return [scene.workers[0].worker_id] if choice is None else [worker.worker_id for worker in choice.workers]


def test_members_are_on_one_machine_and_of_one_kind() -> None:
    scene = Scene()
    for name, node, device in (("a", "n1", "H100"), ("b", "n2", "H100"), ("c", "n2", "H100"), ("d", "n1", "A100")):
        scene.worker(name, whole(PAINT), node=node, device=device)
    assert chosen(scene, long_task(scene)) == ["b", "c"]
    assert chosen(scene_of("ab", node=""), long_task(scene_of("ab"))) == ["a"], "machines without a name"


def test_only_what_nothing_waits_for_is_used() -> None:
    scene = scene_of("abcd")
    task = long_task(scene)
    assert len(chosen(scene, task)) == 4
    long_task(scene, seed=1)
    assert len(chosen(scene, task)) == 2, "three GPUs are left, and two of them make a gang"
    for seed in (2, 3):
        long_task(scene, seed=seed)
    assert len(chosen(scene, task)) == 1


def test_the_load_limits_the_gpu_time() -> None:
    scene = scene_of("abcd")
    task = long_task(scene, (1, 2))
    assert len(chosen(scene, task, most_times=1.2)) == 2
    assert len(chosen(scene, task, most_times=0.9)) == 1


def test_a_deadline_gets_the_least_number_that_meets_it_whatever_waits() -> None:
    scene = scene_of("abcd")
    task = long_task(scene)
    for seed in range(1, 9):
        long_task(scene, seed=seed)
    assert len(chosen(scene, task, deadline=AT + 500.0)) == 1
    assert len(chosen(scene, task, deadline=AT + 300.0)) == 2
    assert len(chosen(scene, task, deadline=AT + 150.0)) == 4
    assert len(chosen(scene, task, deadline=AT + 50.0)) == 1, "it is late anyway"


def test_gpus_stay_free_for_deadlines_unless_a_deadline_needs_them() -> None:
    scene = scene_of("abcd")
    task = long_task(scene)
    assert [len(chosen(scene, task, reserved=reserved)) for reserved in range(5)] == [4, 2, 2, 1, 1]
    assert len(chosen(scene, task, deadline=AT + 150.0, reserved=4)) == 4


def test_gpus_stay_free_while_other_jobs_with_deadlines_come() -> None:
    for workers, most in ((0, 0), (1, 1), (2, 2), (4, 2), (8, 3), (64, 8), (65, 9)):
        arrivals = [10.0 + number for number in range(20)]
        assert reserved_gpus(workers, arrivals, 30.0) == most, workers
        assert reserved_gpus(workers, arrivals[:2], 30.0) == min(1, most), "as many as others came"
        assert reserved_gpus(workers, arrivals[:1], 30.0) == 0, "one job is no reason to expect others"
        assert reserved_gpus(workers, arrivals, 30.0 + EXPECTED_SECONDS) == 0, "they came long ago"


def test_what_continues_gets_as_many_as_it_had() -> None:
    scene = scene_of("abcd")
    task = long_task(scene)
    for seed in range(1, 9):
        long_task(scene, seed=seed)
    for resume, found in ((4, 4), (2, 2), (1, 1)):
        task.resume_degree = resume
        assert len(chosen(scene, task)) == found


def test_members_of_the_last_gang_come_first_then_those_with_least_to_load() -> None:
    scene = Scene()
    for name, entries in (("a", ()), ("b", (whole(PAINT),)), ("c", (whole(PAINT),)), ("d", (whole(PAINT),))):
        scene.worker(name, *entries, node="n1")
    task = long_task(scene, (1, 2))
    assert chosen(scene, task) == ["b", "c"]
    members = (GangMember(scene.workers[3].worker_id, 1), GangMember(scene.workers[2].worker_id, 1))
    scene.workers[2].last_gang = scene.workers[3].last_gang = members
    assert chosen(scene, task) == ["d", "c"]


def test_a_kept_gang_forms_a_group_for_its_next_run_too() -> None:
    scene = Scene()
    for name in "ab":
        scene.worker(name, whole(PAINT), node="n1")
    task = long_task(scene, (2,))
    choices = [choose_gang(scene.query(), task, None, inf, inf)]
    members = tuple(GangMember(worker.worker_id, 1) for worker in scene.workers)
    for worker in scene.workers:
        worker.last_gang = members
    choices.append(choose_gang(scene.query(), task, None, inf, inf))
    assert [choice.extra_seconds for choice in choices if choice] == [FORMING_SECONDS] * 2


def test_the_load_is_an_average_of_minutes() -> None:
    load = GangLoad()
    assert load.most_times == inf
    load.pass_time(0.0, 8, 0.0)
    assert load.most_times == inf
    for step in range(1, 101):
        load.pass_time(10.0 * step, 8, 8.0)
    assert 0.9 < load.load <= 1.0
    load = GangLoad()
    load.pass_time(0.0, 8, 8.0)
    assert load.load == 1.0, "found in a review: the first run that may be shared met a load of 0"
    load.pass_time(10.0, 8, 8.0)
    assert load.load == 1.0
    for step in range(1, 41):
        load.pass_time(10.0 + step * AVERAGED_SECONDS / 10, 8, 1.6)
    assert 0.2 <= load.load < 0.25
