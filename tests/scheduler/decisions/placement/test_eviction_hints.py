"""What a worker is told of the time after a run: what follows from it first, then what waits, soonest first."""

from __future__ import annotations

from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, Role, TaskId, WorkerId
from modelpool.pool.weights.plan.eviction_plan import Resident
from modelpool.scheduler.decisions.placement.eviction_hints import (
    MOST_FOLLOWERS,
    MOST_HINTS,
    by_demand,
    followers,
    needed_next,
)
from tests.scheduler.decisions.placement.test_rules import Scene, whole
from tests.scheduler.scene import AT
from tests.scheduler.world import DRAW, PAINT, TEXT, VAE, Shell, decode, encode, image, sample
from tests.simulation.hints import moved_gib


def told(scene: Scene, task, worker, waiting=(), running=()) -> tuple[ComponentKey, ...]:
    return needed_next(task, worker, waiting, running, {}, {})


def test_what_waits_is_told_in_its_order_and_each_component_once() -> None:
    scene = Scene()
    worker = scene.worker("a", whole(TEXT), whole(PAINT), whole(DRAW), whole(VAE))
    now = scene.task(sample(seed=9))
    waiting = [scene.task(sample(model=DRAW)), scene.task(encode("cat")), scene.task(sample(model=DRAW, seed=1))]
    assert told(scene, now, worker, waiting) == (DRAW, TEXT)


def test_what_is_not_there_and_does_not_come_is_not_told() -> None:
    """It cannot be evicted. What the task brings along can."""
    scene = Scene()
    worker = scene.worker("a", whole(TEXT))
    now = scene.task(sample(seed=9))
    waiting = [scene.task(sample(model=DRAW)), scene.task(sample(seed=1))]
    assert told(scene, now, worker, waiting) == (PAINT,)


def test_what_follows_from_the_run_comes_before_what_waits() -> None:
    """The decode of the sample that starts now, then the encode that waits, then the decode of what runs elsewhere."""
    scene = Scene()
    worker = scene.worker("a", whole(TEXT), whole(VAE), whole(DRAW))
    now, follower = scene.task(sample()), scene.task(decode(sample().task_id))
    waiting = [scene.task(encode("cat"))]
    elsewhere = scene.task(encode("dog"))
    last = scene.task(sample(elsewhere.spec.task_id, model=DRAW))
    tasks = {t.spec.task_id: t for t in (follower, last)}
    readers: dict[TaskId, dict[TaskId, None]] = {
        now.spec.task_id: {follower.spec.task_id: None},
        elsewhere.spec.task_id: {last.spec.task_id: None},
    }
    assert needed_next(now, worker, waiting, [elsewhere], tasks, readers) == (VAE, TEXT, DRAW)


def test_of_what_follows_the_nearest_come_first_and_no_more_than_are_looked_at() -> None:
    """One encode may be read by thousands of samples: the others of them are not gone through."""
    scene = Scene()
    first, *samples = [scene.task(encode("cat")), *(scene.task(sample(seed=n)) for n in range(MOST_FOLLOWERS - 1))]
    last = [scene.task(decode(one.spec.task_id)) for one in samples[:3]]
    tasks = {t.spec.task_id: t for t in (*samples, *last)}
    readers = {first.spec.task_id: dict.fromkeys(one.spec.task_id for one in samples)}
    readers |= {one.spec.task_id: {end.spec.task_id: None} for one, end in zip(samples, last, strict=False)}
    assert followers(first, tasks, readers) == [*samples, last[0]]
    assert followers(samples[1], tasks, readers) == [last[1]]
    assert list(followers(last[0], tasks, readers)) == []


def test_what_no_known_task_needs_follows_by_its_rate_of_demand() -> None:
    """PAINT arrives with the task. VAE is needed ten times as often as TEXT, and only a part of DRAW is there."""
    scene = Scene()
    worker = scene.worker("a", whole(TEXT), Resident(DRAW, 4), whole(VAE))
    now = scene.task(sample(model=PAINT))
    scene.costs.at = AT
    for key, gap_seconds in ((VAE, 1.0), (DRAW, 0.1), (TEXT, 10.0)):
        for number in range(20, 0, -1):
            scene.costs.rates.arrived((key,), AT - number * gap_seconds)
            scene.costs.rates.ended((key,), AT - number * gap_seconds)
    assert by_demand(now, worker, (), scene.costs) == [PAINT, VAE, TEXT, DRAW]
    assert by_demand(now, worker, (VAE,), scene.costs) == [PAINT, TEXT, DRAW]


def test_no_more_is_told_than_the_limit() -> None:
    """Twenty models are there and wait; the first sixteen are told."""
    scene = Scene()
    keys = [ComponentKey(f"model-{n}") for n in range(20)]
    scene.costs.know(tuple(ComponentSpec(key, Role.DIFFUSION_MODEL, 1, 1) for key in keys))
    worker = scene.worker("a", *(Resident(key, 1) for key in keys))
    waiting = [scene.task(sample(model=key)) for key in keys]
    assert told(scene, scene.task(sample()), worker, waiting) == tuple(keys[:MOST_HINTS])


def test_the_core_tells_it_where_something_has_to_make_room_and_only_there(shell: Shell) -> None:
    """27 B hold TEXT, PAINT and VAE, or TEXT and DRAW. 1. An image of PAINT is made: nothing has to make room. 2. A
    image of DRAW starts, one of PAINT waits: for DRAW's sample VAE is told before all else, it is needed next."""
    shell.workers(a=27)
    shell.submit(image("p"))
    for _ in range(3):
        assert shell.running[WorkerId("a")].command.needed_next == ()
        shell.finish("a")
    shell.submit(image("d", model=DRAW))
    shell.submit(image("q", prompt="dog"))
    hints = {}
    while shell.running:
        command = shell.running[WorkerId("a")].command
        hints[command.task_id] = command.needed_next
        shell.finish("a")
    drawn = next(hint for task_id, hint in hints.items() if task_id.startswith("s:draw"))
    assert drawn[0] == VAE
    assert shell.outcome("q") is not None


def test_hints_save_bytes_where_memory_is_short() -> None:
    """One worker, six models, arrivals in bursts: a core that tells nothing moves more."""
    told_gib, silent_gib = moved_gib(hints=True), moved_gib(hints=False)
    assert told_gib < silent_gib, (told_gib, silent_gib)
