"""A worker that begins the next task while it still decodes is lost: either may be the cause, until each has run alone.

Found in an audit: the decode counted as the cause and the task behind it as not started, so that a task that ends its
worker cost one decode after the other their attempts.
"""

from __future__ import annotations

from dataclasses import replace

from modelpool.pool.values.specs.spec import ComponentUse, JobId, JobSpec, RunCost, RunErrorKind, TaskId, TaskSpec
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Outcome
from tests.scheduler.world import DRAW, Shell, alone, decode, encode, image

POISON = encode("poison")


def decoding(seed: int) -> TaskSpec:
    return decode(TaskId(f"given:{seed}"))


def upscaling(need: TaskId) -> TaskSpec:
    """Another task of the stage that makes pixels, which never goes on behind the next one."""
    return replace(decode(need), task_id=TaskId(f"u:{need}"), uses=(ComponentUse(DRAW, 1),), together="u")


def pool(overlaps_decode: bool = True, **config) -> Shell:
    """A worker that has the weights of images, and knows how long the runs take."""
    shell = Shell(SchedulerConfig(story_length=None, send_ahead_seconds=60.0, **config))
    shell.overlaps_decode = overlaps_decode
    shell.want("a")
    shell.come_up("a")
    shell.submit(image("first", "first"))
    finish_all(shell)
    return shell


def finish_all(shell: Shell) -> None:
    while shell.running:
        shell.finish("a", cost=RunCost(run_seconds=shell.tasks[shell.running["a"].command.task_id].run_seconds))


def submit(shell: Shell, *tasks: TaskSpec) -> None:
    for task in tasks:
        shell.submit(alone(task.task_id, task, given=task.needs))


def queue(shell: Shell) -> list[TaskId]:
    return [command.task_id for command in shell.queued.get("a", [])]


def blamed(shell: Shell) -> dict[TaskId, tuple[int, bool]]:
    """The failures of the live tasks, and whether they have to run alone."""
    return {name: (task.failures, task.alone) for name, task in shell.state.demand.tasks.items()}


def test_what_may_have_started_behind_a_decode_is_blamed_as_the_decode_is() -> None:
    one, other, third, last = decoding(1), decoding(2), encode("dog"), encode("bird")
    free, counted, together = (0, False), (1, False), (0, True)
    for overlaps, expected in ((True, (together, together, free)), (False, (counted, free, free))):
        shell = pool(overlaps)
        submit(shell, one, POISON, other)
        assert (shell.on("a"), queue(shell)) == (one.task_id, [POISON.task_id, other.task_id])
        shell.lose("a")
        assert tuple(blamed(shell).values()) == expected, "a decode waits for another one"
    shell = pool()
    submit(shell, one, POISON, third, other, last)
    shell.finish("a")
    shell.lose("a")
    assert blamed(shell)[POISON.task_id] == (1, False), "the decode was over"
    assert not any(alone for _, alone in blamed(shell).values())


def test_all_tasks_up_to_the_next_decode_may_have_started() -> None:
    """Short ones may begin and end while a video is decoded."""
    shell, tasks = pool(), [decoding(1), POISON, encode("dog"), decoding(2), encode("bird")]
    submit(shell, *tasks)
    assert queue(shell) == [task.task_id for task in tasks[1:]]
    shell.lose("a")
    assert [blamed(shell)[task.task_id] for task in tasks] == [(0, True)] * 3 + [(0, False)] * 2


def test_an_upscale_may_start_while_another_image_is_decoded() -> None:
    """Found in a review: it counted as a decode, which waits for the one before it."""
    poison, decoded = upscaling(TaskId("given:9")), decoding(1)
    shell = pool()
    submit(shell, upscaling(TaskId("given:8")))
    finish_all(shell)
    submit(shell, decoded, poison, encode("dog"), decoding(2))
    assert queue(shell) == [poison.task_id, encode("dog").task_id, decoding(2).task_id]
    shell.lose("a")
    assert list(blamed(shell).values()) == [(0, True)] * 3 + [(0, False)]


def test_what_reads_the_decoded_image_has_not_started_before_its_end() -> None:
    shell = pool()
    submit(shell, upscaling(TaskId("given:8")))
    finish_all(shell)
    decoded = decoding(1)
    enlarged = upscaling(decoded.task_id)
    shell.submit(JobSpec(JobId("both"), (decoded, enlarged), enlarged.task_id, decoded.needs))
    assert (shell.on("a"), queue(shell)) == (decoded.task_id, [enlarged.task_id])
    shell.lose("a")
    assert blamed(shell) == {decoded.task_id: (1, False), enlarged.task_id: (0, False)}


def test_a_lost_device_that_a_decode_reports_may_be_the_fault_of_what_follows() -> None:
    """Errors of a device come late. In one stream, the run that reports one is the one that caused it."""
    for overlaps in (True, False):
        shell = pool(overlaps)
        submit(shell, decoding(1), POISON)
        shell.finish("a", RunErrorKind.WORKER_LOST)
        assert blamed(shell)[POISON.task_id] == (0, overlaps)


def test_tasks_that_ended_a_worker_together_run_alone_until_the_cause_is_known() -> None:
    shell = pool(crash_limit=2)
    submit(shell, decoding(1), POISON)
    shell.lose("a")
    submit(shell, decoding(2), encode("dog"))
    shell.submit(alone("urgent", decoding(3), priority=1, given=decoding(3).needs))
    while shell.outcome(POISON.task_id) is None:
        if "a" not in shell.running:
            shell.come_up("a")
        if shell.on("a") in (decoding(1).task_id, POISON.task_id):
            assert queue(shell) == []
        else:
            assert POISON.task_id not in queue(shell)
        if shell.on("a") == POISON.task_id:
            shell.lose("a")
        else:
            shell.finish("a", cost=RunCost(run_seconds=2.0))
    assert shell.outcome(POISON.task_id) is Outcome.FAILED
    assert not any(failures for failures, _ in blamed(shell).values())
    shell.come_up("a")
    finish_all(shell)
    assert {shell.outcome(task.task_id) for task in (decoding(1), decoding(2), encode("dog"))} == {Outcome.SUCCEEDED}
