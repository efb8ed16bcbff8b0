"""What runs teach the worker about later ones, on a random model of real layout and a simulated device.

Proves: memory that other programs took teaches nothing, and a run's own garbage is not taken for that; what is idle
leaves before the second try; a guess never divides a run, a measured peak may; the catalog's corrections and the
worker's are not multiplied; what copies ahead may take is not counted as a run's own.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.catalog.estimates.activation_calibration import ActivationKey
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.engine.engine import Engine
from modelpool.pool.engine.task_runner import FREED_BYTES, TaskRun
from modelpool.pool.values.core.stage_params import (
    DecodeParams,
    ImagePixels,
    Latent,
    OutputShape,
    RunHooks,
)
from modelpool.pool.values.specs.spec import ExecutionMode, OomStep, Role, RunCost, TaskSpec
from modelpool.pool.weights.ops.attention import DEFAULT_PRIORITY, AttentionBackend
from modelpool.pool.weights.patcher.out_of_memory import RanOutOfMemory
from modelpool.pool.weights.plan.eviction_plan import needed_bytes
from modelpool.pool.weights.plan.oom_ladder import FRAGMENTED_BYTES
from modelpool.pool.weights.vram.leases import with_dependents
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint
from tests.pool.pipeline import PLENTY_BYTES, QUIET, Pipeline, open_engine

SIDE = 128


class Decoding:
    """The decode stage of one image, which can be divided, on any engine."""

    def __init__(self, catalog: Catalog) -> None:
        engine = open_engine("sim", PLENTY_BYTES)
        pipeline = Pipeline(engine, catalog, {}, is_divisible=True)
        facts = engine.latent_facts(pipeline.model)
        cells = SIDE // facts.downscale
        self.latent = Latent(np.random.default_rng(1).normal(size=(facts.channels, cells, cells)).astype(np.float32))
        self.work = DecodeParams(pipeline.model, OutputShape(SIDE, SIDE))
        self.task: TaskSpec = pipeline.task(self.work)
        (self.use,) = self.task.uses
        self.weight_bytes = next(
            s.weight_bytes for s in catalog.components(pipeline.model).values() if s.key == self.use.component
        )
        self.pixels, _ = self.run(engine)
        engine.close()

    def run(self, engine: Engine, task: TaskSpec | None = None, hooks: RunHooks = QUIET) -> tuple[np.ndarray, RunCost]:
        result, cost = engine.run(task or self.task, self.work, {"latent": self.latent}, hooks)
        assert isinstance(result, ImagePixels)
        return result.pixels_HWC, cost

    def run_of(self, engine: Engine, compute: Callable[[ExecutionMode | None], ImagePixels]) -> TaskRun[ImagePixels]:
        """Such a run as the engine makes it, with `compute` in place of decoding."""
        patcher = engine.patcher(self.work.model, Role.VAE)
        return TaskRun(self.task, with_dependents(patcher, self.use.passes), compute, lambda: False)

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
    """Found in a review: a step after running out divided runs that fit, and their images were others."""
    engine = open_engine("sim", decoding.whole_bytes + decoding.weight_bytes)
    lie = replace(decoding.task, activation_bytes=decoding.task.activation_bytes // 8)
    true_ways = decoding.task.divisions
    lie = replace(lie, divisions=tuple(way for way in true_ways if way.activation_bytes < lie.activation_bytes))
    sim.occupy(0, decoding.weight_bytes // 2)
    pixels, first = decoding.run(engine, lie)
    assert first.oom_steps
    assert np.array_equal(pixels, decoding.pixels)
    assert sum(error.ran_out for error in engine.activation_errors()) > 0
    engine.close()

    engine = open_engine("sim", decoding.whole_bytes + decoding.weight_bytes // 2)
    key = ActivationKey(decoding.use.component, decoding.task.stage, "sim")
    for _ in range(10):  # whatever made it run out: not even half of it would fit by the correction
        engine._runner.calibration.ran_out(key, decoding.task.activation_bytes)
    pixels, cost = decoding.run(engine)
    assert cost.division is None
    assert cost.planned_bytes <= decoding.whole_bytes + decoding.weight_bytes // 2
    assert np.array_equal(pixels, decoding.pixels)
    engine.close()


class Cycle:
    """Garbage that only the collector finds, with what it has on the device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.itself = tensor, self


@pytest.mark.parametrize("leaves_garbage", [False, True])
def test_a_runs_own_garbage_is_not_taken_for_another_program(decoding: Decoding, leaves_garbage: bool) -> None:
    """Found in a review: a run that left a reference cycle with device memory taught nothing by running out."""
    engine = open_engine("sim", decoding.whole_bytes + decoding.weight_bytes)
    tries = 0

    def compute(division: ExecutionMode | None) -> ImagePixels:
        nonlocal tries
        tries += 1
        tensor = torch.empty(decoding.task.activation_bytes // 2, dtype=torch.uint8, device="sim:0")
        if leaves_garbage:
            Cycle(tensor)
        torch.empty(PLENTY_BYTES, dtype=torch.uint8, device="sim:0")
        raise AssertionError("there is not so much memory")

    gc.collect()
    gc.disable()  # so that nobody else finds the cycle first
    try:
        with pytest.raises(RanOutOfMemory):
            engine._runner.run(decoding.run_of(engine, compute))
        assert sim.memory_stats(0).used_bytes == engine.residency().used_bytes
    finally:
        gc.enable()
    assert sum(error.ran_out for error in engine.activation_errors()) == tries > 1
    engine.close()


def test_a_run_that_cudnns_attention_refused_is_tried_once_without_it(decoding: Decoding) -> None:
    """Found in a review: the refusal of one kernel ended a run that others compute. An engine with weights that the
    user moves tries again too."""
    engine = open_engine("sim", PLENTY_BYTES)
    kernels = engine._tools.attention
    refusal = "cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph."
    orders = []

    def compute(division: ExecutionMode | None) -> ImagePixels:
        orders.append(kernels.order)
        if AttentionBackend.CUDNN in kernels.order:
            raise RuntimeError(refusal)
        return ImagePixels(decoding.pixels)

    run = decoding.run_of(engine, compute)
    for tried in (lambda: engine._runner.run(run)[0], lambda: engine._runner.run_as_is(run)):
        kernels.order = DEFAULT_PRIORITY
        assert np.array_equal(tried().pixels_HWC, decoding.pixels)
    assert orders == [DEFAULT_PRIORITY, DEFAULT_PRIORITY[1:]] * 2
    kernels.order = DEFAULT_PRIORITY[1:]
    with pytest.raises(RuntimeError, match="No execution plans"):
        engine._runner.run(decoding.run_of(engine, lambda division: (_ for _ in ()).throw(RuntimeError(refusal))))
    engine.close()


def test_dropping_caches_lets_idle_components_go_and_gives_back_what_they_leave(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in a review: no test noticed when idle weights stayed, nor when the allocator kept their memory."""
    engine = open_engine("sim", PLENTY_BYTES)
    idle = engine.patcher(decoding.work.model, Role.TEXT_ENCODER)
    engine.vram.load(idle)
    is_idle_there: list[tuple[str, bool]] = []

    def note(event: str) -> None:
        is_idle_there.append((event, engine.residency().of(idle.key) is not None))

    monkeypatch.setattr(engine.device.memory, "release_cached", lambda: note("release"))

    def compute(division: ExecutionMode | None) -> ImagePixels:
        note("try")
        if len([event for event, _ in is_idle_there if event == "try"]) == 1:
            torch.empty(2 * PLENTY_BYTES, dtype=torch.uint8, device="sim:0")
        return ImagePixels(decoding.pixels)

    _, cost = engine._runner.run(decoding.run_of(engine, compute))
    assert cost.oom_steps == (OomStep.DROP_CACHES,)
    assert is_idle_there[0] == ("try", True)
    assert is_idle_there[-2:] == [("release", False), ("try", False)]
    engine.close()


def test_a_fragmented_allocator_is_emptied_before_anything_is_evicted(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in a review: memory that the allocator held and could not use let idle models go. A batch is tried again,
    too, and nothing is learnt about the run."""
    engine = open_engine("sim", PLENTY_BYTES)
    idle = engine.patcher(decoding.work.model, Role.TEXT_ENCODER)
    engine.vram.load(idle)
    memory, held_bytes, tries = engine.device.memory, FRAGMENTED_BYTES, 0
    monkeypatch.setattr(memory, "cached_bytes", lambda: held_bytes)

    def release() -> None:
        nonlocal held_bytes
        held_bytes = 0

    monkeypatch.setattr(memory, "release_cached", release)

    def compute(division: ExecutionMode | None) -> ImagePixels:
        nonlocal tries
        tries += 1
        if held_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {what}")
        return ImagePixels(decoding.pixels)

    run = decoding.run_of(engine, compute)
    what = "fragments"
    for tried in (run, replace(run, together=2)):
        held_bytes, tries = FRAGMENTED_BYTES, 0
        _, cost = engine._runner.run(tried)
        assert cost.oom_steps == (OomStep.EMPTY_CACHE,)
        assert tries == 2
        assert engine.residency().of(idle.key) is not None, "an idle component was evicted"
    assert sum(error.ran_out for error in engine.activation_errors()) == 0
    for said, rung in (
        ("Tried to allocate 1.00 MiB. ", OomStep.EMPTY_CACHE),
        ("Tried to allocate 900.00 GiB. ", OomStep.DROP_CACHES),  # found in a review: the same again was of no use
    ):
        what, held_bytes = said, FRAGMENTED_BYTES
        assert engine._runner.run(run)[1].oom_steps == (rung,)
    engine.close()


def test_a_run_that_torch_made_with_less_memory_is_told_once(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found in a review: cuDNN keeps the plan of a convolution that it chose while memory was short; nothing told."""
    engine = open_engine("sim", PLENTY_BYTES)
    refusals = 0
    monkeypatch.setattr(engine.device.memory, "refusals", lambda: refusals)
    for more, told in ((0, 0), (2, 1), (0, 1), (1, 1)):

        def compute(division: ExecutionMode | None, more: int = more) -> ImagePixels:
            nonlocal refusals
            refusals += more
            return ImagePixels(decoding.pixels)

        engine._runner.run(decoding.run_of(engine, compute))
        said = [record for record in caplog.records if "convolutions" in record.getMessage()]
        assert len(said) == told
    engine.close()


def test_convolutions_chosen_while_memory_was_short_are_forgotten_when_there_is_more(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in a review: torch keeps them for a size until the end of the thread, and the thread never ended. Not
    forgotten while memory stays short: each run would choose all of them again."""
    engine = open_engine("sim", PLENTY_BYTES)
    refusals, free_bytes, seen, outer = 0, 10 * FREED_BYTES, [], ContextVar("outer", default="")
    monkeypatch.setattr(engine.device.memory, "refusals", lambda: refusals)
    monkeypatch.setattr(engine.device.memory, "free_bytes", lambda: free_bytes)
    outer.set("of the caller")

    def compute(division: ExecutionMode | None) -> ImagePixels:
        nonlocal refusals
        refusals += more
        seen.append(threading.current_thread())
        assert outer.get() == "of the caller"
        if runs_out and len(seen) == first + 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ImagePixels(decoding.pixels)

    run = decoding.run_of(engine, compute)
    more, runs_out, first = 1, False, 0
    other = replace(run, task=replace(run.task, counted_bytes=run.task.activation_bytes + 1))
    for what, is_free, lacks, tried in (
        ("with enough", 10 * FREED_BYTES, 0, run),
        ("short", 10 * FREED_BYTES, 1, run),
        ("still short", 11 * FREED_BYTES - 1, 1, run),
        ("another size, with more", 20 * FREED_BYTES, 0, other),
        ("with more", 12 * FREED_BYTES, 0, run),
        ("with as much", 12 * FREED_BYTES, 0, run),
    ):
        free_bytes, more = is_free, lacks
        engine._runner.run(tried)
        is_new = len(seen) > 1 and seen[-1] is not seen[-2]
        assert is_new == (what == "with more"), what
    runs_out, first, more = True, len(seen), 1
    assert engine._runner.run(run)[1].oom_steps
    assert len(set(seen[-3:])) == 2
    assert seen[-1] is not seen[-2], "the attempt with the memory that was freed has no plans of the one before"
    engine.close()
    assert not any(thread.is_alive() for thread in set(seen) - {threading.current_thread()})


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
    assert cost.oom_steps == ()
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
        engine._pipeline.ahead_bytes = ahead_bytes
        _, cost = decoding.run(engine)
        assert cost.streamed_bytes > 0
        working.append(cost.working_bytes)
        engine.close()
    assert working[0] - working[1] == 1000
    engine = open_engine("sim", PLENTY_BYTES)
    engine._pipeline.ahead_bytes = 1000
    _, cost = decoding.run(engine)
    assert cost.streamed_bytes == 0
    assert decoding.task.activation_bytes * 9 // 10 <= cost.working_bytes <= decoding.task.activation_bytes
    engine.close()
