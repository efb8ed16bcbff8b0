"""The finer rules of our placement: who waited, whose copy is worth it, who waits for whom, and where it is looked.

Each case is small enough to be reckoned by hand. Weights over a link of 1 B/s: PAINT takes 6 s, DRAW 10, TEXT 4, VAE 3.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ExecutionMode, Role, TaskSpec
from modelpool.pool.weights.plan.eviction_plan import Residency, Resident
from modelpool.scheduler.decisions.placement.idle_workers import MOST_IDLE
from modelpool.scheduler.decisions.placement.waiting import MOST_BUSY
from modelpool.scheduler.model.jobs import Task
from modelpool.scheduler.model.placement_record import PlacementRule
from modelpool.scheduler.model.workers import PendingPreload
from tests.scheduler.scene import AT, Scene, whole
from tests.scheduler.world import COMPONENTS, DRAW, PAINT, TEXT, VAE, decode, encode, sample

FAST, SLOW = "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"
LORA = ComponentKey("lora")


def with_lora(spec: TaskSpec) -> TaskSpec:
    return replace(spec, uses=(replace(spec.uses[0], adapters=(LORA,)),))


def scene_with_lora(lora_bytes: int, **config: int) -> Scene:
    """A LoRA of this size is known. The workers of machine "n" have its file and PAINT's in memory."""
    scene = Scene(**config)
    scene.costs.know((ComponentSpec(LORA, Role.LORA, lora_bytes, lora_bytes),))
    scene.worker("first", free_in=1000.0, node="n", disk=1.0)
    node = scene.costs.nodes.of(scene.workers[0].spec)
    assert node is not None
    node.expect(((PAINT, 6), (LORA, lora_bytes)))
    return scene


# ---- who waited long -----------------------------------------------------------------------------------------------


def test_the_fuller_the_account_the_sooner_a_load_is_served() -> None:
    scene = Scene()
    scene.wait_factor = 1.0
    scene.worker("a", whole(DRAW), capacity=20)
    waiting = scene.task(sample(model=PAINT), waited=7.0)
    suiting = scene.task(sample(model=DRAW), waited=1.0)
    assert scene.decision() == (waiting, "a")
    waiting.ready_at = AT - 5.0
    assert scene.decision() == (suiting, "a")


def test_the_account_pays_what_a_load_takes() -> None:
    scene = Scene()
    scene.worker("a", whole(DRAW), capacity=20)
    waiting = scene.task(sample(model=PAINT), waited=500.0)
    scene.task(sample(model=DRAW))
    choice = scene.ask()
    assert choice is not None
    assert (choice.task, choice.spent_seconds) == (waiting, 6.0)


def test_where_there_is_room_who_waited_long_is_loaded_beside_what_is_there() -> None:
    """It costs nothing then, and goes first when its weights are there."""
    scene = Scene()
    worker = scene.worker("a", whole(DRAW))
    waiting = scene.task(sample(model=PAINT), waited=500.0)
    suiting = scene.task(sample(model=DRAW), waited=1.0)
    choice = scene.ask()
    assert choice is not None
    assert (choice.task, choice.preload_first, choice.spent_seconds) == (suiting, waiting, 0.0)
    worker.update_residency(Residency(64, (whole(DRAW), whole(PAINT))))
    assert scene.decision() == (waiting, "a")


def test_a_worker_that_does_not_bring_what_it_is_told_is_not_asked_for_ever() -> None:
    scene = Scene()
    worker = scene.worker("a", whole(DRAW))
    waiting = scene.task(sample(model=PAINT), waited=500.0)
    scene.task(sample(model=DRAW), waited=1.0)
    worker.preloaded = {waiting.cost_class: PendingPreload(6, 0.0, 10.0)}
    choice = scene.ask()
    assert choice is not None
    assert (choice.task, choice.preload_first) == (waiting, None)


def test_the_account_does_not_pay_for_what_would_have_been_loaded_anyway() -> None:
    scene = Scene()
    scene.wait_factor = 1.0
    scene.worker("a", Resident(DRAW, 8))
    waiting = scene.task(sample(model=PAINT), waited=7.0)
    scene.task(sample(model=DRAW))
    choice = scene.ask()
    assert choice is not None
    assert (choice.task, choice.spent_seconds) == (waiting, 4.0), "the rest of DRAW would have taken 2 s"


def test_who_waited_longest_and_starts_anyway_is_not_passed_by_others_who_waited() -> None:
    scene = Scene()
    scene.worker("a", whole(DRAW))
    oldest = scene.task(sample(model=DRAW), waited=600.0)
    scene.task(sample(model=PAINT), waited=500.0)
    assert scene.decision() == (oldest, "a")


def test_who_waited_long_still_waits_for_a_warm_worker_that_is_sooner() -> None:
    scene = Scene()
    scene.worker("idle", whole(DRAW))
    scene.worker("warm", whole(PAINT), free_in=1.0)
    scene.task(sample(model=PAINT), waited=500.0)
    suiting = scene.task(sample(model=DRAW))
    assert scene.decision() == (suiting, "idle")


# ---- what is there -------------------------------------------------------------------------------------------------


def test_of_what_is_there_the_first_in_order_goes_first() -> None:
    scene = Scene()
    scene.worker("a", whole(DRAW), whole(PAINT))
    first = scene.task(sample(model=PAINT))
    scene.task(sample(model=DRAW))
    assert scene.decision() == (first, "a")


def test_what_is_there_does_not_come_before_a_higher_priority_that_is_there_too() -> None:
    scene = Scene()
    scene.worker("a", whole(DRAW), whole(VAE))
    scene.task(decode(sample().task_id))
    high = scene.task(sample(model=DRAW), priority=1)
    assert scene.decision() == (high, "a")


def test_what_is_there_in_part_is_not_there() -> None:
    """However little the rest takes: half of PAINT takes 0.03 s at this link."""
    scene = Scene()
    scene.worker("a", Resident(PAINT, 6), whole(DRAW), link=100.0)
    scene.task(sample(model=PAINT))
    suiting = scene.task(sample(model=DRAW))
    assert scene.decision() == (suiting, "a")


@pytest.mark.parametrize(("link", "decodes"), [(10.0, True), (1.0, False)])
def test_a_job_is_finished_first_where_its_weights_take_little_beside_its_run(link: float, decodes: bool) -> None:
    """A decode runs for 2 s, and the VAE takes 0.3 s or 3."""
    scene = Scene()
    scene.worker("a", whole(PAINT), link=link)
    suiting = scene.task(sample())
    last = scene.task(decode(suiting.name))
    assert scene.decision() == (last if decodes else suiting, "a")


def test_what_needs_no_weights_is_there_everywhere() -> None:
    scene = Scene()
    scene.worker("a", whole(PAINT))
    scene.worker("b", whole(DRAW))
    scene.task(replace(encode("cat"), uses=()))
    choice = scene.ask()
    assert choice is not None
    assert choice.why.rule is PlacementRule.RESIDENT


@pytest.mark.parametrize("entries", [(), (whole(PAINT),)], ids=["cold", "warm"])
def test_of_equal_workers_the_one_that_is_idle_longest_is_taken(entries: tuple[Resident, ...]) -> None:
    scene = Scene()
    scene.worker("a", *entries).idle_since = 5.0
    scene.worker("b", *entries).idle_since = 1.0
    task = scene.task(sample())
    assert scene.decision() == (task, "b")


# ---- what wastes least ---------------------------------------------------------------------------------------------


def test_a_model_that_is_nowhere_comes_before_a_cheaper_second_copy() -> None:
    scene = Scene()
    scene.worker("idle")
    scene.worker("warm", whole(PAINT), free_in=100.0)
    scene.task(sample(model=PAINT))
    nowhere = scene.task(sample(model=DRAW))
    assert scene.decision() == (nowhere, "idle")


def test_of_what_wastes_nothing_the_cheapest_goes_first() -> None:
    scene = Scene()
    scene.worker("idle")
    scene.task(sample(model=DRAW))
    cheap = scene.task(sample(model=PAINT))
    assert scene.decision() == (cheap, "idle")


@pytest.mark.parametrize(("waited", "batch", "goes"), [(12.0, "", False), (15.0, "", True), (15.0, "b", False)])
def test_ten_seconds_of_waiting_are_worth_three_of_loading(waited: float, batch: str, goes: bool) -> None:
    """DRAW takes 4 s more to load than PAINT. Of jobs that were asked for together all are wanted: waiting says
    nothing there."""
    scene = Scene()
    scene.worker("idle")
    dear = scene.task(sample(model=DRAW), waited=waited, batch=batch)
    cheap = scene.task(sample(model=PAINT))
    assert scene.decision() == (dear if goes else cheap, "idle")


@pytest.mark.parametrize(("link", "goes"), [(0.42, True), (0.38, False)])
def test_the_longest_wait_is_worth_no_more_than_a_run(link: float, goes: bool) -> None:
    """Found with a queue of more than the GPUs could do: all waited long, and weights changed with each task. A run
    takes 10 s, and DRAW 9.5 s more to load than PAINT, or 10.5 s, over the slower link."""
    scene = Scene()
    scene.worker("idle", link=link)
    dear = scene.task(sample(model=DRAW), waited=500.0)
    cheap = scene.task(sample(model=PAINT))
    assert scene.decision() == (dear if goes else cheap, "idle")


@pytest.mark.parametrize(("others", "goes"), [(0, False), (1, True)])
def test_a_load_is_the_price_of_all_who_wait_for_it(others: int, goes: bool) -> None:
    """DRAW takes 10 s to load and PAINT 6, but two that wait for DRAW pay 5 s each. They have other patches, so that
    they stand in lines of their own."""
    scene = Scene()
    scene.worker("idle")
    cheap = scene.task(sample(model=PAINT))
    dear = scene.task(sample(model=DRAW, patch="x"))
    for number in range(others):
        scene.task(sample(model=DRAW, patch=f"y{number}"))
    choice = scene.ask()
    assert choice is not None
    assert choice.task.spec.uses[0].component == (dear if goes else cheap).spec.uses[0].component


def test_of_what_costs_the_same_the_later_stage_goes_first() -> None:
    scene = Scene()
    scene.worker("idle")
    scene.task(replace(encode("cat"), uses=sample(model=DRAW).uses))
    later = scene.task(sample(model=DRAW))
    assert scene.decision() == (later, "idle")


def test_what_a_machine_with_the_adapter_would_save_is_wasted_elsewhere() -> None:
    """From the disk of the idle worker's machine PAINT and the LoRA take 11.7 s; where they are in memory, 6 s. DRAW
    takes 16.7 s here, and is in no memory: more than the others take, less than that with what they waste."""
    scene = scene_with_lora(1)
    scene.worker("idle", node="m", disk=0.6)
    scene.task(with_lora(sample(patch="x")))
    elsewhere = scene.task(sample(model=DRAW))
    assert scene.decision() == (elsewhere, "idle")


def test_what_suits_an_idle_worker_is_seen_beyond_the_window() -> None:
    scene = Scene(window=1)
    scene.worker("idle", whole(PAINT, "x"))
    scene.task(sample(model=DRAW))
    suiting = scene.task(sample(model=PAINT, patch="y"))
    assert scene.decision() == (suiting, "idle")


def test_what_suits_the_files_of_a_machine_is_seen_beyond_the_window() -> None:
    scene = scene_with_lora(1, window=1)
    scene.worker("idle", node="n", disk=1.0)
    scene.task(sample(model=DRAW))
    suiting = scene.task(with_lora(sample(patch="x")))
    assert scene.decision() == (suiting, "idle")


@pytest.mark.parametrize(("account", "spent"), [(5.0, 4.0), (0.0, 0.0)])
def test_the_account_pays_for_what_waiting_is_worth_while_it_can(account: float, spent: float) -> None:
    """The rest of DRAW takes 2 s, PAINT 6 and waited 50 s longer."""
    scene = Scene()
    scene.switch_seconds = account
    scene.worker("a", Resident(DRAW, 8))
    waiting = scene.task(sample(model=PAINT), waited=50.0)
    scene.task(sample(model=DRAW))
    choice = scene.ask()
    assert choice is not None
    assert (choice.task, choice.spent_seconds) == (waiting, spent)


@pytest.mark.parametrize(("waited", "spent"), [(0.0, 0.0), (5.0, 1.5)])
def test_the_account_does_not_pay_for_what_starts_since_the_cheaper_waits(waited: float, spent: float) -> None:
    """The rest of PAINT is cheaper here, but its task waits for a worker that has all of it and is free in a second. So
    DRAW starts, whoever waited: of what its 10 s are more the account pays no more than what its wait was worth."""
    scene = Scene()
    scene.switch_seconds = 5.0
    scene.worker("idle", Resident(PAINT, 4))
    scene.worker("busy", whole(PAINT), free_in=1.0)
    scene.task(sample(model=PAINT))
    starting = scene.task(sample(model=DRAW), waited=waited)
    choice = scene.ask()
    assert choice is not None
    assert (choice.task, choice.why.rule, choice.spent_seconds) == (starting, PlacementRule.CHEAPEST, spent)


def test_a_wait_is_worth_no_more_than_a_run_to_the_account_too() -> None:
    """DRAW takes 10 s, and 20 with the waste since another worker has it; PAINT's task would pay 2, and waits for the
    worker that has all of it. A hundred seconds would be worth 30, but a run takes 10."""
    scene = Scene()
    scene.switch_seconds = 50.0
    scene.worker("idle", Resident(PAINT, 10))
    scene.worker("busy", whole(PAINT), free_in=0.1)
    scene.worker("long", whole(DRAW), free_in=1000.0)
    scene.task(sample(model=PAINT))
    waiting = scene.task(sample(model=DRAW), waited=100.0)
    choice = scene.ask()
    assert choice is not None
    assert (choice.task, choice.worker.worker_id, choice.spent_seconds) == (waiting, "idle", 10.0)


@pytest.mark.parametrize(("is_elsewhere", "goes"), [(False, True), (True, False)])
def test_the_longest_wait_is_worth_a_run_at_most_also_where_the_first_in_order_did_not_wait(
    is_elsewhere: bool, goes: bool
) -> None:
    """A run takes 10 s; a hundred seconds would be worth 30. DRAW takes 10 s, and 20 with the waste where another
    worker has it; the rest of PAINT takes 2."""
    scene = Scene()
    scene.switch_seconds = 0.0
    scene.worker("idle", Resident(PAINT, 4))
    scene.worker("busy", whole(DRAW if is_elsewhere else VAE), free_in=1000.0)
    first = scene.task(sample(model=PAINT))
    waiting = scene.task(sample(model=DRAW), waited=100.0)
    assert scene.decision() == (waiting if goes else first, "idle")


def test_the_account_does_not_pay_for_what_sharing_alone_chose() -> None:
    """Five tasks wait for PAINT's 6 bytes, 1.2 for each, and one for the rest of DRAW's, 2: PAINT is cheaper though
    nobody waited."""
    scene = Scene()
    scene.worker("a", Resident(DRAW, 8))
    scene.task(sample(model=DRAW))
    shared = [scene.task(sample(model=PAINT, patch=f"{number}")) for number in range(5)]
    scene.switch_seconds = 5.0
    choice = scene.ask()
    assert choice is not None
    assert choice.task in shared
    assert (choice.why.rule, choice.spent_seconds) == (PlacementRule.CHEAPEST, 0.0)


@pytest.mark.parametrize(("waiting", "goes"), [(1, False), (3, True)])
def test_a_second_copy_that_others_wait_for_is_wasted_by_as_much_less(waiting: int, goes: bool) -> None:
    """PAINT's 6 s are wasted here, since a worker has it that is busy for long: 12 beside the 10 of DRAW, which is
    nowhere. Three that wait, for two copies, pay two thirds of both each: 8."""
    scene = Scene()
    scene.worker("idle")
    scene.worker("busy", whole(PAINT), free_in=1000.0)
    draw = scene.task(sample(model=DRAW))
    paint = [scene.task(sample(model=PAINT, seed=number)) for number in range(waiting)]
    choice = scene.ask()
    assert choice is not None
    assert (choice.task in paint, choice.task is draw) == (goes, not goes)


# ---- who waits for whom --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tasks", "starts"), [(1, False), (3, True)])
def test_lines_that_wait_for_one_worker_wait_behind_each_other(tasks: int, starts: bool) -> None:
    """A copy and a run take 40 s on the idle worker. The warm one is free in 1 s, and takes the first one in 11, 21 and
    31 s: a task of the other line follows it in time only behind one of the first."""
    scene = Scene()
    scene.worker("idle", link=0.2)
    scene.worker("warm", whole(PAINT), free_in=1.0)
    for seed in range(tasks):
        scene.task(sample(seed=seed))
    other = scene.task(sample(activation_bytes=5))
    choice = scene.ask()
    assert (None if choice is None else choice.task) == (other if starts else None)


def test_a_line_that_waits_is_not_asked_again_after_what_it_was_promised() -> None:
    """10 s on an A100 are 15 on the slow one, which has the weights, and 5 on the fast one, which is free in 6: so it
    is done there in 11. Behind itself it would be done in 16."""
    scene = Scene()
    scene.worker("slow", whole(PAINT), device=SLOW)
    scene.worker("fast", whole(PAINT), device=FAST, free_in=6.0)
    scene.task(sample())
    assert scene.ask() is None


@pytest.mark.parametrize(("free_in", "waits"), [(5.0, True), (7.0, False)])
def test_who_is_hurried_waits_for_a_warm_worker_too_where_that_is_sooner(free_in: float, waits: bool) -> None:
    scene = Scene()
    scene.worker("cold")
    scene.worker("warm", whole(PAINT), free_in=free_in)
    scene.backlog.urgent.add(scene.task(sample()), AT + 50.0)
    assert (scene.ask() is None) == waits


def test_the_second_in_a_hurry_does_not_wait_for_the_same_worker() -> None:
    scene = Scene()
    scene.worker("cold")
    scene.worker("warm", whole(PAINT), free_in=1.0)
    first, second = scene.task(sample(seed=1)), scene.task(sample(seed=2))
    scene.backlog.urgent.add(first, AT + 50.0)
    scene.backlog.urgent.add(second, AT + 60.0)
    choice = scene.ask()
    assert choice is not None
    assert (choice.task, choice.why.rule) == (second, PlacementRule.DEADLINE)


def test_a_lower_priority_in_a_line_does_not_start_before_a_higher_one_of_another() -> None:
    """The first of the line waits for the warm worker; behind it stand lower ones, and another line is dearer."""
    scene = Scene()
    scene.worker("idle")
    scene.worker("warm", whole(PAINT), free_in=1.0)
    scene.worker("later", whole(DRAW), free_in=100.0)
    scene.task(sample(seed=1), priority=1)
    scene.task(sample(seed=2))
    scene.task(sample(seed=3))
    high = scene.task(sample(model=DRAW), priority=1)
    assert scene.decision() == (high, "idle")


def test_while_a_higher_priority_waits_for_a_warm_worker_a_lower_one_starts() -> None:
    scene = Scene()
    scene.worker("idle", whole(DRAW))
    scene.worker("warm", whole(PAINT), free_in=1.0)
    scene.task(sample(model=PAINT), priority=1)
    lower = scene.task(sample(model=DRAW))
    assert scene.decision() == (lower, "idle")


def tagged(scene: Scene, spec: TaskSpec, tag: float) -> Task:
    """A task of a user with a turn that comes at that time."""
    task = scene.task(spec)
    scene.backlog.remove(task)
    task.set_priority(0, tag)
    scene.backlog.add(task)
    return task


@pytest.mark.parametrize(("tag", "is_within"), [(29.0, True), (31.0, False)])
def test_every_worker_widens_the_window_of_shares(tag: float, is_within: bool) -> None:
    """15 s for each of two workers, in which the loaded one may go on although it is the turn of somebody else."""
    scene = Scene(share_window_seconds=15)
    scene.worker("idle", whole(DRAW))
    scene.worker("busy", free_in=100.0)
    turn = tagged(scene, sample(model=PAINT), 0.0)
    loaded = tagged(scene, sample(model=DRAW), tag)
    assert scene.decision() == (loaded if is_within else turn, "idle")


def test_while_those_whose_turn_it_is_wait_for_busy_workers_others_may_start() -> None:
    scene = Scene()
    scene.worker("idle", whole(DRAW))
    scene.worker("warm", whole(PAINT), free_in=1.0)
    tagged(scene, sample(model=PAINT), 0.0)
    other = tagged(scene, sample(model=DRAW), 1000.0)
    assert scene.decision() == (other, "idle")


@pytest.mark.parametrize(("free_in", "waits"), [(6.0, True), (6.1, False)])
def test_what_would_run_in_parts_waits_for_who_runs_it_whole_as_soon(free_in: float, waits: bool) -> None:
    """The idle worker would take 6 s to load and 10 in parts that cost no time."""
    scene = Scene()
    scene.worker("small", capacity=41)
    scene.worker("large", whole(PAINT), free_in=free_in)
    scene.task(sample(activation_bytes=40, divisions=(ExecutionMode(20, batch=2),)))
    assert (scene.ask() is None) == waits


def test_among_many_busy_holders_the_one_that_is_soon_free_is_found() -> None:
    scene = Scene()
    scene.worker("idle")
    for number in range(MOST_BUSY + 8):
        scene.worker(f"w{number:02}", whole(PAINT), free_in=50.0 + number)
    task = scene.task(sample())
    assert scene.decision() == (task, "idle")
    scene.worker("soon", whole(PAINT), free_in=1.0)
    assert scene.ask() is None


@pytest.mark.parametrize("weights", [(), (whole(PAINT),)], ids=["cold", "warm"])
def test_a_task_waits_for_a_faster_gpu_though_its_weights_are_on_an_idle_slow_one(
    weights: tuple[Resident, ...],
) -> None:
    """10 s on an A100 are 15 on the slow one and 5 on the fast one, which is free in 1 s and has a fast link."""
    scene = Scene()
    scene.worker("slow", whole(PAINT), device=SLOW)
    fast = scene.worker("fast", *weights, device=FAST, free_in=1.0, link=10.0)
    task = scene.task(sample())
    assert scene.ask() is None
    fast.expected_end = AT + 20.0
    assert scene.decision() == (task, "slow")


def test_a_task_waits_for_a_busy_worker_near_its_adapter() -> None:
    """From the disk of the idle one's machine the files take 26 s; the busy one is free in 1 s and has them in
    memory."""
    scene = scene_with_lora(20)
    scene.worker("idle", node="m", disk=1.0)
    near = scene.worker("near", node="n", disk=1.0, free_in=1.0)
    task = scene.task(with_lora(sample(patch="x")))
    assert scene.ask() is None
    near.expected_end = AT + 50.0
    assert scene.decision() == (task, "idle")


# ---- where it is looked among many ---------------------------------------------------------------------------------


def test_among_many_idle_workers_the_one_near_the_adapter_is_found() -> None:
    scene = scene_with_lora(20)
    for number in range(3 * MOST_IDLE):
        scene.worker(f"w{number:02}", node="m", disk=1.0)
    scene.worker("x", node="n", disk=1.0)
    task = scene.task(with_lora(sample(patch="x")))
    assert scene.decision() == (task, "x")


def test_among_many_idle_workers_those_of_every_sort_are_looked_at() -> None:
    scene = Scene()
    for number in range(3 * MOST_IDLE):
        scene.worker(f"w{number:02}", device=SLOW)
    scene.worker("x", device=FAST)
    task = scene.task(sample())
    assert scene.decision() == (task, "x")


def test_among_many_idle_workers_one_that_holds_a_part_is_found() -> None:
    """Of two components it has the second, which is no reason to take it for warm, and yet the best there is."""
    scene = Scene()
    for number in range(3 * MOST_IDLE):
        scene.worker(f"w{number:02}")
    scene.worker("x", whole(DRAW))
    both = replace(sample(), uses=(*sample().uses, *sample(model=DRAW).uses))
    task = scene.task(both)
    assert scene.decision() == (task, "x")


def test_a_fast_gpu_may_take_a_longer_load() -> None:
    scene = Scene()
    scene.worker("slow", device=SLOW, link=2.0)
    scene.worker("fast", device=FAST)
    task = scene.task(sample())
    assert scene.decision() == (task, "fast")


def test_sizes_of_the_small_world_are_those_of_the_cases_above() -> None:
    assert {spec.key: spec.upload_bytes for spec in COMPONENTS} == {TEXT: 4, PAINT: 6, DRAW: 10, VAE: 3}
