"""A task is queued behind the task of a worker that computes its input, and does not start without it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelpool.pool.values.specs.spec import ComponentKey, JobId, JobSpec, RunCost, RunErrorKind, Stage, TaskId, UserId
from modelpool.pool.weights.plan.eviction_plan import Resident
from modelpool.scheduler.core.send_ahead import MOST_COMPARED
from modelpool.scheduler.decisions.queue.shares import EVERYBODY, UserShare
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.jobs import TaskStatus
from modelpool.scheduler.model.messages import Command, Outcome, Preload, RevokeTask, RunTask
from tests.scheduler.world import DRAW, PAINT, ROOMY, TEXT, VAE, Shell, alone, decode, encode, image, sample

#: the first takes less time for everything
FAST, SLOW = "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"
EVERYTHING = (Resident(TEXT, 4), Resident(PAINT, 12), Resident(DRAW, 10), Resident(VAE, 3))
ONE = tuple(task.task_id for task in image("one", "new").tasks)


def pool(
    workers: int = 1, send_ahead_seconds: float = 60.0, capacity: int = ROOMY, node: str = "", device: str = "",
    **config,
) -> Shell:  # fmt: skip
    """Workers that know how long the runs of an image take; the first has its weights."""
    shell = Shell(SchedulerConfig(story_length=None, send_ahead_seconds=send_ahead_seconds, **config))
    shell.want("a")
    shell.come_up("a", capacity, node=node, device=device)
    shell.submit(image("first", "first"))
    while shell.running:
        expected = shell.tasks[shell.running["a"].command.task_id].run_seconds
        shell.finish("a", cost=RunCost(run_seconds=expected))
    shell.workers(**dict.fromkeys("abc"[:workers], capacity))
    return shell


def sent(commands: list[Command]) -> list[TaskId]:
    return [command.task_id for command in commands if isinstance(command, RunTask)]


def test_an_image_is_sent_to_one_worker_at_once() -> None:
    shell = pool(2)
    commands = shell.submit(image("one", "new"))
    assert sent(commands) == list(ONE)
    assert len({command.worker_id for command in commands if isinstance(command, RunTask)}) == 1
    assert [c.follows for c in commands if isinstance(c, RunTask)] == [(), ONE[:1], ONE[1:2]]
    (name,) = shell.running
    for task_id in ONE:
        assert shell.on(name) == task_id
        assert shell.state.demand.tasks[task_id].status is TaskStatus.RUNNING
        assert sent(shell.finish(name)) == []
    assert shell.outcome("one") is Outcome.SUCCEEDED


def test_it_is_sent_shortly_before_the_end_of_a_long_run() -> None:
    shell = pool(send_ahead_seconds=0.05)
    assert sent(shell.submit(image("one", "new"))) == list(ONE[:1])
    before = shell.at
    commands: list[Command] = []
    while not sent(commands):
        commands = shell.tick_comes()
    assert sent(commands) == list(ONE[1:2])
    assert shell.at == pytest.approx(before + 0.95), "an encoding takes a second"


def both_known(**config) -> Shell:
    """A worker that knows how long the runs of both models take, and has room for one of them."""
    shell = pool(capacity=24, **config)
    shell.submit(image("draw", "first", DRAW))
    while shell.running:
        shell.finish("a", cost=RunCost(run_seconds=shell.tasks[shell.running["a"].command.task_id].run_seconds))
    return shell


def with_unknown() -> Shell:
    """A worker with weights that it never used."""
    shell = pool()
    shell.want("b")
    shell.come_up("b", entries=EVERYTHING)
    return shell


def drained() -> Shell:
    """A worker with a machine that runs for hours."""
    shell = pool(node="n1")
    shell.drain("n1", 10_000.0)
    return shell


def test_when_nothing_is_queued_behind_its_input() -> None:
    cases = {
        "send-ahead is off": (pool(send_ahead_seconds=0.0), PAINT),
        "its user has a limit": (pool(shares=(UserShare(user=EVERYBODY, running_limit=5),)), PAINT),
        "weights are not there": (both_known(), PAINT),
        "it may share a run": (pool(batch_limit=2), PAINT),
        "its length is unknown": (with_unknown(), DRAW),
        "the machine ends": (drained(), PAINT),
    }
    for name, (shell, model) in cases.items():
        assert sent(shell.submit(image("one", "new", model))) == list(ONE[:1]), name


def given(name: str, model: ComponentKey = PAINT, seed: int = 0) -> JobSpec:
    """A job of one sampling, whose input is there."""
    source = TaskId("given:1")
    return alone(name, sample(source, model=model, seed=seed), given=(source,))


def test_it_is_not_queued_where_it_evicts_weights() -> None:
    """Which weights it may evict is decided when it starts."""
    shell = pool(capacity=24)
    assert sent(shell.submit(image("one", "new", activation_bytes=6))) == list(ONE[:1])


def test_an_idle_worker_with_its_weights_and_others_takes_it() -> None:
    """Both are free then for what they have weights for; of equal ones it does not matter which is."""
    for others, expected in ((EVERYTHING, ONE[:1]), (EVERYTHING[:2] + EVERYTHING[3:], ONE)):
        shell = pool()
        shell.want("a", "b")
        shell.come_up("b", entries=others)
        assert sent(shell.submit(image("one", "new"))) == list(expected)


def test_few_workers_are_examined_for_the_time_of_the_next_follower() -> None:
    """In a pool whose many runs have no follower, that would take longer than all else about an event."""
    names = [f"worker {n}" for n in range(20)]
    shell = Shell(SchedulerConfig(story_length=None, send_ahead_seconds=0.05))
    shell.want(*names)
    for name in names:
        shell.come_up(name, entries=(Resident(PAINT, 12),))
    shell.submit(given("measured"))
    shell.finish(next(iter(shell.running)), cost=RunCost(run_seconds=10.0))
    for seed, _ in enumerate(names):
        source = TaskId(f"given:{seed}")
        reading = sample(source, seed=seed)
        last = decode(reading.task_id)
        shell.submit(JobSpec(JobId(f"job {seed}"), (reading, last), last.task_id, (source,)))
    examined = []
    demand, find = shell.state.demand, shell.state.demand.only_reader
    demand.only_reader = lambda task_id: (examined.append(task_id), find(task_id))[1]
    shell.state.starts.send_ahead.next_at(shell.state.at)
    assert len(shell.running) == len(names)
    assert len(examined) == MOST_COMPARED


def test_it_is_not_queued_while_another_task_waits() -> None:
    shell = both_known(send_ahead_seconds=20.0)
    shell.submit(given("draw, too", DRAW))
    shell.submit(given("waits", PAINT, seed=1))
    assert ONE[0] in sent(shell.submit(alone("text", encode("new"))))
    assert not sent(shell.submit(image("one", "new")))


def test_it_is_not_queued_while_a_task_waits_for_its_worker() -> None:
    """One that ran out of memory is next on that worker."""
    shell = pool(send_ahead_seconds=15.0)
    shell.submit(given("large"))
    assert sent(shell.submit(image("one", "new"))) == list(ONE[:2])
    assert not sent(shell.finish("a", RunErrorKind.OUT_OF_VRAM))
    assert len(shell.state.demand.pinned)
    assert not sent(shell.finish("a")), "the decoding waits, and starts after the other"


def test_nothing_is_queued_behind_a_batch() -> None:
    """A worker does not keep the results of one."""
    shell = pool(batch_limit=2, send_ahead_seconds=5.0)
    alike = [replace(encode(f"batch {n}"), together="all") for n in range(3)]
    reader = replace(sample(alike[1].task_id), together="")
    shell.submit(given("busy"))
    shell.submit(JobSpec(JobId("one"), (alike[1], reader), reader.task_id))
    shell.submit(alone("two", alike[2]))
    shell.finish("a")
    assert len(shell.running["a"].members) == 2
    assert shell.on("a") == alike[1].task_id
    assert not shell.queued


def test_what_two_tasks_of_a_worker_read_is_sent() -> None:
    """The worker forgets a result when it is read."""
    shell = pool(send_ahead_seconds=60.0)
    shell.submit(image("one", "new"))
    second = encode("second")
    reader = sample(ONE[0], second.task_id)
    job = JobSpec(JobId("both"), (encode("new"), second, reader), reader.task_id)
    assert sent(shell.submit(job)) == [second.task_id]


def test_a_task_that_has_failed_waits_for_its_input() -> None:
    shell = pool()
    shell.submit(image("one", "new"))
    shell.finish("a")
    shell.lose("a")
    shell.lose_result(ONE[0])
    assert sent(shell.come_up("a", entries=EVERYTHING)) == [ONE[0]]


def test_behind_a_run_that_is_late_nothing_is_queued_and_a_follower_stays() -> None:
    shell = pool(2)
    shell.submit(image("one", "new"))
    shell.tick(1000.0)
    assert not [c for c in shell.feed_nothing() if isinstance(c, RevokeTask)], "it cannot start elsewhere"
    shell = pool()
    shell.submit(alone("text", encode("new")))
    shell.tick(1000.0)
    assert not sent(shell.submit(image("one", "new")))


def test_after_a_revocation_nothing_is_queued_before_the_end_of_the_run() -> None:
    """As for all that is sent ahead: whoever is asked back may come again."""
    shell = pool()
    shell.submit(image("one", "new"))
    shell.submit(alone("text", encode("new")))
    shell.cancel("one")
    while shell.asked_back:
        shell.revoke("a")
    while shell.revoked:
        shell.tell_revoked()
    assert shell.on("a") == ONE[0]
    assert not sent(shell.submit(image("two", "new", seed=2)))


def test_what_several_read_is_awaited_by_all_of_them() -> None:
    """They may share a run, or start on several workers."""
    shell = pool(send_ahead_seconds=5.0)
    shell.submit(image("busy", "first", seed=9))
    for seed in (1, 2):
        shell.submit(image(f"j{seed}", "new", seed=seed))
    commands: list[Command] = []
    while not sent(commands):
        commands = shell.tick_comes()
    assert sent(commands) == list(ONE[:1])


@pytest.mark.parametrize("kind", [RunErrorKind.OUT_OF_VRAM, RunErrorKind.FILE_UNAVAILABLE])
def test_without_its_input_it_does_not_start_and_has_not_failed(kind: RunErrorKind) -> None:
    shell = pool()
    shell.submit(image("one", "new"))
    shell.finish("a", kind)
    assert [command.task_id for command in shell.revoked] == list(ONE[1:])
    while shell.revoked:
        shell.tell_revoked()
    tasks = shell.state.demand.tasks
    assert [tasks[task_id].failures for task_id in ONE[1:]] == [0, 0]
    while shell.running or shell.starting:
        for name, _ in list(shell.starting):
            shell.come_up(name)
        for name in list(shell.running):
            shell.finish(name)
    assert shell.outcome("one") is Outcome.SUCCEEDED


def test_what_a_worker_has_lost_is_sent_to_it_later() -> None:
    shell = pool()
    shell.submit(image("one", "new"))
    shell.revoked += shell.queued.pop("a")
    shell.finish("a")
    assert shell.state.worker_table.workers["a"].task_id == ONE[1], "the core believes that it runs"
    while shell.revoked:
        shell.tell_revoked()
    assert shell.on("a") == ONE[1]
    shell.finish("a")
    shell.finish("a")
    assert shell.outcome("one") is Outcome.SUCCEEDED


def test_an_input_whose_report_failed_is_not_made_again_for_what_has_run() -> None:
    shell = pool()
    shell.submit(image("one", "new"))
    shell.made["a"] = {ONE[0]}
    shell.finish("a", RunErrorKind.FILE_UNAVAILABLE)
    assert shell.on("a") == ONE[1]
    assert ONE[0] in shell.state.demand.tasks
    shell.finish("a")
    assert ONE[0] not in shell.state.demand.tasks, "nobody needs it any more"
    shell.finish("a")
    assert shell.outcome("one") is Outcome.SUCCEEDED


def test_a_cancelled_image_is_asked_back() -> None:
    shell = pool()
    shell.submit(image("one", "new"))
    asked = [command.task_id for command in shell.cancel("one") if isinstance(command, RevokeTask)]
    assert asked == list(ONE[1:])
    while shell.asked_back:
        shell.revoke("a")
    while shell.revoked:
        shell.tell_revoked()
    shell.finish("a", RunErrorKind.CANCELLED)
    assert shell.outcome("one") is Outcome.CANCELLED
    assert not shell.state.demand.tasks


def test_the_others_of_a_shared_encoding_go_on_when_one_image_is_cancelled() -> None:
    shell = pool()
    shell.submit(image("one", "new"))
    shell.submit(image("two", "new", seed=2))
    shell.cancel("one")
    while shell.asked_back:
        shell.revoke("a")
    while shell.revoked:
        shell.tell_revoked()
    while shell.running:
        shell.finish("a")
    assert (shell.outcome("one"), shell.outcome("two")) == (Outcome.CANCELLED, Outcome.SUCCEEDED)


def test_a_job_of_higher_priority_goes_before_what_waits_for_its_input() -> None:
    shell = pool()
    shell.submit(image("one", "new"))
    asked = [c.task_id for c in shell.submit(image("urgent", "now", priority=1)) if isinstance(c, RevokeTask)]
    assert asked == list(ONE[1:])


def test_a_lost_worker_loses_one_run() -> None:
    shell = pool()
    shell.submit(image("one", "new"))
    shell.lose("a")
    tasks = shell.state.demand.tasks
    assert [tasks[task_id].failures for task_id in ONE] == [1, 0, 0]
    assert [tasks[task_id].follows for task_id in ONE] == [(), (), ()]
    shell.come_up("a")
    while shell.running:
        shell.finish("a")
    assert shell.outcome("one") is Outcome.SUCCEEDED


def test_a_worker_that_is_lost_after_a_failed_run_loses_nothing_that_followed_it() -> None:
    """The core believes that the follower runs until the worker says otherwise, which it cannot any more."""
    shell = pool()
    shell.submit(JobSpec(JobId("one"), image("one", "new").tasks[:2], ONE[1]))
    shell.finish("a", RunErrorKind.FILE_UNAVAILABLE)
    assert shell.state.worker_table.workers["a"].task_id == ONE[1]
    shell.lose("a")
    task = shell.state.demand.tasks[ONE[1]]
    assert (task.status, task.failures, task.crashed) == (TaskStatus.BLOCKED, 0, ())
    shell.come_up("a")
    while shell.running:
        shell.finish("a")
    assert shell.outcome("one") is Outcome.SUCCEEDED


def test_of_a_job_that_failed_nothing_is_left() -> None:
    shell = pool()
    shell.submit(image("one", "new"))
    shell.finish("a", RunErrorKind.INTERNAL)
    while shell.revoked:
        shell.tell_revoked()
    assert shell.outcome("one") is Outcome.FAILED
    assert not shell.state.demand.tasks


def of(name: str) -> tuple[TaskId, ...]:
    """The tasks of an image with this prompt."""
    return tuple(task.task_id for task in image(name, name).tasks)


def test_what_an_earlier_task_leads_to_is_not_passed() -> None:
    """Of two images of one text the second waits for the encoding; a later image comes after it."""
    shell = pool()
    for seed in (1, 2):
        shell.submit(image(f"text {seed}", "text", seed=seed))
    shell.submit(image("later", "later"))
    order = []
    while shell.running:
        order.append(shell.on("a"))
        shell.finish("a")
    second = image("text 2", "text", seed=2).tasks[1].task_id
    assert order.index(second) < order.index(of("later")[1])


@pytest.mark.parametrize(("other", "is_queued"), [(SLOW, True), (FAST, False)])
def test_a_task_waits_for_its_input_if_another_gpu_is_faster(other: str, is_queued: bool) -> None:
    """That GPU may be free by then, although it is busy when the task could be queued."""
    shell = pool(device=SLOW)
    shell.submit(given("a"))
    shell.want("a", "b")
    shell.come_up("b", device=other)
    shell.submit(given("b", DRAW))
    shell.finish("a")
    assert (shell.on("a"), shell.on("b")) == (None, shell.jobs[JobId("b")].wanted)
    assert sent(shell.submit(image("one", "new"))) == list(ONE if is_queued else ONE[:1])
    assert shell.on("a") == ONE[0]


def test_a_task_takes_no_place_that_a_limit_leaves_for_tasks_that_could_run() -> None:
    shell = pool(shares=(UserShare(user=EVERYBODY, running_limit=2),))
    shell.want("a", "b")
    shell.come_up("b", entries=(Resident(TEXT, 4),))
    shell.submit(image("one", "new"))
    shell.submit(image("two", "two"))
    assert {shell.on("a"), shell.on("b")} == {ONE[0], of("two")[0]}


def test_weights_of_a_queued_task_are_not_evicted_for_a_later_one() -> None:
    """As those of a task that waits: the worker starts it first."""
    for send_ahead_seconds in (0.0, 60.0):
        shell = pool(capacity=24, send_ahead_seconds=send_ahead_seconds)
        shell.submit(given("draw", DRAW, seed=8))
        shell.finish("a", cost=RunCost(run_seconds=10.0))
        for n in range(2):
            shell.submit(image(f"small {n}", f"small {n}", activation_bytes=1))
            while shell.running:
                shell.finish("a", cost=RunCost(run_seconds=shell.tasks[shell.on("a")].run_seconds))
        shell.submit(image("one", "new", activation_bytes=1))
        assert bool(shell.queued) == bool(send_ahead_seconds)
        shell.at -= 0.9  # the encoding takes some time more
        assert not [c for c in shell.submit(given("later", DRAW)) if isinstance(c, Preload)], send_ahead_seconds


def test_what_evicts_weights_is_not_queued() -> None:
    """What it evicts depends on the next needed components, and on pins: not the weights of a decoding."""
    waits = sample(TaskId("given:1"), activation_bytes=6)
    for job in (image("one", "new", activation_bytes=6), alone("waits", waits, given=waits.needs)):
        shell = pool(capacity=24, send_ahead_seconds=5.0)
        shell.pin((VAE,), 1)
        shell.submit(alone("text", encode("new")))
        assert not sent(shell.submit(job)), job.job_id
        shell.finish("a")
        assert shell.on("a") == next(task.task_id for task in job.tasks if task.stage is Stage.SAMPLE)
        assert shell.up["a"][1].of(VAE) == shell.running["a"].residency.of(VAE) == Resident(VAE, 3), job.job_id


def test_a_task_that_the_limit_of_its_user_holds_back_is_not_passed() -> None:
    """It may start when a task of that user ends, which is in front of the follower."""
    ann = UserId("ann")
    shell = pool(send_ahead_seconds=5.0, shares=(UserShare(user=ann, running_limit=1),))
    first, second = encode("first of ann"), encode("second of ann")
    for task in (first, second):
        shell.submit(replace(alone(task.task_id, task), user=ann))
    shell.submit(image("one", "new"))
    order = []
    while shell.running:
        order.append(shell.on("a"))
        shell.finish("a", cost=RunCost(run_seconds=shell.tasks[order[-1]].run_seconds))
    assert order == [first.task_id, ONE[0], second.task_id, *ONE[1:]]


def test_it_leaves_a_machine_that_is_drained_and_one_that_is_not_wanted() -> None:
    for change in ("drain", "not wanted"):
        shell = pool(node="n1")
        shell.submit(image("one", "new"))
        commands = shell.drain("n1", 1000.0) if change == "drain" else shell.want("b")
        assert [c.task_id for c in commands if isinstance(c, RevokeTask)] == list(ONE[1:]), change


def test_a_run_that_stops_with_its_state_takes_what_follows_with_it() -> None:
    shell = pool()
    shell.submit(image("one", "new"))
    shell.finish("a")
    shell.pause("a")
    shell.stop_at("a", 2)
    assert [command.task_id for command in shell.revoked] == [ONE[2]]
    while shell.revoked:
        shell.tell_revoked()
    tasks = shell.state.demand.tasks
    assert (tasks[ONE[1]].failures, tasks[ONE[2]].failures) == (0, 0)
    while shell.running:
        shell.finish("a")
    assert shell.outcome("one") is Outcome.SUCCEEDED


def test_behind_a_task_that_is_asked_to_stop_nothing_is_queued() -> None:
    shell = pool(send_ahead_seconds=5.0)
    shell.submit(image("one", "new"))
    while shell.queued:
        shell.finish("a")
    assert shell.on("a") == ONE[1], "it takes longer than what is sent ahead"
    shell.pause("a")
    while shell.tick_due is not None and shell.tick_due < shell.at + 30.0:
        assert not sent(shell.tick_comes())
    shell.stop_at("a", 2)
    while shell.running:
        shell.finish("a")
    assert shell.outcome("one") is Outcome.SUCCEEDED


def test_what_follows_a_task_that_is_asked_back_is_asked_back_too() -> None:
    """A worker is late, and another one idle: that one takes the whole image."""
    shell = pool(2)
    shell.submit(given("a"))
    shell.submit(given("b", DRAW))
    shell.submit(image("one", "new"))
    assert [command.task_id for command in shell.queued["a"]] == list(ONE)
    shell.finish("b")
    shell.tick(1000.0)
    assert [c.task_id for c in shell.feed_nothing() if isinstance(c, RevokeTask)] == list(ONE)
    while shell.asked_back:
        shell.revoke("a")
    while shell.revoked:
        shell.tell_revoked()
    assert shell.on("b") == ONE[0]
