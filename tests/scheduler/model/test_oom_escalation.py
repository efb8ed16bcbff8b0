"""The upper rungs of the ladder: another worker, a new process, quarantine; decided, and taken by the core."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelpool.pool.values.specs.spec import JobId, OomStep, RunErrorKind, TaskId, WorkerId
from modelpool.scheduler.core.recovery import MOST_KEYS, PIN_SECONDS, RULES, Quarantine, RetryRule
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import ComponentsKnown, EndWorker, Outcome, RunTask, ScheduleTick, StartWorker
from modelpool.scheduler.model.oom_escalation import (
    ESCALATION_STEPS,
    EscalationStep,
    EscalationTarget,
    MemoryFailure,
    join_steps,
    next_step,
)
from modelpool.scheduler.model.workers import WorkerState
from tests.scheduler.world import COMPONENTS, Shell, alone, encode, sample

A, B, C = (WorkerId(name) for name in "abc")
VRAM, HOST = RunErrorKind.OUT_OF_VRAM, RunErrorKind.OUT_OF_HOST_MEMORY


def failures(*names: WorkerId, kind: RunErrorKind = VRAM) -> list[MemoryFailure]:
    return [MemoryFailure(kind, name, 64, number + 1) for number, name in enumerate(names)]


def test_every_kind_that_climbs_has_a_ladder_that_ends_in_quarantine() -> None:
    assert set(ESCALATION_STEPS) == {kind for kind, rule in RULES.items() if rule is RetryRule.ESCALATE}
    assert all(oom_steps[-1] is OomStep.QUARANTINE for oom_steps in ESCALATION_STEPS.values())


@pytest.mark.parametrize(
    ("kind", "failed", "offered", "taken", "left", "expected"),
    [
        (VRAM, [A], {A: 64, B: 64}, [], 2, EscalationStep(OomStep.OTHER_WORKER, B)),
        (VRAM, [A], {A: 64, B: 32, C: 48}, [], 2, EscalationStep(OomStep.OTHER_WORKER, C)),  # the one with most memory
        (VRAM, [A], {A: 64}, [], 2, EscalationStep(OomStep.RECYCLE, A)),
        (VRAM, [A, B], {A: 64, B: 32}, [OomStep.OTHER_WORKER], 1, EscalationStep(OomStep.RECYCLE, A)),  # largest
        (VRAM, [A, B], {A: 64, B: 64}, [OomStep.OTHER_WORKER], 1, EscalationStep(OomStep.RECYCLE, B)),  # the last
        (VRAM, [A], {A: 64, B: 64}, [], 1, EscalationStep(OomStep.RECYCLE, A)),  # the last attempt is for a new process
        (VRAM, [A], {B: 64}, [], 1, EscalationStep(OomStep.OTHER_WORKER, B)),
        (VRAM, [A], {}, [], 2, EscalationStep(None)),
        (VRAM, [A], {A: 64, B: 64}, [], 0, EscalationStep(OomStep.QUARANTINE)),
        (VRAM, [A, A], {A: 64, B: 64}, [OomStep.RECYCLE], 5, EscalationStep(OomStep.QUARANTINE)),
        (HOST, [A], {A: 64, B: 64}, [], 2, EscalationStep(OomStep.RECYCLE, A)),
        (HOST, [A, A], {A: 64, B: 64}, [OomStep.RECYCLE], 1, EscalationStep(OomStep.QUARANTINE)),
    ],
)  # fmt: skip
def test_the_next_rung(kind, failed, offered, taken, left, expected) -> None:
    candidates = [EscalationTarget(name, capacity, 0.0) for name, capacity in offered.items()]
    assert next_step(failures(*failed, kind=kind), candidates, taken, left) == expected


def test_of_equal_workers_the_one_that_is_free_first_is_asked() -> None:
    candidates = [EscalationTarget(A, 64, 0.0), EscalationTarget(B, 64, None), EscalationTarget(C, 64, 5.0)]
    assert next_step(failures(A), candidates, [], 2) == EscalationStep(OomStep.OTHER_WORKER, C)


def test_a_worker_that_repeats_what_it_was_sent_with_is_not_counted_twice() -> None:
    before, told = (OomStep.DROP_CACHES, OomStep.OTHER_WORKER), (OomStep.DROP_CACHES,)
    assert join_steps(before, before + told) == join_steps(before, told) == before + told


def test_a_task_that_runs_out_of_memory_goes_to_the_largest_other_worker_and_waits_for_it(shell: Shell) -> None:
    """1. a runs out of memory; c is idle, b is larger and busy. 2. Nothing starts. 3. b is free: it goes there."""
    shell.workers(a=64)
    shell.submit(alone("j", sample()))
    shell.want("a", "b", "c")
    shell.come_up("b", 70)
    shell.submit(alone("k", encode("dog")))
    assert shell.on("b") == encode("dog").task_id
    shell.come_up("c", 64)
    commands = shell.finish("a", VRAM, oom_steps=(OomStep.DROP_CACHES,))
    assert not any(isinstance(c, RunTask) for c in commands)
    shell.finish("b")
    run = shell.running[B].command
    assert (run.task_id, run.fresh) == (sample().task_id, True)
    assert run.oom_steps == (OomStep.DROP_CACHES, OomStep.OTHER_WORKER)
    notes = [line.note for line in shell.state.story(JobId("j"))]
    assert any("another worker: b" in note for note in notes)


def test_without_another_worker_the_process_is_started_anew(shell: Shell) -> None:
    """1. The only worker runs out of memory. 2. It is ended and started. 3. The task runs there; that is no failure."""
    shell.workers(a=64)
    shell.submit(alone("j", sample()))
    commands = shell.finish("a", VRAM)
    assert commands == [EndWorker(A, 1), StartWorker(A, 2, 0.0), ScheduleTick(PIN_SECONDS)]
    assert shell.state.worker_table.workers[A].failures == 0
    shell.submit(alone("little", encode("dog")))
    shell.come_up("a")
    assert shell.on("a") == sample().task_id
    assert shell.running[A].command.fresh
    shell.finish("a")
    shell.finish("a")
    assert shell.outcome("j") is shell.outcome("little") is Outcome.SUCCEEDED


def test_a_worker_that_had_failed_often_gets_one_start_when_it_is_recycled() -> None:
    """Found by the state machine: 1. a appeared anew twice, which is its limit. 2. It is recycled. 3. Its start fails:
    only then it is given up."""
    shell = Shell(SchedulerConfig(start_retry_limit=2))
    shell.workers(a=64)
    shell.introduce("a", 2, 64)
    shell.introduce("a", 3, 64)
    shell.submit(alone("j", sample()))
    shell.finish("a", VRAM)
    assert shell.state.worker_table.workers[A].status is WorkerState.STARTING
    shell.fail_start("a")
    assert shell.state.worker_table.workers[A].status is WorkerState.GIVEN_UP


def test_the_last_rung_is_quarantine_and_tells_the_whole_story() -> None:
    shell = Shell(SchedulerConfig(max_attempts=3))
    shell.workers(a=64, b=32)
    shell.submit(alone("poison", sample()))
    shell.finish("b", VRAM) if shell.on("b") else shell.finish(
        "a", VRAM, oom_steps=(OomStep.DROP_CACHES, OomStep.STREAM_MORE)
    )
    shell.finish("b", VRAM)
    shell.come_up("a")
    shell.finish("a", VRAM)
    error = shell.error("poison")
    assert error.kind is VRAM
    assert error.oom_steps == (
        OomStep.DROP_CACHES,
        OomStep.STREAM_MORE,
        OomStep.OTHER_WORKER,
        OomStep.RECYCLE,
        OomStep.QUARANTINE,
    )
    for part in (sample().task_id, "attempt 1 on a", "64 B", "attempt 2 on b", "32 B", "attempt 3 on a", "stream more",
                 "another worker", "recycle the process", "4 B of activations", "smaller", "it ended as"):  # fmt: skip
        assert part in error.message, part
    shell.submit(alone("fine", encode("dog")))
    shell.finish(next(iter(shell.running)))
    assert shell.outcome("fine") is Outcome.SUCCEEDED


def poisoned(capacity: int = 64, **limits) -> Shell:
    """A pool of one worker, in which samples of the first seed were quarantined."""
    shell = Shell(SchedulerConfig(**limits))
    shell.workers(a=capacity)
    shell.submit(alone("poison", sample()))
    shell.finish("a", VRAM)
    shell.come_up("a", capacity)
    shell.finish("a", VRAM)
    assert shell.outcome("poison") is Outcome.FAILED
    return shell


def test_equal_work_is_refused_at_once_and_other_work_is_not() -> None:
    shell = poisoned()
    assert not any(isinstance(c, RunTask) for c in shell.submit(alone("same size", sample(seed=1))))
    assert "is refused" in shell.error("same size").message
    assert shell.error("same size").oom_steps == (OomStep.QUARANTINE,)
    shell.submit(alone("smaller", sample(activation_bytes=2)))
    assert shell.on("a") == sample(activation_bytes=2).task_id


def test_quarantine_ends_after_its_time() -> None:
    shell = poisoned(quarantine_seconds=100.0)
    shell.tick(100.0)
    shell.submit(alone("later", sample()))
    assert shell.on("a") == sample().task_id


@pytest.mark.parametrize(("capacity", "refused"), [(64, True), (65, False)])
def test_quarantine_ends_when_a_larger_worker_comes_up(capacity: int, refused: bool) -> None:
    shell = poisoned()
    shell.want("a", "b")
    shell.come_up("b", capacity)
    shell.submit(alone("later", sample()))
    assert (shell.outcome("later") is Outcome.FAILED) == refused


def test_where_such_work_ran_well_before_only_the_very_task_is_refused() -> None:
    """Some prompt or seed may be special; what has its sizes is not."""
    shell = Shell()
    shell.workers(a=64)
    shell.submit(alone("first", sample(seed=5)))
    shell.finish("a")
    shell.submit(alone("poison", sample()))
    shell.finish("a", VRAM)
    shell.come_up("a")
    shell.finish("a", VRAM)
    shell.submit(alone("sibling", sample(seed=1)))
    assert shell.on("a") == sample(seed=1).task_id
    shell.submit(alone("poison again", sample()))
    assert shell.outcome("poison again") is Outcome.FAILED


def test_what_waited_already_has_one_attempt_and_its_success_lifts_the_quarantine() -> None:
    """1. Three equal samples wait. 2. The first goes all the way up. 3. The second fails once. 4. The third
    runs well: the next is taken in again."""
    shell = Shell()
    shell.workers(a=64)
    for seed in range(3):
        shell.submit(alone(f"j{seed}", sample(seed=seed)))
    shell.finish("a", VRAM)
    shell.come_up("a")
    shell.finish("a", VRAM)
    assert shell.on("a") == sample(seed=1).task_id
    commands = shell.finish("a", VRAM)
    assert shell.outcome("j1") is Outcome.FAILED
    assert not any(isinstance(c, EndWorker) for c in commands)
    shell.finish("a")
    assert shell.outcome("j2") is Outcome.SUCCEEDED
    shell.submit(alone("later", sample(seed=3)))
    assert shell.on("a") == sample(seed=3).task_id


def test_quarantine_remembers_so_many_and_no_more() -> None:
    quarantine = Quarantine(10.0)
    for number in range(MOST_KEYS + 1):
        quarantine.add(number, 0.0, 64, VRAM, "why")
    assert len(quarantine) == MOST_KEYS
    assert quarantine.refusal([0], 0.0) is None
    assert quarantine.refusal([MOST_KEYS], 0.0) is not None


def test_a_task_does_not_wait_for_a_worker_that_is_no_longer_wanted(shell: Shell) -> None:
    """1. It failed on a and waits for b, which is busy. 2. b is to end. 3. It runs where there is room."""
    shell.workers(a=64, b=64)
    shell.submit(alone("j", sample()))
    shell.submit(alone("k", encode("dog")))
    first = next(name for name in "ab" if shell.on(name) == sample().task_id)
    shell.finish(first, VRAM)
    assert shell.on(first) is None
    shell.want(first)
    assert shell.on(first) == sample().task_id


def test_host_memory_is_met_by_a_new_process_at_once(shell: Shell) -> None:
    shell.workers(a=64, b=64)
    shell.submit(alone("j", sample()))
    first = next(iter(shell.running))
    commands = shell.finish(first, HOST)
    assert [type(c) for c in commands] == [EndWorker, StartWorker, ScheduleTick]


def test_nobody_waits_for_ever_for_one_worker(shell: Shell) -> None:
    """Found in a review: 1. a ran out of memory; b is busy, and its run never ends. 2. It is waited for, in vain.
    3. Any worker will do."""
    shell.workers(a=64)
    shell.submit(alone("j", sample()))
    shell.want("a", "b")
    shell.come_up("b", 70)
    shell.submit(alone("hangs", encode("dog")))
    shell.finish("a", VRAM)
    assert shell.on("a") is None
    shell.at += PIN_SECONDS - 1
    shell.tick_comes()
    assert shell.on("a") == sample().task_id
    assert OomStep.OTHER_WORKER not in shell.running[A].command.oom_steps, "it was not carried out"


def test_a_worker_that_is_not_up_is_not_waited_for(shell: Shell) -> None:
    """Found in a review: a start that the cluster has no room for never answers."""
    shell.workers(a=64, b=70)
    shell.submit(alone("j", sample()))
    shell.submit(alone("k", encode("dog")))
    shell.lose("b")
    lost, other = ("j", "k") if shell.on("a") == encode("dog").task_id else ("k", "j")
    shell.finish("a", VRAM if other == "j" else None)
    assert shell.state.worker_table.workers[WorkerId("b")].status is WorkerState.STARTING
    assert all(task.pinned_to != "b" for task in shell.state.demand.tasks.values()), (lost, other)


def test_a_sick_worker_is_given_up_and_fails_no_job() -> None:
    """Found in a review: two losses on one worker quarantined good tasks, and were forgiven to it."""
    shell = Shell(SchedulerConfig(start_retry_limit=4))
    shell.workers(sick=64, well=64)
    for number in range(8):
        shell.submit(alone(f"j{number}", sample(seed=number)))
        while shell.running:
            if shell.on("sick"):
                shell.lose("sick")
                if any(key[0] == "sick" for key in shell.starting):
                    shell.come_up("sick", 64)
            else:
                shell.finish("well")
    assert all(shell.outcome(f"j{number}") is Outcome.SUCCEEDED for number in range(8))
    assert shell.state.worker_table.workers[WorkerId("sick")].status is not WorkerState.BUSY


def test_losses_on_one_worker_count_once_while_another_is_up(shell: Shell) -> None:
    """1. j is lost with a; b is busy for long. 2. It is lost with a again. 3. It is not quarantined: b has not told."""
    shell.workers(b=64)
    shell.submit(alone("holds", encode("dog")))
    shell.want("a", "b")
    shell.come_up("a", 64)
    shell.submit(alone("j", sample()))
    for _ in range(2):
        assert shell.on("a") == sample().task_id
        shell.lose("a")
        shell.come_up("a", 64)
        shell.at += PIN_SECONDS
        shell.feed(ComponentsKnown(shell.tick(), COMPONENTS))
    assert shell.outcome("j") is None


@pytest.mark.parametrize("limits", [{"max_attempts": 1}, {"crash_limit": 1}, {}])
def test_bad_jobs_do_not_end_a_pool_of_one_worker(limits: dict[str, int]) -> None:
    """Found in a review: losses that ended a job by the limit on attempts were not forgiven."""
    shell = Shell(SchedulerConfig(**limits))
    shell.workers(a=64)
    for number in range(8):
        shell.submit(alone(f"poison {number}", sample(seed=number)))
        while shell.running:
            shell.lose("a")
            shell.come_up("a", 64)
        assert shell.outcome(f"poison {number}") is Outcome.FAILED
    shell.submit(alone("fine", encode("dog")))
    shell.finish("a")
    assert shell.outcome("fine") is Outcome.SUCCEEDED


def test_jobs_that_are_cancelled_and_crash_do_not_end_a_pool_of_one_worker() -> None:
    """Found in a review."""
    shell = Shell()
    shell.workers(a=64)
    for number in range(8):
        shell.submit(alone(f"poison {number}", sample(seed=number)))
        shell.cancel(f"poison {number}")
        shell.lose("a")
        shell.come_up("a", 64)
    assert shell.state.worker_table.workers[A].status is WorkerState.IDLE


def test_a_crasher_stays_quarantined_while_a_worker_was_never_up() -> None:
    """Found in a review: it was filed for a pool without memory, and any worker was larger."""
    shell = Shell(SchedulerConfig(crash_limit=1))
    shell.workers(a=64)
    shell.want("a", "never")
    shell.submit(alone("poison", sample()))
    shell.lose("a")
    shell.come_up("a", 128)
    assert not any(isinstance(c, RunTask) for c in shell.submit(alone("again", sample())))
    assert "is refused" in shell.error("again").message


def test_a_corrected_figure_is_the_same_work() -> None:
    """Found in a review: what ran well under one figure was refused under the next."""
    shell = Shell(SchedulerConfig(max_attempts=2))
    shell.workers(a=64)
    counted = replace(sample(), counted_bytes=sample().activation_bytes)
    shell.submit(alone("well", counted))
    shell.finish("a")
    corrected = replace(counted, task_id=TaskId("s:2"), activation_bytes=counted.activation_bytes + 1)
    shell.submit(alone("hungry", corrected))
    shell.finish("a", VRAM)
    shell.come_up("a", 64)
    shell.finish("a", VRAM)
    assert shell.outcome("hungry") is Outcome.FAILED
    other = replace(corrected, task_id=TaskId("s:3"), activation_bytes=counted.activation_bytes + 2)
    assert any(isinstance(c, RunTask) for c in shell.submit(alone("next", other)))


def test_two_poison_tasks_do_not_end_a_pool_with_one_worker() -> None:
    """Found by reading: five losses in a row gave the only worker up, however few tasks they were due to."""
    shell = Shell(SchedulerConfig(start_retry_limit=3))
    shell.workers(a=64)
    for name in ("p1", "p2", "p3"):
        shell.submit(alone(name, encode(name)))
    for _ in range(6):
        shell.lose("a")
        shell.come_up("a")
    for name in ("p1", "p2", "p3"):
        assert shell.error(name).kind is RunErrorKind.WORKER_LOST
        assert "quarantined" in shell.error(name).message
    assert shell.state.worker_table.workers[A].failures == 0
    shell.submit(alone("p1 again", encode("p1")))
    assert shell.outcome("p1 again") is Outcome.FAILED
    shell.submit(alone("fine", encode("dog")))
    shell.finish("a")
    assert shell.outcome("fine") is Outcome.SUCCEEDED


def test_a_worker_that_was_given_up_for_a_poison_task_comes_back() -> None:
    shell = Shell(SchedulerConfig(start_retry_limit=2, crash_limit=2))
    shell.workers(a=64)
    shell.submit(alone("poison", encode("cat")))
    shell.lose("a")
    shell.come_up("a")
    shell.lose("a")
    assert shell.outcome("poison") is Outcome.FAILED
    assert [key[0] for key in shell.starting] == ["a"]


def test_a_worker_that_reports_its_own_loss_is_ended_and_the_task_runs_again(shell: Shell) -> None:
    shell.workers(a=64)
    shell.submit(alone("j", encode("cat")))
    assert shell.finish("a", RunErrorKind.WORKER_LOST) == [EndWorker(A, 1), StartWorker(A, 2, 0.0)]
    shell.come_up("a")
    shell.finish("a")
    assert shell.outcome("j") is Outcome.SUCCEEDED
