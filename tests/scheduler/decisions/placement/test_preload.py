"""Which weights workers are told to bring beside their runs, and what the core assumes of it.

Proves, by dialogues with the core: what comes next is told when a run begins, and when a job comes in; its weights are
taken to be there as far as the run's time goes, which the report corrects; what follows from the run comes first; the
run keeps what it holds and what waits for the worker's weights keeps them; nothing is told where another worker has it
soon, beside a run that streams or of unknown length, nor what the machine would have to read; a half of a load counts
for half; nothing is told where a run hides little of a load, nor where that is switched off; why and story say so.
"""

from __future__ import annotations

import pytest

from modelpool.pool.values.specs.spec import ComponentKey, JobId, JobSpec, RunCost, RunErrorKind, TaskId, WorkerId
from modelpool.pool.weights.plan.eviction_plan import Residency, Resident
from modelpool.scheduler.decisions.costs.demand_rates import REMEMBERED
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Command, Preload, RunTask
from modelpool.scheduler.model.workers import Worker
from tests.scheduler.world import DRAW, PAINT, ROOMY, VAE, Shell, alone, decode, encode, sample

GIVEN = TaskId("given:1")


def job(name: str, model: ComponentKey, seed: int = 0) -> JobSpec:
    """One sample, which takes 10 s."""
    return alone(name, sample(GIVEN, model=model, seed=seed), given=(GIVEN,))


def learnt(*names: str, capacity: int = ROOMY, link: float = 4.0, config: SchedulerConfig | None = None) -> Shell:
    """Workers that have shown how long a sample takes, with nothing on them."""
    shell = Shell() if config is None else Shell(config)
    shell.want(*names)
    for name in names:
        shell.come_up(name, capacity, link)
    for seed, name in enumerate(names):
        shell.submit(job(f"first-{name}", (DRAW, PAINT)[seed % 2], seed=100 + seed))
    for name in list(shell.running):
        capacity_bytes = shell.up[name][1].capacity_bytes
        shell.finish(name, residency=Residency(capacity_bytes), cost=RunCost(run_seconds=10.0))
    return shell


def told(commands: list[Command]) -> list[Preload]:
    return [command for command in commands if isinstance(command, Preload)]


def worker(shell: Shell, name: str = "a") -> Worker:
    return shell.state.worker_table.workers[WorkerId(name)]


def test_a_job_that_comes_while_the_worker_runs_has_its_weights_brought() -> None:
    shell = learnt("a")
    shell.submit(job("one", DRAW))
    (ahead,) = told(shell.submit(job("two", PAINT)))
    assert (ahead.worker_id, ahead.task_ids) == ("a", (sample(GIVEN, model=PAINT).task_id,))
    assert worker(shell).entries[PAINT] == Resident(PAINT, 12), "it is taken to be there when the run is over"
    assert not told(shell.submit(job("three", PAINT, seed=1))), "it was told already"
    commands = shell.finish("a", cost=RunCost(run_seconds=10.0))
    (run,) = [command for command in commands if isinstance(command, RunTask)]
    assert run.why is not None
    assert (run.why.chosen.extra_seconds, run.why.ahead_bytes) == (0.0, 6)
    assert "6 B preloaded during the previous run" in run.why.words
    notes = [line.note for line in shell.state.story(JobId("two"))]
    assert any("preloaded to a during its run" in note for note in notes)


def test_what_waits_when_a_run_begins_is_told_then() -> None:
    shell = learnt("a")
    shell.submit(job("one", DRAW))
    shell.submit(job("two", PAINT))
    shell.submit(job("three", DRAW, seed=1))
    commands = shell.finish("a", residency=Residency(ROOMY, (Resident(DRAW, 10),)), cost=RunCost(run_seconds=10.0))
    # the report says that nothing came: it is told again beside the run of the resident one
    run = next(command for command in commands if isinstance(command, RunTask))
    if run.task_id == sample(GIVEN, model=DRAW, seed=1).task_id:
        (ahead,) = told(commands)
        assert ahead.task_ids == (sample(GIVEN, model=PAINT).task_id,)


def test_only_what_the_time_of_the_run_allows_is_taken_to_be_there() -> None:
    """Four seconds at 1 B/s are 4 of 6 B, which are 8 of 12 on the GPU."""
    shell = learnt("a", link=1.0)
    shell.submit(job("one", DRAW))
    end = worker(shell).expected_end
    assert end is not None
    shell.at = end - 5.0
    (ahead,) = told(shell.submit(job("two", PAINT)))
    assert worker(shell).entries[PAINT].resident_bytes == 8
    left = shell.state.costs.extra_seconds(
        sample(GIVEN, model=PAINT), shell.state.demand.tasks[ahead.task_ids[0]].cost_class, worker(shell)
    )
    assert left == 2.0, "the rest costs what the rest takes"


def test_the_report_says_what_really_came() -> None:
    shell = learnt("a")
    shell.submit(job("one", DRAW))
    assert told(shell.submit(job("two", PAINT)))
    residency = Residency(ROOMY, (Resident(DRAW, 10), Resident(PAINT, 4)))
    commands = shell.finish("a", RunErrorKind.INTERNAL, residency=residency)
    run = next(command for command in commands if isinstance(command, RunTask))
    if run.task_id == sample(GIVEN, model=PAINT).task_id:
        assert run.why is not None
        assert run.why.upload_bytes == 4, "a third is there"


def test_what_follows_from_the_run_comes_first() -> None:
    shell = learnt("a")
    first = sample(GIVEN, model=DRAW)
    second = decode(first.task_id)
    shell.submit(job("other", DRAW, seed=7))
    shell.submit(JobSpec(JobId("picture"), (first, second), second.task_id, (GIVEN,)))
    commands = shell.finish("a", cost=RunCost(run_seconds=10.0))
    run = next(command for command in commands if isinstance(command, RunTask))
    assert run.task_id == first.task_id
    (ahead,) = told(commands)
    assert ahead.task_ids == (second.task_id,)
    assert VAE in worker(shell).entries


def test_nothing_is_told_where_there_is_no_room_beside_the_run() -> None:
    """10 B of weights, 4 of activations, 2 of scratch and the margin leave nothing of 20 for 12 more."""
    shell = learnt("a", capacity=20)
    shell.submit(job("one", DRAW))
    commands = shell.submit(job("two", PAINT))
    for ahead in told(commands):
        assert worker(shell).entries[PAINT].resident_bytes < 12, ahead
    assert worker(shell).entries[DRAW].resident_bytes == 10


def test_what_another_worker_has_soon_is_left_to_it() -> None:
    shell = learnt("a", "b")
    shell.submit(job("one", DRAW))
    shell.submit(job("two", PAINT))
    assert {w.task_id is not None for w in shell.state.worker_table.workers.values()} == {True}
    assert not told(shell.submit(job("three", PAINT, seed=1))), "it is there, and free as soon"


def test_nothing_is_told_beside_a_run_of_unknown_length() -> None:
    shell = Shell()
    shell.workers(a=ROOMY)
    shell.submit(alone("one", encode("cat")))
    assert worker(shell).expected_end is None
    assert not told(shell.submit(job("two", PAINT)))


def test_nothing_is_told_beside_a_run_that_streams() -> None:
    shell = learnt("a", capacity=14)
    shell.submit(job("one", DRAW))
    assert worker(shell).expected_end is not None
    assert worker(shell).loaded_at is None
    assert not told(shell.submit(alone("two", encode("cat"))))


def test_a_worker_that_is_lost_has_nothing_that_was_brought() -> None:
    shell = learnt("a")
    shell.submit(job("one", DRAW))
    assert told(shell.submit(job("two", PAINT)))
    shell.lose("a")
    assert not worker(shell).preloaded
    shell.come_up("a")
    assert not worker(shell).preloaded.keys() - {t.cost_class for t in shell.state.demand.tasks.values()}
    assert PAINT not in worker(shell).entries or worker(shell).task_id is not None


def test_nothing_is_told_where_the_run_would_hide_little_of_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a load of 6 s the last second of a run hides a sixth, its last two a third. A quarter divides them; a small
    part is less than one of the bytes here."""
    monkeypatch.setattr("modelpool.scheduler.decisions.placement.preload.LEAST_PART", 0.25)
    for left_seconds, is_told in ((1.0, False), (2.0, True)):
        shell = learnt("a", link=1.0)
        shell.submit(job("one", DRAW))
        end = worker(shell).expected_end
        assert end is not None
        shell.at = end - left_seconds - 1.0  # a submission takes the next second
        assert bool(told(shell.submit(job("two", PAINT)))) is is_told


def test_nothing_is_told_where_that_is_switched_off() -> None:
    shell = learnt("a", config=SchedulerConfig(story_length=None, upload_ahead=False))
    shell.submit(job("one", DRAW))
    assert not told(shell.submit(job("two", PAINT)))
    assert not told(shell.finish("a", cost=RunCost(run_seconds=10.0)))


def needed_every(shell: Shell, component: ComponentKey, gap_seconds: float) -> None:
    """The component was needed for a moment every so many seconds, the last time just now."""
    for number in range(REMEMBERED, -1, -1):
        shell.state.costs.rates.arrived((component,), shell.at - number * gap_seconds)
        shell.state.costs.rates.ended((component,), shell.at - number * gap_seconds)


def brought_at_the_cost_of_vae(gap_seconds: float) -> bool:
    """Whether PAINT is preloaded where VAE has to leave for it, which was needed every `gap_seconds`. A load of VAE
    takes 3 s, and the rest of the run hides 2 s of PAINT's."""
    shell = learnt("a", capacity=22, link=1.0)
    there = Residency(22, (Resident(VAE, 3), Resident(DRAW, 10)))
    shell.submit(job("one", DRAW))
    shell.finish("a", residency=there, cost=RunCost(run_seconds=10.0))
    needed_every(shell, DRAW, 0.01)
    shell.submit(job("two", DRAW, seed=1))
    end = worker(shell).expected_end
    assert end is not None
    shell.at = end - 3.0
    needed_every(shell, VAE, gap_seconds)
    commands = shell.submit(job("three", PAINT))
    if told(commands):
        assert worker(shell).entries.get(VAE) != Resident(VAE, 3), "it has to make room"
    return bool(told(commands))


def test_a_preload_whose_victim_is_needed_first_is_refused() -> None:
    assert not brought_at_the_cost_of_vae(0.1)


def test_a_preload_that_pays_still_happens() -> None:
    assert brought_at_the_cost_of_vae(10_000.0)


def test_no_second_copy_that_no_task_waits_for() -> None:
    """The first worker begins to preload PAINT for the only task that waits for it: the second one, whose run ends at
    the same time, does not load it too. It does for more tasks than the first one can take by then."""
    for waiting, workers in ((1, 1), (40, 2)):
        shell = learnt("a", "b", link=1.0)
        for name in ("one", "two"):
            shell.submit(job(name, DRAW, seed=len(name) + ord(name[0])))
        assert {worker(shell, name).task_id is None for name in "ab"} == {False}
        commands: list[Command] = []
        for number in range(waiting):
            commands += shell.submit(job(f"p{number}", PAINT, seed=number))
        assert len({ahead.worker_id for ahead in told(commands)}) == workers, waiting
