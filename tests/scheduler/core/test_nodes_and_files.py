"""Machines that lack files, are drained, or are lost: what the core does with their tasks."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from modelpool.pool.values.specs.spec import ANY_FILE, FileVerdict, JudgedFile, RunCost, RunErrorKind, TaskId, WorkerId
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import FilesJudged, LossCause, Outcome, StartWorker
from modelpool.scheduler.model.nodes import RETRY_SECONDS, UNAVAILABLE_SECONDS
from tests.scheduler.world import DRAW, PAINT, ROOMY, TEXT, Shell, alone, encode, image, sample


def on_nodes(config: SchedulerConfig | None = None, **nodes: str) -> Shell:
    """A shell with one worker on each of these machines."""
    shell = Shell(config or SchedulerConfig(story_length=None))
    shell.want(*nodes)
    for name, node in nodes.items():
        shell.come_up(name, ROOMY, node=node)
    return shell


def test_a_machine_without_a_file_gets_no_more_work_that_needs_it() -> None:
    """Found on a cluster: the machine without the file failed fastest, so it was idle first, and took 200 of 200."""
    shell = on_nodes(a="bare", b="full")
    for number in range(8):
        shell.submit(alone(f"j{number}", encode(f"cat {number}")))
    assert shell.on("a") is not None
    shell.lacks("a", TEXT)
    runs = 0
    while shell.running:
        assert shell.on("a") is None, "the machine lacks the file"
        shell.finish("b")
        runs += 1
    assert runs == 8
    assert all(shell.outcome(f"j{number}") is Outcome.SUCCEEDED for number in range(8))


def test_a_file_that_is_missing_says_nothing_of_another_file_with_an_equal_component() -> None:
    """Two checkpoints have equal text encoders, and the file of one is gone from the only machine, or overwritten: the
    other one failed with it."""
    gone, there = (replace(encode(name), file_names=(name,)) for name in ("gone", "there"))
    shell = on_nodes(a="node-1")
    shell.submit(alone("of the missing file", gone))
    shell.lacks("a", TEXT)
    assert shell.outcome("of the missing file") is Outcome.FAILED
    shell.submit(alone("of the other", there))
    shell.finish("a")
    assert shell.outcome("of the other") is Outcome.SUCCEEDED
    differs = JudgedFile(99, FileVerdict.DIFFERS, (TEXT,), "/models/gone", "gone", "another")
    shell.feed(FilesJudged(shell.tick(), WorkerId("a"), shell.up[WorkerId("a")][0], (differs,)))
    shell.submit(alone("again", replace(gone, task_id=TaskId("again"))))
    assert "/models/gone" in shell.error("again").message
    shell.submit(alone("another of the other", replace(there, task_id=TaskId("another"))))
    shell.finish("a")
    assert shell.outcome("another of the other") is Outcome.SUCCEEDED


def test_other_work_still_runs_on_a_machine_without_a_file() -> None:
    """More kinds of work that a cannot run than a placement considers wait before one that it can."""
    shell = on_nodes(SchedulerConfig(story_length=None, window=1), a="bare", b="full")
    shell.submit(alone("first", encode("cat")))
    shell.submit(alone("second", encode("dog")))
    shell.lacks("a", TEXT)
    for number in range(3):
        shell.submit(alone(f"j{number}", encode("cat", patch=f"lora {number}")))
    assert shell.on("a") is None
    shell.submit(alone("other", sample(model=DRAW)))
    assert shell.on("a") == sample(model=DRAW).task_id


def test_a_job_fails_only_when_no_machine_has_the_file_and_names_them_all() -> None:
    shell = on_nodes(a="node-1", b="node-2")
    shell.submit(alone("j", encode("cat")))
    assert shell.on("a") is not None
    shell.lacks("a", TEXT)
    assert shell.outcome("j") is None
    shell.lacks("b", TEXT)
    error = shell.error("j")
    assert error.kind is RunErrorKind.FILE_UNAVAILABLE
    for part in ("node-1", "node-2", "/models/text: no such file"):
        assert part in error.message


def test_unavailable_files_count_for_no_limit() -> None:
    """Nine machines without the file, one with it: the job succeeds there, though max_attempts is 3."""
    names = {f"w{number}": f"node-{number}" for number in range(10)}
    shell = on_nodes(**names)
    shell.submit(alone("j", encode("cat")))
    for _ in range(9):
        (name,) = shell.running
        shell.lacks(name, TEXT)
    (name,) = shell.running
    shell.finish(name)
    assert shell.outcome("j") is Outcome.SUCCEEDED


def test_a_file_that_was_copied_later_is_found() -> None:
    """With new work after some seconds, and for waiting work after a minute."""
    shell = on_nodes(a="node-1")
    shell.submit(alone("j", encode("cat")))
    shell.lacks("a", TEXT)
    assert shell.outcome("j") is Outcome.FAILED
    shell.submit(alone("soon", encode("cat")))
    assert shell.outcome("soon") is Outcome.FAILED, "nobody can have copied it yet"
    shell.tick(RETRY_SECONDS)
    shell.submit(alone("later", encode("cat")))
    shell.finish("a")
    assert shell.outcome("later") is Outcome.SUCCEEDED
    assert not shell.state.costs.nodes.lacking

    shell = on_nodes(a="node-1")
    shell.submit(alone("j", encode("cat")))
    shell.want("a", "b")  # one that may start elsewhere
    shell.lacks("a", TEXT)
    assert shell.outcome("j") is None
    assert shell.on("a") is None
    while shell.on("a") is None and shell.at < 3 * UNAVAILABLE_SECONDS:
        shell.tick_comes()
    assert shell.on("a") == encode("cat").task_id


def test_the_last_machine_with_a_file_is_lost() -> None:
    """Its worker may start on another machine, so the job waits; when that lacks the file too, the job fails."""
    shell = on_nodes(a="bare", b="full")
    shell.submit(image("j"))
    shell.lacks("a", TEXT)
    shell.lose("b", LossCause.NODE_LOST)
    assert shell.outcome("j") is None
    assert shell.on("a") is None
    shell.come_up("b", node="bare")
    assert shell.outcome("j") is Outcome.FAILED
    assert shell.error("j").kind is RunErrorKind.FILE_UNAVAILABLE


def test_resident_weights_need_no_file() -> None:
    """1. a has the weights on its GPU. 2. Its machine lacks the file by now. 3. It still runs resident models."""
    shell = on_nodes(a="node-1")
    shell.submit(alone("first", encode("cat")))
    shell.finish("a")
    node = shell.state.costs.nodes.nodes["node-1"]
    node.lacks([(TEXT, ANY_FILE)], "/models/text: no such file", shell.at)
    shell.submit(alone("second", encode("dog")))
    assert shell.on("a") == encode("dog").task_id


def test_a_worker_that_refuses_runs_of_resident_weights_gets_no_more_of_them() -> None:
    """Found with a model file that was deleted under a pool: workers look at the files of each run, also of weights on
    their GPUs. The task ran a thousand times in some seconds, since a resident model seemed to need no file."""
    shell = on_nodes(a="node-1", b="node-1")
    for name, prompt in (("a", "cat"), ("b", "dog")):
        shell.submit(alone(name, encode(prompt)))
    shell.finish("a")
    shell.finish("b")
    shell.submit(alone("j", encode("owl")))
    (name,) = shell.running
    shell.lacks(name, TEXT)
    assert not shell.running, "the other worker of the machine would refuse it, too"
    assert shell.error("j").kind is RunErrorKind.FILE_UNAVAILABLE
    shell.tick(RETRY_SECONDS)
    shell.submit(alone("later", encode("owl")))
    (name,) = shell.running
    shell.finish(name)
    assert shell.outcome("later") is Outcome.SUCCEEDED
    assert not shell.state.costs.nodes.lacking


def test_refused_resident_weights_wait_for_a_machine_with_the_file() -> None:
    """Both have the weights; on one machine the file is deleted."""
    shell = on_nodes(a="bare", b="full")
    for name, prompt in (("a", "cat"), ("b", "dog")):
        shell.submit(alone(name, encode(prompt)))
    shell.finish("a")
    shell.finish("b")
    shell.submit(alone("first", encode("owl")))
    shell.submit(alone("second", encode("fox")))
    shell.lacks("a", TEXT)
    for _ in range(2):
        assert shell.on("a") is None
        shell.finish("b")
    assert {shell.outcome("first"), shell.outcome("second")} == {Outcome.SUCCEEDED}


def test_external_losses_reject_no_task_and_give_up_no_worker() -> None:
    """Far more losses than crash_limit, max_attempts and start_retry_limit allow for crashes."""
    for cause in (LossCause.NODE_LOST, LossCause.PREEMPTED, LossCause.KILLED):
        shell = Shell(SchedulerConfig(crash_limit=1, max_attempts=2, start_retry_limit=2, story_length=None))
        shell.workers(a=64)
        shell.submit(alone("j", encode("cat")))
        for _ in range(12):
            assert shell.on("a") is not None, cause
            shell.lose("a", cause)
            shell.come_up("a")
        shell.finish("a")
        assert shell.outcome("j") is Outcome.SUCCEEDED, cause
        assert shell.state.demand.jobs == {}


def test_repeated_external_losses_slow_down_the_next_start() -> None:
    shell = Shell(SchedulerConfig(start_backoff_seconds=1.0))
    shell.workers(a=64)
    delays = []
    for _ in range(4):
        commands = shell.lose("a", LossCause.KILLED)
        delays += [command.delay_seconds for command in commands if isinstance(command, StartWorker)]
        shell.come_up("a")
    assert delays == [0.0, 1.0, 2.0, 4.0]


def test_a_suspected_task_runs_alone_before_it_is_rejected() -> None:
    """Two runs that several tasks shared ended with their workers: none of them is rejected before a run alone."""
    shell = Shell(SchedulerConfig(crash_limit=1, batch_limit=4, story_length=None))
    shell.workers(a=64)
    given = encode("cat").task_id
    shell.submit(alone("text", encode("cat")))
    shell.finish("a")
    for number in range(4):
        shell.submit(alone(f"j{number}", sample(given, seed=number), given=(given,)))
    crashes = 0
    while shell.running and crashes < 8:
        members = shell.running[WorkerId("a")].members
        if any("s:paint:2" in run.command.task_id for run in members):
            crashes += 1
            shell.lose("a")
            shell.come_up("a")
        else:
            shell.finish("a")
    outcomes = [shell.outcome(f"j{number}") for number in range(4)]
    assert outcomes == [Outcome.SUCCEEDED, Outcome.SUCCEEDED, Outcome.FAILED, Outcome.SUCCEEDED]


def test_a_drained_machine_starts_only_what_ends_before_its_deadline() -> None:
    """Samples take 10 s, encodes 1 s: with 8 s left the encode starts there and the sample waits for the other."""
    shell = on_nodes(a="spot", b="stable")
    given = encode("cat").task_id
    for name in ("first", "second"):
        shell.submit(alone(name, sample(given, seed=len(name)), given=(given,)))
    for name in ("a", "b"):
        shell.finish(name, cost=RunCost(run_seconds=10.0))
    shell.submit(alone("text", encode("dog")))
    for name in list(shell.running):
        shell.finish(name, cost=RunCost(run_seconds=1.0))
    shell.drain("spot", 8.0)
    shell.submit(alone("long", sample(given, seed=100), given=(given,)))
    assert shell.on("a") is None
    assert shell.on("b") == sample(given, seed=100).task_id
    shell.submit(alone("longer", sample(given, seed=101), given=(given,)))
    shell.submit(alone("short", encode("owl")))
    assert shell.on("a") == encode("owl").task_id


def test_nothing_of_unknown_length_starts_on_a_drained_machine() -> None:
    shell = on_nodes(a="spot")
    shell.drain("spot", 3600.0)
    shell.submit(alone("j", encode("cat")))
    assert shell.on("a") is None
    assert shell.outcome("j") is None
    shell.drain("spot", inf)
    assert shell.on("a") == encode("cat").task_id


def test_a_drained_worker_starts_elsewhere_at_the_deadline() -> None:
    """The next incarnation may wait for a machine; its losses count for nothing."""
    shell = on_nodes(a="spot")
    shell.drain("spot", 5.0)
    while shell.tick_due is not None and WorkerId("a") in shell.up:
        shell.tick_comes()
    assert WorkerId("a") not in shell.up
    assert [incarnation for _, incarnation in shell.starting] == [2]
    shell.come_up("a", node="other")
    shell.submit(alone("j", encode("cat")))
    shell.finish("a")
    assert shell.outcome("j") is Outcome.SUCCEEDED


def test_a_worker_that_starts_on_a_drained_machine_is_restricted_too() -> None:
    shell = Shell(SchedulerConfig(story_length=None))
    shell.want("a")
    shell.drain("spot", 3600.0)
    shell.come_up("a", node="spot")
    shell.submit(alone("j", sample(model=PAINT)))
    assert shell.on("a") is None


def test_a_worker_that_is_busy_at_the_deadline_leaves_after_its_run() -> None:
    """Found by a review: it became idle without a tick, and took work again when the notice was forgotten."""
    shell = on_nodes(a="spot")
    shell.submit(alone("j", encode("cat")))
    shell.drain("spot", 1.0)
    while shell.tick_due is not None and shell.tick_due < shell.at + 30.0:
        shell.tick_comes()
    shell.tick(5.0)
    assert shell.on("a") == encode("cat").task_id
    shell.finish("a")
    assert WorkerId("a") not in shell.up
    assert [incarnation for _, incarnation in shell.starting] == [2]


def test_a_file_that_is_unavailable_on_no_known_machine_counts_as_a_failure() -> None:
    """Found by a review: nothing records it, so the same worker would try forever."""
    shell = Shell(SchedulerConfig(max_attempts=3, story_length=None))
    shell.workers(a=64)
    shell.submit(alone("j", encode("cat")))
    for _ in range(3):
        assert shell.outcome("j") is None
        shell.lacks("a", TEXT)
    assert shell.error("j").kind is RunErrorKind.FILE_UNAVAILABLE
