"""One simulation over time, as what can be drawn.

Proves: the plot covers what happened, second for second; parts of slices never pass the whole; spans too short to be
seen are joined and nothing else.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.specs.spec import WorkerId
from modelpool.scheduler.simulator.metrics import figures
from modelpool.scheduler.simulator.timeline import GAP, timeline
from tests.simulation.test_metrics import Gpu, Run, World, small_world


def test_a_small_world_by_hand() -> None:
    drawn = timeline(small_world(), slices=4)
    assert drawn.seconds == 20.0
    spans = {(work.worker_id, work.model, work.begin, work.end) for work in drawn.works}
    assert spans == {
        ("a", None, 0.0, 2.0), ("a", "m", 2.0, 15.0), ("b", None, 2.0, 8.0), ("b", "m", 8.0, 20.0)
    }  # fmt: skip
    assert [(step.running, step.loading, step.unfinished) for step in drawn.steps] == [
        (0.3, 0.5, 4), (0.7, 0.3, 4), (1.0, 0.0, 1), (0.5, 0.0, 0)
    ]  # fmt: skip


WORK = st.lists(st.tuples(st.integers(0, 3), *[st.floats(0.0, 50.0, allow_subnormal=False)] * 3), max_size=25)


@given(WORK, st.integers(1, 4), st.integers(1, 30))
def test_slices_add_up_to_what_gpus_did(work: list[tuple[int, float, float, float]], count: int, slices: int) -> None:
    world = World([Gpu(WorkerId(f"g{n}")) for n in range(count)])
    free = [0.0] * count
    for number, (which, gap, load, run) in enumerate(work):
        gpu = which % count
        at = free[gpu] + gap
        free[gpu] = at + load + run
        world.add(f"j{number}", 0.0, free[gpu])
        world.runs.append(Run(f"j{number}", world.gpus[gpu].worker_id, at, load, run, model=f"m{number % 3}"))
    drawn, found = timeline(world, slices), figures(world)
    if drawn.seconds == 0.0:
        assert drawn.steps == ()
        return
    width = drawn.seconds / slices * count
    assert sum(step.running for step in drawn.steps) * width == pytest.approx(found.running_seconds)
    assert sum(step.loading for step in drawn.steps) * width == pytest.approx(found.loading_seconds)
    assert all(step.running + step.loading <= 1.0 + 1e-6 for step in drawn.steps)
    assert drawn.steps[-1].unfinished == 0
    covered = sum(span.end - span.begin for span in drawn.works)
    busy = found.running_seconds + found.loading_seconds
    assert busy - 1e-6 <= covered <= busy + len(work) * 2 * GAP * drawn.seconds + 1e-6
    assert drawn.models == tuple(sorted(drawn.models, key=lambda name: (-_ran(world, name), name)))


def _ran(world: World, model: str) -> float:
    return sum(run.run_seconds for run in world.runs if run.model == model)


def test_what_follows_closely_is_one_span_and_what_does_not_is_two() -> None:
    world = World([Gpu(WorkerId("g"))])
    world.add("j", 0.0, 5000.0)
    for at in (0.0, 1.5, 100.0):
        world.runs.append(Run("j", WorkerId("g"), at, 0.0, 1.0))
    assert [(span.begin, span.end) for span in timeline(world).works] == [(0.0, 2.5), (100.0, 101.0)]


def test_mates_of_a_batch_are_drawn_once() -> None:
    world = World([Gpu(WorkerId("g"))])
    world.add("j", 0.0, 8.0)
    mate = Run("j", WorkerId("g"), 0.0, 1.0, 3.0, batched=2, seconds=8.0)
    world.runs = [mate, mate]
    drawn = timeline(world, slices=2)
    assert [(span.model, span.begin, span.end) for span in drawn.works] == [(None, 0.0, 2.0), ("m", 2.0, 8.0)]
    assert [(step.loading, step.running) for step in drawn.steps] == [(0.5, 0.5), (0.0, 1.0)]
