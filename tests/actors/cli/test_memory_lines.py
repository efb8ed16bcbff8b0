"""What people are told at the end: which runs were divided, what helped against running out, and which resumed."""

from __future__ import annotations

from dataclasses import replace

from modelpool.actors.cli.run.run_jobs import memory_lines, resumed_lines
from modelpool.actors.outputs.results.outcomes import TaskSummary
from modelpool.pool.values.specs.spec import ExecutionMode, Stage, WorkerId


def task(stage: Stage, divided: str = "", rungs: tuple[str, ...] = (), shared: bool = False) -> TaskSummary:
    return TaskSummary(stage, WorkerId("gpu-0"), 1.0, 0.0, True, 0, 0, 0, shared, divided, rungs)


def test_nothing_is_said_of_ordinary_runs() -> None:
    assert memory_lines([task(Stage.ENCODE), task(Stage.SAMPLE), task(Stage.DECODE)]) == []


def test_equal_divisions_and_rungs_are_counted_together_and_shared_runs_once() -> None:
    tiles = ExecutionMode(1, tile=24).words
    rungs = ("drop caches", "stream more")
    tasks = [task(Stage.DECODE, tiles), task(Stage.DECODE, tiles, rungs), task(Stage.DECODE, tiles, shared=True)]
    tasks.append(task(Stage.SAMPLE, ExecutionMode(1, batch=1).words))
    assert memory_lines(tasks) == [
        "decode by tiles of 24: 2 runs, due to limited GPU memory",
        "sample by 1 at a time: 1 run, due to limited GPU memory",
        "out of GPU memory in 1 run; resolved by: drop caches, stream more",
    ]


def test_runs_that_resumed_are_counted_by_step() -> None:
    plain = task(Stage.SAMPLE)
    late, early = replace(plain, resumed="after step 60 of 100"), replace(plain, resumed="after step 2 of 100")
    assert resumed_lines([task(Stage.ENCODE), plain, late, early, late, replace(late, shared=True)]) == [
        "resumed after step 60 of 100: 2 runs",
        "resumed after step 2 of 100: 1 run",
    ]
