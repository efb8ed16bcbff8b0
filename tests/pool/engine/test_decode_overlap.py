"""A decode that overlaps with the next sampling run: pixels, memory and failures are as in runs one after the other.

On the simulated device with streams that finish when somebody waits for them, so that a decode is pending for as long
as a test wants; and on sim and cpu as they are, which have no streams.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.devices.copy_streams import CopyStreams, StreamMaker
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.engine.preview_maker import CELLS_TO_FIT, small_decode_bytes
from modelpool.pool.engine.task_runner import FREED_BYTES, TaskRunner
from modelpool.pool.values.core.previews import PreviewKind, PreviewWish
from modelpool.pool.values.core.stage_params import ImagePixels, Latent, Result, RunHooks, Stopped
from modelpool.pool.values.specs.spec import OomStep, Role, RunCost
from modelpool.pool.weights.patcher.out_of_memory import OutOfHostMemory, release_frames
from modelpool.pool.weights.plan.eviction_plan import needed_bytes
from tests.pool.input_names import inputs_of
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint
from tests.pool.pipeline import PLENTY_BYTES, QUIET, Pipeline, open_engine


@dataclass(eq=False)
class LateStream:
    """A stream that notes for which others it waits."""

    name: str
    waits: list[str] = field(default_factory=list)

    def wait_stream(self, stream: LateStream) -> None:
        self.waits.append(stream.name)

    def wait_event(self, event: LateEvent) -> None:
        pass


@dataclass(eq=False)
class LateEvent:
    """An event that happens when somebody waits for it."""

    on: str = ""
    is_over: bool = False

    def record(self, stream: LateStream) -> None:
        self.on = stream.name

    def synchronize(self) -> None:
        self.is_over = True

    def query(self) -> bool:
        return self.is_over


class LateStreams:
    """The streams of a device; `on` is the current one."""

    def __init__(self) -> None:
        self.on = [LateStream("compute")]
        self.made: list[LateStream] = []
        self.events: list[LateEvent] = []
        #: those of them that a thread may wait for
        self.ends: list[LateEvent] = []
        self.maker = StreamMaker(
            new_stream=self._new,
            new_event=self._event,
            new_end=self._end,
            current=lambda: self.on[-1],
            on=self._on,
            lend=lambda tensor, stream: None,
        )

    def _new(self) -> LateStream:
        self.made.append(LateStream(f"own {len(self.made)}"))
        return self.made[-1]

    def _event(self) -> LateEvent:
        self.events.append(LateEvent())
        return self.events[-1]

    def _end(self) -> LateEvent:
        self.ends.append(self._event())
        return self.ends[-1]

    @contextmanager
    def _on(self, stream: LateStream) -> Iterator[None]:
        self.on.append(stream)
        try:
            yield
        finally:
            self.on.pop()


class Bench:
    """The works of one image on a simulated device with streams, with the latent and the pixels of runs in turn."""

    def __init__(self, catalog: Catalog, budget_bytes: int = PLENTY_BYTES) -> None:
        self.engine = open_engine("sim", budget_bytes)
        self.streams = LateStreams()
        self.engine._pipeline._streams = CopyStreams(self.streams.maker)
        self.pipeline = Pipeline(self.engine, catalog, {})
        prompt, negative, self.sampling, self.decoding = self.pipeline.works()
        self.texts = self.pipeline.run(prompt), self.pipeline.run(negative)
        self.latent = self.pipeline.run(self.sampling, *self.texts)
        self.pixels = pixels_of(self.pipeline.run(self.decoding, self.latent))
        self.vae = self.engine.patcher(self.pipeline.model, Role.VAE).key
        self.sampled_cost = self.pipeline.costs[2]

    def begin(self, hooks: RunHooks = QUIET) -> Callable[[], tuple[Result, RunCost]]:
        """Begin to decode."""
        task, inputs = self.pipeline.task(self.decoding), inputs_of(self.decoding, self.latent)
        return self.engine.begin(task, self.decoding, inputs, hooks)

    def sample(self, hooks: RunHooks = QUIET) -> tuple[np.ndarray, RunCost]:
        task, inputs = self.pipeline.task(self.sampling), inputs_of(self.sampling, *self.texts)
        result, cost = self.engine.begin(task, self.sampling, inputs, hooks)()
        assert isinstance(result, Latent)
        return result.samples_CHW, cost

    @property
    def is_pending(self) -> bool:
        return self.vae in self.engine.vram.leased

    def check(self, ending: Callable[[], tuple[Result, RunCost]], latent: np.ndarray) -> None:
        """Both results equal the results of runs in turn, and nothing is held for them any more."""
        assert np.array_equal(pixels_of(ending()[0]), self.pixels)
        assert isinstance(self.latent, Latent)
        assert np.array_equal(latent, self.latent.samples_CHW)
        self.engine.poll_pending()
        assert not self.engine.vram.leased
        assert sim.memory_stats(0).used_bytes == self.engine.residency().used_bytes
        self.engine.close()
        assert sim.memory_stats(0).used_bytes == 0


def pixels_of(result: Result) -> np.ndarray:
    assert isinstance(result, ImagePixels)
    return result.pixels_HWC


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    folder = Path(tmp_path_factory.mktemp("weights"))
    write_tiny_checkpoint(folder / "toy.safetensors", 1, metadata={"modelspec.resolution": "64x64"})
    return Catalog([folder], [], "sim")


def test_a_decode_during_a_sampling_run_gives_the_usual_pixels_and_both_are_planned(catalog: Catalog) -> None:
    bench = Bench(catalog)
    ending = bench.begin()
    (overlap,) = bench.streams.made[2:]  # after the events of copies
    assert overlap.waits == ["compute"], "it reads what the compute stream made"
    end = next(event for event in bench.streams.events if event.on == overlap.name)
    held = []
    latent, cost = bench.sample(
        replace(QUIET, on_step=lambda done, steps: held.append((bench.is_pending, end.is_over)))
    )
    assert held == [(True, False)] * len(held) != [], "the sampling run waited for the decode"
    task = bench.pipeline.task(bench.decoding)
    decode_bytes = needed_bytes(task.uses, task.activation_bytes)
    assert cost.planned_bytes == bench.sampled_cost.planned_bytes + decode_bytes + vae_bytes(bench)
    assert (cost.working_bytes, cost.oom_steps) == (0, ()), "the peak is not the run's own"
    _, decode_cost = ending()
    assert decode_cost.working_bytes > 0
    assert decode_cost.peak_bytes <= decode_cost.planned_bytes
    assert overlap.waits == ["compute"], "reading the result must not wait for the sampling run"
    bench.check(ending, latent)


def vae_bytes(bench: Bench) -> int:
    """The weights of the VAE, which the first sampling run did not have next to it."""
    return next(e.resident_bytes for e in bench.engine.residency().entries if e.component == bench.vae)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_without_streams_a_begun_run_is_over_at_once(catalog: Catalog, device: str) -> None:
    engine = open_engine(device, PLENTY_BYTES)
    pipeline = Pipeline(engine, catalog, {})
    expected = pipeline.image()
    prompt, negative, sampling, decoding = pipeline.works()
    found: list[Result] = []
    for work, inputs in ((prompt, 0), (negative, 0), (sampling, 2), (decoding, 1)):
        named = inputs_of(work, *found[len(found) - inputs :])
        ending = engine.begin(pipeline.task(work), work, named, QUIET)
        assert not engine.vram.leased
        found.append(ending()[0])
    assert np.array_equal(pixels_of(found[-1]), expected)
    engine.close()


def test_running_out_during_a_decode_waits_for_it_and_costs_no_step(catalog: Catalog) -> None:
    bench, tries = Bench(catalog), 0
    ending = bench.begin()

    def runs_out_once(done: int, steps: int) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert not bench.is_pending

    latent, cost = bench.sample(replace(QUIET, on_step=runs_out_once))
    assert cost.oom_steps == ()
    assert sum(error.ran_out for error in bench.engine.activation_errors()) == 0
    bench.check(ending, latent)


def test_convolutions_chosen_without_the_memory_of_a_decode_are_forgotten(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in a review: the run began again with the memory of the decode, and with the plans of cuDNN that it had
    chosen without."""
    bench, refusals, seen = Bench(catalog), 0, list[threading.Thread]()
    monkeypatch.setattr(bench.engine.device.memory, "refusals", lambda: refusals)
    ending = bench.begin()

    def runs_out_once(done: int, steps: int) -> None:
        nonlocal refusals
        seen.append(threading.current_thread())
        if len(seen) == 1:
            refusals += 1
            raise torch.OutOfMemoryError("CUDA out of memory")

    latent, cost = bench.sample(replace(QUIET, on_step=runs_out_once))
    assert cost.oom_steps == ()
    assert seen[1] is not seen[0]
    bench.check(ending, latent)


def test_the_plans_of_a_decode_outlive_what_the_device_computes_with_them(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in an audit: the thread whose plans of cuDNN a pending decode used was ended, if the next run was to choose
    others: as memory had been short for it before, or ran out on the host."""

    def was_short(runner: TaskRunner) -> None:
        monkeypatch.setattr(runner._short, "kept", lambda kind: -FREED_BYTES)

    def runs_out(runner: TaskRunner) -> None:
        monkeypatch.setattr(runner._device.memory, "refusals", count().__next__)

    for prepare, error in ((was_short, None), (runs_out, MemoryError("of the host"))):
        bench, seen = Bench(catalog), list[bool]()
        runner = bench.engine._runner
        ending = bench.begin()
        (end,) = bench.streams.ends
        renew = runner._thread.renew

        def noted(renew: Callable[[], None] = renew, end: LateEvent = end, seen: list[bool] = seen) -> None:
            seen.append(end.is_over)
            renew()

        monkeypatch.setattr(runner._thread, "renew", noted)
        prepare(runner)

        def step(done: int, steps: int, error: Exception | None = error) -> None:
            if error is not None:
                raise error

        if error is None:
            latent, _ = bench.sample(replace(QUIET, on_step=step))
        else:
            with pytest.raises(OutOfHostMemory):
                bench.sample(replace(QUIET, on_step=step))
            latent = bench.latent.samples_CHW
        assert seen == [True] * len(seen) != []
        bench.check(ending, latent)


def test_whoever_waits_for_a_decode_sleeps(catalog: Catalog) -> None:
    """The thread would take a CPU core from the one that launches the kernels of the next run."""
    bench = Bench(catalog)
    bench.check(bench.begin(), bench.latent.samples_CHW)
    (end,) = bench.streams.ends
    assert (end.on, end.is_over) == (bench.streams.made[2].name, True)


def test_previews_are_prepared_with_the_memory_of_a_pending_decode(catalog: Catalog) -> None:
    """Found in an audit: they lacked it, so that the model had no previews from then on. A map is fitted once."""
    bench, wish = Bench(catalog), PreviewWish(PreviewKind.LATENT_RGB)
    engine, model, task = bench.engine, bench.pipeline.model, bench.pipeline.task(bench.decoding)
    vae = engine.patcher(model, Role.VAE)
    small_bytes = small_decode_bytes(vae, (CELLS_TO_FIT, CELLS_TO_FIT), engine.latent_facts(model))
    ending = bench.begin()
    engine.vram.unload_all()
    decode_bytes = needed_bytes(task.uses, task.activation_bytes)
    engine.vram.capacity_bytes = vae.spec().weight_bytes + decode_bytes + small_bytes - 1
    assert bench.is_pending
    bench.engine.prepare_previews(bench.pipeline.model, wish)
    assert bench.engine.preview(bench.pipeline.model, bench.latent.samples_CHW, wish)
    bench.check(ending, bench.latent.samples_CHW)


def test_a_decode_that_runs_out_takes_the_steps_of_the_ladder_alone(catalog: Catalog) -> None:
    bench, tries = Bench(catalog), 0

    def runs_out_once(done: int, steps: int) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    ending = bench.begin(replace(QUIET, on_step=runs_out_once))
    assert not bench.is_pending
    assert ending()[1].oom_steps == (OomStep.DROP_CACHES,)
    latent, cost = bench.sample()
    assert cost.oom_steps == ()
    bench.check(ending, latent)


def test_what_a_failed_decode_has_begun_is_over_before_its_weights_may_leave(catalog: Catalog) -> None:
    """Kernels that are under way read the weights, which the allocator may unmap without knowing of the stream."""
    bench = Bench(catalog)
    with pytest.raises(Stopped):
        bench.begin(replace(QUIET, on_step=lambda done, steps: (_ for _ in ()).throw(Stopped())))
    assert bench.streams.events[-1].on == bench.streams.made[-1].name
    assert bench.streams.events[-1].is_over
    assert not bench.engine.vram.leased
    latent, _ = bench.sample()
    bench.check(bench.begin(), latent)


def test_stopping_or_failing_during_a_decode_leaves_it_whole(catalog: Catalog) -> None:
    for error in (Stopped(), RuntimeError("a bug")):
        bench = Bench(catalog)
        ending = bench.begin()
        with pytest.raises(type(error)):
            bench.sample(replace(QUIET, on_step=lambda done, steps, error=error: (_ for _ in ()).throw(error)))
        release_frames(error)
        assert bench.is_pending
        bench.check(ending, bench.latent.samples_CHW)


def test_a_decode_does_not_overlap_with_a_run_that_would_lose_by_it(catalog: Catalog) -> None:
    """Where memory is short, decodes are computed as usual, or are over before the next run is planned."""
    bench = Bench(catalog)
    sizes = [bench.pipeline.task(work) for work in (bench.sampling, bench.decoding)]
    sampling_bytes, decoding_bytes = (needed_bytes(task.uses, task.activation_bytes) for task in sizes)
    bench.engine.close()
    for short_bytes, pends in ((0, True), (1, False)):
        weight_bytes = sum(spec.weight_bytes for spec in catalog.components(bench.pipeline.model).values())
        bench = Bench(catalog, weight_bytes + sampling_bytes + decoding_bytes - short_bytes)
        latent, usual = bench.sample()
        ending = bench.begin()
        assert bench.is_pending == pends
        latent, cost = bench.sample()
        assert (cost.resident, cost.division) == (usual.resident, usual.division) == (True, None)
        bench.check(ending, latent)
    bench = Bench(catalog)
    bench.engine._runner._usual_bytes = 0
    ending = bench.begin()
    bench.engine.vram.capacity_bytes = bench.engine.residency().used_bytes + decoding_bytes + sampling_bytes - 1
    latent, _ = bench.sample(replace(QUIET, on_step=lambda done, steps: refuse(bench.is_pending)))
    bench.check(ending, latent)


def refuse(condition: bool) -> None:
    assert not condition


def test_whatever_moves_weights_waits_for_the_decode(catalog: Catalog) -> None:
    """Otherwise a decode would read weights that are gone."""

    def again(bench: Bench) -> None:
        bench.pipeline.run(bench.decoding, bench.latent)

    def fresh(bench: Bench) -> None:
        task, inputs = bench.pipeline.task(bench.sampling), inputs_of(bench.sampling, *bench.texts)
        bench.engine.run(task, bench.sampling, inputs, QUIET, fresh=True)

    def loads(bench: Bench) -> None:
        bench.engine.load_weights(bench.pipeline.model, (Role.TEXT_ENCODER,))

    changes: list[Callable[[Bench], object]] = [again, fresh, loads, lambda bench: bench.engine.close_unused_models()]
    for change in (*changes, lambda bench: bench.engine.close()):
        bench = Bench(catalog)
        ending = bench.begin()
        assert bench.is_pending
        change(bench)
        assert bench.vae not in bench.engine.vram.leased
        assert np.array_equal(pixels_of(ending()[0]), bench.pixels)
        bench.engine.close()
