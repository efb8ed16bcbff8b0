"""Weights that are brought while another task runs, by an engine on a simulated device.

Proves: bytes move during the run and not before or after; the result is what it was to the bit, of the run and of the
task that comes; its turn finds everything there, patches too; a run that runs out of memory drops what was brought and
is as it would have been; one that is stopped leaves an exact account and nothing that cannot leave; nothing is brought
beside a run that streams, for a model that was not opened, or where the policy keeps nothing; a failing copy fails no
run; slices end in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.engine import Engine
from modelpool.pool.values.core.stage_params import Encoded, Latent, PreloadRequest, RunHooks, StageParams, Stopped
from modelpool.pool.values.specs.spec import OomStep, Role, RunCost
from modelpool.pool.weights.vram import preloader as uploads_ahead
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora
from tests.pool.pipeline import PLENTY_BYTES, QUIET, Pipeline, open_engine


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    folder = tmp_path_factory.mktemp("weights")
    write_tiny_checkpoint(folder / "toy.safetensors", 1, metadata={"modelspec.resolution": "64x64"})
    write_tiny_lora(folder / "red.safetensors", 2)
    return Catalog([Path(folder)], [Path(folder)], "sim")


class Scene:
    """An image's stages on one engine with a model that was opened before, with nothing on the device."""

    def __init__(self, catalog: Catalog, loras: dict[str, float], budget_bytes: int = PLENTY_BYTES) -> None:
        self.engine = open_engine("sim", budget_bytes)
        # a clock that stands: how much a slice brings is not a matter of how busy the machine is
        self.engine._runner.preloader._clock = lambda: 0.0
        self.pipeline = Pipeline(self.engine, catalog, loras)
        self.prompt, self.negative, self.sample, self.decode = self.pipeline.works()
        for role in (Role.TEXT_ENCODER, Role.DIFFUSION_MODEL, Role.VAE):
            self.engine.patcher(self.pipeline.model, role, self.pipeline.loras if role is not Role.VAE else ())
        encoded = self.pipeline.run(self.prompt), self.pipeline.run(self.negative)
        assert all(isinstance(text, Encoded) for text in encoded)
        self.encoded = encoded
        self.engine.vram.unload_all()

    def preload_request(self, work: StageParams) -> PreloadRequest:
        return PreloadRequest(((self.pipeline.task(work), work),))

    def hooks(self, preload_request: PreloadRequest | None, stop: Callable[[], bool] = lambda: False) -> RunHooks:
        return RunHooks(lambda done, steps: None, stop, lambda: preload_request)

    def sampled(self, hooks: RunHooks = QUIET) -> tuple[np.ndarray, RunCost]:
        result = self.pipeline.run(self.sample, *self.encoded, hooks=hooks)
        assert isinstance(result, Latent)
        return result.samples_CHW, self.pipeline.costs[-1]

    def resident(self, role: Role) -> int:
        entries = self.engine.residency().entries
        return sum(e.resident_bytes for e in entries if f"/{role.value}@" in e.component)


@pytest.fixture
def scene(catalog: Catalog) -> Iterator[Scene]:
    made = Scene(catalog, {})
    yield made
    made.engine.close()
    assert sim.memory_stats(0).used_bytes == 0


def test_what_comes_is_there_when_its_turn_comes_and_nothing_else_is_changed(scene: Scene) -> None:
    latent, alone = scene.sampled()
    pixels = scene.pipeline.run(scene.decode, Latent(latent))
    scene.engine.vram.unload_all()

    beside, cost = scene.sampled(scene.hooks(scene.preload_request(scene.decode)))
    assert np.array_equal(beside, latent)
    vae_bytes = scene.resident(Role.VAE)
    assert vae_bytes > 0
    assert cost.ahead_bytes > 0
    assert (cost.uploaded_bytes, cost.resident) == (alone.uploaded_bytes, alone.resident), "its own load is its own"
    assert cost.working_bytes == 0, "what the run itself took is not known"

    again = scene.pipeline.run(scene.decode, Latent(beside))
    assert np.array_equal(again.pixels_HWC, pixels.pixels_HWC)  # type: ignore[union-attr]
    decoded = scene.pipeline.costs[-1]
    assert (decoded.uploaded_bytes, decoded.resident, decoded.ahead_bytes) == (0, True, 0)
    assert scene.resident(Role.VAE) == vae_bytes


def test_patches_are_there_too(catalog: Catalog) -> None:
    scene = Scene(catalog, {"red": 0.7})
    first = scene.pipeline.run(scene.prompt)
    expected = first.context_LD  # type: ignore[union-attr]
    scene.engine.vram.unload_all()
    scene.sampled(scene.hooks(scene.preload_request(scene.prompt)))
    again = scene.pipeline.run(scene.prompt)
    cost = scene.pipeline.costs[-1]
    assert (cost.uploaded_bytes, cost.patch_switches, cost.resident) == (0, 0, True)
    assert np.array_equal(again.context_LD, expected)  # type: ignore[union-attr]
    scene.engine.close()


def test_other_patches_replace_those_that_are_there(catalog: Catalog) -> None:
    scene = Scene(catalog, {"red": 0.7})
    plain = replace(scene.prompt, loras=())
    unpatched = scene.pipeline.run(plain).context_LD  # type: ignore[union-attr]
    scene.pipeline.run(scene.prompt)  # its patches are on the device now
    scene.sampled(scene.hooks(scene.preload_request(plain)))
    again = scene.pipeline.run(plain)
    assert scene.pipeline.costs[-1].resident
    assert np.array_equal(again.context_LD, unpatched)  # type: ignore[union-attr]
    scene.engine.close()


def test_running_out_of_memory_drops_it_first(scene: Scene) -> None:
    """Another program takes what the plan counted on while the VAE is there: the run is made again without it."""
    latent, _ = scene.sampled()
    scene.engine.vram.unload_all()
    seen: list[int] = []

    def stop() -> bool:
        if scene.resident(Role.VAE) and not seen:
            stats = sim.memory_stats(0)
            seen.append(stats.used_bytes)
            sim.occupy(0, stats.budget_bytes - stats.used_bytes)
        elif seen and not scene.resident(Role.VAE):
            sim.occupy(0, 0)
        return False

    again, cost = scene.sampled(scene.hooks(scene.preload_request(scene.decode), stop))
    assert seen, "the VAE was there while the run went on"
    assert cost.oom_steps == (OomStep.DROP_AHEAD,)
    assert (cost.ahead_bytes, cost.streamed_bytes, scene.resident(Role.VAE)) == (0, 0, 0)
    assert np.array_equal(again, latent)
    assert sum(error.ran_out for error in scene.engine.activation_errors()) == 0, "the run was not to blame"


def test_a_stopped_run_leaves_an_exact_account(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped half way through the VAE's modules: resident ones are told, leave on demand, and are not loaded again."""
    monkeypatch.setattr(uploads_ahead, "SLICE_BYTES", 1)
    monkeypatch.setattr(uploads_ahead, "REST", 0.0)
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += scene.resident(Role.VAE) > 0
        return asked > 2

    with pytest.raises(Stopped):
        scene.sampled(scene.hooks(scene.preload_request(scene.decode), stop))
    whole_bytes = scene.engine.patcher(scene.pipeline.model, Role.VAE).spec().weight_bytes
    assert 0 < scene.resident(Role.VAE) < whole_bytes
    assert sim.memory_stats(0).used_bytes >= scene.engine.residency().used_bytes
    latent, _ = scene.sampled()
    scene.pipeline.run(scene.decode, Latent(latent))
    assert 0 < scene.pipeline.costs[-1].uploaded_bytes < whole_bytes, "only the rest was missing"
    scene.engine.vram.unload_all()
    assert scene.engine.residency().used_bytes == 0


def test_another_task_takes_the_place_of_the_first(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads_ahead, "REST", 0.0)
    told = [scene.preload_request(scene.decode), scene.preload_request(scene.prompt)]
    seen: list[PreloadRequest] = []

    def preload_request() -> PreloadRequest:
        seen.append(told[0] if len(seen) < 2 else told[1])
        return seen[-1]

    scene.sampled(RunHooks(lambda done, steps: None, lambda: False, preload_request))
    assert scene.resident(Role.TEXT_ENCODER) > 0


def test_several_tasks_come_one_after_the_other_and_what_is_kept_stays(scene: Scene) -> None:
    plain = scene.pipeline.task(scene.prompt), scene.prompt
    decoding = scene.pipeline.task(scene.decode), scene.decode
    _, cost = scene.sampled(scene.hooks(PreloadRequest((plain, decoding))))
    assert cost.ahead_bytes > 0
    assert scene.resident(Role.TEXT_ENCODER) > 0
    assert scene.resident(Role.VAE) > 0


def test_nothing_comes_beside_a_run_that_streams(catalog: Catalog) -> None:
    scene = Scene(catalog, {})
    scene.engine.close()
    tight = Scene(catalog, {}, scene.pipeline.smallest_bytes() + (1 << 16))
    _, cost = tight.sampled(tight.hooks(tight.preload_request(tight.decode)))
    assert cost.streamed_bytes > 0
    assert (cost.ahead_bytes, tight.resident(Role.VAE)) == (0, 0)
    tight.engine.close()


def test_nothing_is_opened_beside_a_run(catalog: Catalog) -> None:
    engine = open_engine("sim", PLENTY_BYTES)
    pipeline = Pipeline(engine, catalog, {})
    prompt, negative, sample, decode = pipeline.works()
    encoded = pipeline.run(prompt), pipeline.run(negative)
    preload_request = PreloadRequest(((pipeline.task(decode), decode),))
    pipeline.run(sample, *encoded, hooks=RunHooks(lambda done, steps: None, lambda: False, lambda: preload_request))
    assert pipeline.costs[-1].ahead_bytes == 0
    engine.close()


def test_a_policy_that_keeps_nothing_brings_nothing(catalog: Catalog) -> None:
    engine = open_engine("sim", PLENTY_BYTES, VramPolicy.LOW)
    pipeline = Pipeline(engine, catalog, {})
    prompt, _, _, decode = pipeline.works()
    engine.patcher(pipeline.model, Role.VAE)
    preload_request = PreloadRequest(((pipeline.task(decode), decode),))
    pipeline.run(prompt, hooks=RunHooks(lambda done, steps: None, lambda: False, lambda: preload_request))
    assert pipeline.costs[-1].ahead_bytes == 0
    engine.close()


def test_a_copy_that_fails_fails_no_run(scene: Scene) -> None:
    """The device refuses a copy in the middle of an upload: the run goes on without, and nothing stays behind."""
    latent, _ = scene.sampled()
    is_told = False

    def stop() -> bool:
        nonlocal is_told
        if not is_told and scene.resident(Role.DIFFUSION_MODEL):
            is_told = True
            sim.fail_transfer(0, after=3)
        return False

    again, cost = scene.sampled(scene.hooks(scene.preload_request(scene.decode), stop))
    sim.recover(0)
    assert np.array_equal(again, latent)
    assert cost.oom_steps == ()
    assert scene.resident(Role.VAE) == 0


class Steps:
    """Takes a while for each module."""

    def __init__(self) -> None:
        self.now, self.made = 0.0, 0

    def clock(self) -> float:
        return self.now

    def bring(self) -> Iterator[int]:
        for _ in range(100):
            self.now += 0.001
            self.made += 1
            yield 1 << 20


def test_slices_end_in_time_and_leave_time_between(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    engine: Engine = scene.engine
    wants = uploads_ahead.PreloadNeeds((), 0)
    ahead = uploads_ahead.Preloader(engine.vram, engine._pipeline, lambda task, work: wants, steps.clock)
    monkeypatch.setattr(engine.vram, "preload", lambda *_: steps.bring())
    preload_request = scene.preload_request(scene.decode)
    ahead.advance(preload_request)
    assert steps.made == 0, "only beside a run"
    with ahead.overlapping(True):
        ahead.advance(preload_request)
        made = steps.made
        assert made == pytest.approx(uploads_ahead.SLICE_SECONDS / 0.001, abs=1)
        ahead.advance(preload_request)
        assert steps.made == made, "the device may need the host now"
        steps.now += uploads_ahead.REST * 0.001 * (made + 1)
        ahead.advance(preload_request)
        assert steps.made > made
    ahead.advance(preload_request)
    assert ahead.uploaded_bytes == steps.made << 20
