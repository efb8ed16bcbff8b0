"""Prices of weights that do not fit on one GPU: from the host, and from the GPUs of the other members of a gang."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentSpec,
    ComponentUse,
    Residency,
    Role,
    RunCost,
    Stage,
    TaskId,
    TaskReport,
    TaskSpec,
)
from modelpool.pool.weights.plan.peer_shares import exchange_seconds
from modelpool.scheduler.decisions.costs.gang_costs import gang_extra_seconds, gang_link, moving_seconds
from modelpool.scheduler.decisions.placement.gang_choice import GangChoice, choose_gang
from modelpool.scheduler.model.gang_times import FORMING_SECONDS, prior_seconds
from modelpool.scheduler.model.gpu_kinds import gang_link_of
from modelpool.scheduler.model.jobs import Task
from tests.scheduler.scene import Scene

GB = 10**9
#: 33 billion weights of a byte each, on cards of 24 GB that connect to their host by 24.5 GB/s
LARGE = ComponentSpec(ComponentKey("large/diffusion_model"), Role.DIFFUSION_MODEL, 33 * GB, 33 * GB)
CARD, HOST = 24 * GB, 24.5e9
STEPS = 40
#: between cards: a switch, and two kinds of bridge
SWITCH, BRIDGE, SLOW_BRIDGE = 300e9, 100e9, 40e9


def scene_of(cards: int, among: float, capacity: int = CARD) -> Scene:
    scene = Scene()
    scene.costs.know((LARGE,))
    for number in range(cards):
        worker = scene.worker(f"gpu-{number}", capacity=capacity, link=HOST, node="box")
        assert worker.spec is not None
        worker.spec = replace(worker.spec, holds_shares=True)
        worker.gang_link_bytes_per_second = among
    return scene


def sampling(step_seconds: float, degrees: tuple[int, ...] = (1, 2, 4), options: tuple[str, ...] = ()) -> TaskSpec:
    use = ComponentUse(LARGE.key, 0, passes=STEPS)
    name = TaskId(f"sample {step_seconds} {options}")
    return TaskSpec(name, Stage.SAMPLE, (use,), 3 * GB, STEPS * step_seconds, degrees=degrees, options=options)


def choice(scene: Scene, task: Task, most_times: float = inf) -> GangChoice | None:
    first = scene.workers[0]
    extra_seconds = scene.costs.extra_seconds(task.spec, task.cost_class, first)
    assert extra_seconds is not None
    return choose_gang(scene.query(), task, (first, extra_seconds), most_times, inf)


def test_a_model_for_two_cards_gets_two_when_its_streaming_vanishes() -> None:
    """Steps are short, so that computing alone is no reason for a second card: reading from its GPU is."""
    wanted = {BRIDGE: 2, SLOW_BRIDGE: 1, 0.0: 1}
    found = {}
    for among in wanted:
        scene = scene_of(2, among)
        chosen = choice(scene, scene.task(sampling(0.1, (1, 2))))
        found[among] = 1 if chosen is None else len(chosen.workers)
    assert found == wanted


def test_a_run_that_takes_less_gpu_time_on_two_is_shared_under_load() -> None:
    found = []
    for among in (SWITCH, 0.0):
        scene = scene_of(2, among)
        task = scene.task(sampling(0.1, (1, 2)))
        for number in range(1, 4):
            scene.task(sampling(0.1 + number, (1, 2)))
        shared = choice(scene, task, most_times=0.9)
        found.append(1 if shared is None else len(shared.workers))
    assert found == [2, 1], "from the host it takes more"


def test_the_price_is_the_bytes_of_each_tier_over_its_link() -> None:
    """W weights, B room, n members: R + (W - R) / n = B are resident and held; (W - R) go over the link in each pass.
    The first load is B, with or without shares."""
    scene = scene_of(4, BRIDGE)
    spec = sampling(0.5)
    task = scene.task(spec)
    room = CARD - 3 * GB
    worker = scene.workers[0]
    alone = scene.costs.extra_seconds(spec, task.cost_class, worker)
    assert alone is not None
    streaming = STEPS * (LARGE.weight_bytes - room) / HOST
    assert abs(alone - room / HOST - streaming) < 1e-6
    for degree in (2, 4):
        resident = (degree * room - LARGE.weight_bytes) / (degree - 1)
        exchanging = STEPS * (LARGE.weight_bytes - resident) / BRIDGE
        assert abs(moving_seconds(scene.costs, spec, task.cost_class, worker, degree) - exchanging) < 1e-6
        extra = gang_extra_seconds(scene.costs, spec, task.cost_class, worker, degree)
        assert extra is not None
        assert abs(extra - room / HOST - exchanging) < 1e-6
    assert abs(moving_seconds(scene.costs, spec, task.cost_class, worker, 1) - streaming) < 1e-6


def test_prices_of_random_models_are_never_above_the_host_and_fall_with_the_link() -> None:
    """For random models, cards and links: a gang never moves for longer than one card, less with a faster link, and
    exactly as long where members hold nothing: with options, no link, or a worker that holds no shares."""
    generator, wrong = Random(11), []
    for number in range(150):
        scene = scene_of(2, 0.0, capacity=generator.randint(5 * GB, 40 * GB))
        spec, other = sampling(0.5), sampling(0.5, options=("fbcache",))
        links = sorted(generator.uniform(1e9, 900e9) for _ in range(4))
        host = moved(scene, spec, 0.0, 1)
        for degree in (2, 4, 8):
            times = [moved(scene, spec, link, degree) for link in links]
            if times != sorted(times, reverse=True) or times[0] > host:
                wrong.append(f"{number}: {times} for {degree} over {links}, {host} alone")
            if [moved(scene, spec, 0.0, degree), moved(scene, other, SWITCH, degree)] != [host, host]:
                wrong.append(f"{number}: nothing is held, on {degree}")
    assert not wrong, wrong


def moved(scene: Scene, spec: TaskSpec, among: float, degree: int) -> tuple[float, float]:
    """Seconds of weights that stream in a run, and until it would be ready with these; rounded."""
    task, worker = scene.task(spec), scene.workers[0]
    worker.gang_link_bytes_per_second = among
    extra_seconds = gang_extra_seconds(scene.costs, spec, task.cost_class, worker, degree)
    assert extra_seconds is not None
    return round(moving_seconds(scene.costs, spec, task.cost_class, worker, degree), 6), round(extra_seconds, 6)


def test_a_link_is_stated_or_measured_or_of_the_data_sheet() -> None:
    names = ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "NVIDIA GeForce RTX 3090", "a stranger")
    assert [gang_link_of(name) for name in names] == [300e9, 0.0, 0.0, 0.0], "not all machines connect cards"
    scene = scene_of(2, 300e9)
    worker = scene.workers[0]
    assert worker.spec is not None
    assert gang_link(scene.costs, worker, 2) == 300e9
    spec = sampling(0.5)
    cost = RunCost(run_seconds=30.0, exchanged_bytes=100 * GB, gang_link_bytes_per_second=200e9)
    report = TaskReport(spec.task_id, 1, worker.worker_id, 1, Residency(CARD), cost)
    scene.costs.learn_share(spec, worker, report, 2)
    assert [gang_link(scene.costs, worker, degree) for degree in (2, 4)] == [200e9, 300e9]
    worker.spec = replace(worker.spec, gang_link_bytes_per_second=50e9)
    worker.gang_link_bytes_per_second = 50e9  # as when it is introduced
    assert gang_link(scene.costs, worker, 2) == 50e9
    worker.spec = replace(worker.spec, holds_shares=False)
    assert gang_link(scene.costs, worker, 2) == 0.0


def test_a_run_time_is_learned_without_the_exchange_of_weights() -> None:
    """A measured gang computes for the rest of its time, and the next one is expected to take that and its own moves:
    with the same link, the same time."""
    scene = scene_of(2, BRIDGE)
    spec = sampling(0.5)
    task, worker = scene.task(spec), scene.workers[0]
    received = STEPS * 12 * GB
    moving = exchange_seconds(received, 2, BRIDGE)
    assert moving == 2 * received / BRIDGE, "two members receive a half each"
    cost = RunCost(
        run_seconds=moving + 15.0, exchanged_bytes=received, gang_link_bytes_per_second=BRIDGE, share_bytes=12 * GB
    )
    scene.costs.learn_share(spec, worker, TaskReport(spec.task_id, 1, worker.worker_id, 1, Residency(CARD), cost), 2)
    assert abs(scene.costs.gang_seconds(spec, task.cost_class, worker, 2, 1.0) - 15.0) < 1e-6


def test_what_fits_has_the_price_that_it_had() -> None:
    scene = scene_of(4, BRIDGE, capacity=80 * GB)
    spec = sampling(0.5)
    task = scene.task(spec)
    chosen = choice(scene, task)
    assert chosen is not None
    run_seconds = prior_seconds(spec, spec.run_seconds, len(chosen.workers))
    assert chosen.moving_seconds == 0.0
    assert chosen.seconds == LARGE.weight_bytes / HOST + FORMING_SECONDS + run_seconds
    assert not task.cost_class.peer_loads
