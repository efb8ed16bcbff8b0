"""What runs teach the worker about later ones, on a random model of real layout and a simulated device.

Proves: memory that other programs took teaches nothing; a guess never divides a run, a measured peak may; the catalog's
corrections and the worker's are not multiplied; what copies ahead may take is not counted as a run's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pool.activation_book import ActivationKey
from pool.catalog import Catalog
from pool.devices import sim
from pool.engine import Engine
from pool.out_of_memory import RanOutOfMemory
from pool.residency import needed_bytes
from pool.spec import RunCost, TaskSpec
from pool.work import DecodeWork, Latent, Picture, RunHooks
from tests.pool.checkpoints.tiny_checkpoint import write_tiny_checkpoint
from tests.pool.pipeline import PLENTY_BYTES, QUIET, Pipeline, open_engine

SIDE = 128


class Decoding:
    """The decode stage of one picture, which can be divided, on any engine."""

    def __init__(self, catalog: Catalog) -> None:
        engine = open_engine("sim", PLENTY_BYTES)
        pipeline = Pipeline(engine, catalog, {}, is_divisible=True)
        facts = engine.latent_facts(pipeline.model)
        cells = SIDE // facts.downscale
        self.latent = Latent(np.random.default_rng(1).normal(size=(facts.channels, cells, cells)).astype(np.float32))
        self.work = DecodeWork(pipeline.model, SIDE, SIDE)
        self.task: TaskSpec = pipeline.task(self.work)
        (self.use,) = self.task.uses
        self.weight_bytes = next(
            s.weight_bytes for s in catalog.components(pipeline.model).values() if s.key == self.use.component
        )
        self.pixels, _ = self.run(engine)
        engine.close()

    def run(self, engine: Engine, task: TaskSpec | None = None, hooks: RunHooks = QUIET) -> tuple[np.ndarray, RunCost]:
        result, cost = engine.run(task or self.task, self.work, (self.latent,), hooks)
        assert isinstance(result, Picture)
        return result.pixels_HWC, cost

    @property
    def whole_bytes(self) -> int:
        """All of its weights streamed, undivided."""
        return needed_bytes(self.task.uses, self.task.activation_bytes)


@pytest.fixture(scope="module")
def decoding(tmp_path_factory: pytest.TempPathFactory) -> Decoding:
    folder = tmp_path_factory.mktemp("weights")
    write_tiny_checkpoint(folder / "toy.safetensors", 1, metadata={"modelspec.resolution": "64x64"})
    return Decoding(Catalog([Path(folder)], [], "sim"))


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    sim.occupy(0, 0)
    sim.recover(0)


def test_memory_that_another_program_took_teaches_nothing(decoding: Decoding) -> None:
    """Found in a review: a program that took the memory for a while divided all later runs, for good."""
    engine = open_engine("sim", decoding.whole_bytes + decoding.weight_bytes // 2)
    pixels, before = decoding.run(engine)
    assert before.division is None
    assert np.array_equal(pixels, decoding.pixels)

    def takes_all() -> bool:
        stats = sim.memory_stats(0)
        if stats.used_bytes:
            sim.occupy(0, stats.budget_bytes - stats.used_bytes)
        return False

    for _ in range(4):
        engine.vram.unload_all()  # so that the program comes when the weights are in place, not before
        with pytest.raises(RanOutOfMemory):
            decoding.run(engine, hooks=RunHooks(lambda done, steps: None, takes_all))
        sim.occupy(0, 0)
    assert sum(error.ran_out for error in engine.activation_errors()) == 0
    pixels, after = decoding.run(engine)
    assert (after.division, after.planned_bytes) == (None, before.planned_bytes)
    assert np.array_equal(pixels, decoding.pixels)
    engine.close()


def test_running_out_for_reasons_of_its_own_is_learnt_and_divides_nothing_beforehand(decoding: Decoding) -> None:
    """Found in a review: a step after running out divided runs that fit, and their pictures were others."""
    engine = open_engine("sim", decoding.whole_bytes + decoding.weight_bytes)
    lie = replace(decoding.task, activation_bytes=decoding.task.activation_bytes // 8)
    true_ways = decoding.task.divisions
    lie = replace(lie, divisions=tuple(way for way in true_ways if way.activation_bytes < lie.activation_bytes))
    sim.occupy(0, decoding.weight_bytes // 2)
    pixels, first = decoding.run(engine, lie)
    assert first.rungs
    assert np.array_equal(pixels, decoding.pixels)
    assert sum(error.ran_out for error in engine.activation_errors()) > 0
    engine.close()

    engine = open_engine("sim", decoding.whole_bytes + decoding.weight_bytes // 2)
    key = ActivationKey(decoding.use.component, decoding.task.stage, "sim")
    for _ in range(10):  # whatever made it run out: not even half of it would fit by the correction
        engine._runner.book.ran_out(key, decoding.task.activation_bytes)
    pixels, cost = decoding.run(engine)
    assert cost.division is None
    assert cost.planned_bytes <= decoding.whole_bytes + decoding.weight_bytes // 2
    assert np.array_equal(pixels, decoding.pixels)
    engine.close()


def test_a_measured_peak_of_such_a_run_divides_it(decoding: Decoding) -> None:
    """What is known to be too much is not tried first."""
    lie = replace(
        decoding.task,
        activation_bytes=decoding.task.activation_bytes * 3 // 4,
        divisions=tuple(
            way for way in decoding.task.divisions if way.activation_bytes < decoding.task.activation_bytes * 3 // 4
        ),
    )
    assert lie.divisions
    engine = open_engine("sim", decoding.whole_bytes + decoding.weight_bytes)
    _, cost = decoding.run(engine, lie)
    assert (cost.division, cost.streamed_bytes) == (None, 0)
    sim.occupy(0, decoding.weight_bytes + decoding.task.activation_bytes // 8)
    _, cost = decoding.run(engine, lie)
    assert cost.division in lie.divisions
    assert cost.rungs == ()
    engine.close()


def test_the_corrections_of_catalog_and_worker_are_not_multiplied(decoding: Decoding) -> None:
    """Found in a review: a run that took one and a half times its estimate was planned at more than twice it."""
    counted_bytes = decoding.task.activation_bytes * 2 // 3
    task = replace(decoding.task, counted_bytes=counted_bytes, divisions=())
    engine = open_engine("sim", PLENTY_BYTES)
    planned = {decoding.run(engine, task)[1].planned_bytes for _ in range(4)}
    engine.close()
    engine = open_engine("sim", PLENTY_BYTES)
    expected = {decoding.run(engine, replace(decoding.task, divisions=()))[1].planned_bytes}
    engine.close()
    assert max(planned) <= max(expected) + 2


def test_what_copies_ahead_may_take_is_not_a_runs_own(decoding: Decoding) -> None:
    """Found in a review: it was learnt as activations by the catalog, which does not know how much it is."""
    working = []
    for ahead_bytes in (0, 1000):
        engine = open_engine("sim", decoding.whole_bytes)
        engine._road.ahead_bytes = ahead_bytes
        _, cost = decoding.run(engine)
        assert cost.streamed_bytes > 0
        working.append(cost.working_bytes)
        engine.close()
    assert working[0] - working[1] == 1000
    engine = open_engine("sim", PLENTY_BYTES)
    engine._road.ahead_bytes = 1000
    _, cost = decoding.run(engine)
    assert cost.streamed_bytes == 0
    assert decoding.task.activation_bytes * 9 // 10 <= cost.working_bytes <= decoding.task.activation_bytes
    engine.close()
