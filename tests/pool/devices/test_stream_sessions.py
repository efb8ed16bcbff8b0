"""Random sessions of an engine over checked streams: images, LoRA switches, preloads, overlapping decodes, explicit
loads and evictions, with stops, errors and lack of memory in the middle. Nothing is found, and equal requests have
equal results."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.devices import loader
from modelpool.pool.devices.device_kinds import SimMemory
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.transfer_pipeline import TransferPipeline
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.values.core.errors import DoesNotFit
from modelpool.pool.values.core.stage_params import (
    FloatArray,
    ImagePixels,
    Latent,
    PixelArray,
    PreloadRequest,
    RunHooks,
    Stopped,
)
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.patcher.out_of_memory import RanOutOfMemory, release_frames
from modelpool.pool.weights.vram import preloader
from tests.pool.devices.stream_checker import StreamChecker, install
from tests.pool.input_names import inputs_of
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora
from tests.pool.pipeline import Pipeline

MIB = 1 << 20
ROUNDS, SEEDS = 10, range(4)
BUDGETS_MIB = (8, 10, 14, 20, 64)
MADE_UP = "(made up)"
ROLES = (Role.DIFFUSION_MODEL, Role.VAE, Role.TEXT_ENCODER)
#: the files, the LoRAs and the strengths of a request, and what was made
Key = tuple[str, tuple[tuple[str, float], ...], bool, str]
Ending = Callable[[], tuple[object, object]]


class Session:
    """One engine and the calls of it."""

    def __init__(self, engine: Engine, catalog: Catalog, chance: random.Random, known: dict[Key, np.ndarray]) -> None:
        self.engine, self.catalog, self.chance, self.known = engine, catalog, chance, known
        self.done: Counter[str] = Counter()
        self._waiting: list[tuple[Key, Ending | Future[tuple[object, object]]]] = []
        self._threads = ThreadPoolExecutor(2)

    def variant(self) -> Pipeline:
        """One of the models with some of the LoRAs."""
        loras = {f"l{n}": self.chance.choice((0.4, 0.8)) for n in range(1, 4) if self.chance.random() < 0.3}
        pipeline = Pipeline(self.engine, self.catalog, loras)
        pipeline.model = self.catalog.find_model(self.chance.choice(("toy", "toy2")))
        return pipeline

    def hooks(self) -> RunHooks:
        """Hooks that may stop, fail, or ask for a preload."""
        stop_at, short_at, fail_at = (
            self.chance.randint(1, 60) if self.chance.random() < 0.08 else 0 for _ in range(3)
        )
        other, calls = self.variant(), [0]
        prompt, _, sample, decode = other.works()
        todo = self.chance.sample([prompt, sample, decode], self.chance.randint(0, 3))
        request = PreloadRequest(tuple((other.task(work), work) for work in todo)) if todo else None

        def stop() -> bool:
            calls[0] += 1
            if calls[0] == short_at:
                raise torch.OutOfMemoryError(f"CUDA out of memory {MADE_UP}")
            if calls[0] == fail_at:
                raise RuntimeError(f"a bug {MADE_UP}")
            return calls[0] == stop_at

        return RunHooks(lambda done, steps: None, stop, lambda: request)

    def act(self) -> None:
        """Do something; what may happen then is over afterwards."""
        actions = {
            self.image: 4, self.begin: 3, self.load: 1, self.unload: 2, self.unload_all: 1, self.close: 1,
            self.collect: 1,
        }  # fmt: skip
        action = self.chance.choices(list(actions), list(actions.values()))[0]
        try:
            action()
            self.done[action.__name__] += 1
        except (Stopped, DoesNotFit, RanOutOfMemory) as error:
            release_frames(error)
            self.done[type(error).__name__] += 1
        except RuntimeError as error:
            if MADE_UP not in str(error):
                raise
            release_frames(error)
            self.done["bug"] += 1

    def latent(self, pipeline: Pipeline) -> Latent:
        prompt, negative, sample, _ = pipeline.works()
        texts = [pipeline.run(work, hooks=self.hooks()) for work in (prompt, negative)]
        latent = pipeline.run(sample, *texts, hooks=self.hooks())
        assert isinstance(latent, Latent)
        self.compare(self.key(pipeline, "latent"), latent.samples_CHW)
        return latent

    def image(self) -> None:
        pipeline = self.variant()
        image = pipeline.run(pipeline.works()[3], self.latent(pipeline), hooks=self.hooks())
        assert isinstance(image, ImagePixels)
        self.compare(self.key(pipeline, "image"), image.pixels_HWC)

    def begin(self) -> None:
        pipeline = self.variant()
        decode, latent = pipeline.works()[3], self.latent(pipeline)
        ending = self.engine.begin(pipeline.task(decode), decode, inputs_of(decode, latent), self.hooks())
        later = self._threads.submit(ending) if self.chance.random() < 0.6 else ending
        self._waiting.append((self.key(pipeline, "image"), later))

    def load(self) -> None:
        self.engine.load_weights(self.variant().model, self.chance.sample(ROLES, 2))

    def unload(self) -> None:
        vram = self.engine.vram
        idle = [entry for entry in vram.residency().entries if entry.component not in vram.leased]
        if idle:
            entry = self.chance.choice(idle)
            vram.unload(entry.component, self.chance.randint(0, max(1, entry.resident_bytes)))

    def unload_all(self) -> None:
        self.engine.vram.unload_all()
        self.engine.device.memory.release_cached()

    def close(self) -> None:
        self.engine.close_unused_models()

    def collect(self) -> None:
        self.engine.poll_pending()
        if self._waiting:
            key, later = self._waiting.pop(0)
            result, _ = later.result() if isinstance(later, Future) else later()
            assert isinstance(result, ImagePixels)
            self.compare(key, result.pixels_HWC)

    def end(self) -> None:
        """Wait for pending work."""
        while self._waiting:
            self.act_to(self.collect)
        self.engine.close()
        self._threads.shutdown()

    def act_to(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (Stopped, RanOutOfMemory, RuntimeError) as error:
            release_frames(error)
            self.done[f"late {type(error).__name__}"] += 1

    def key(self, pipeline: Pipeline, what: str) -> Key:
        loras = tuple((lora.name, lora.strength) for lora in pipeline.loras)
        return pipeline.model.name, loras, self.engine._settings.loras_at_run_time, what

    def compare(self, key: Key, made: FloatArray | PixelArray) -> None:
        known = self.known.setdefault(key, made.copy())
        if not np.array_equal(known, made):
            self.done["wrong result"] += 1


def play(catalog: Catalog, seed: int, known: dict[Key, np.ndarray], patches: pytest.MonkeyPatch) -> tuple[
    StreamChecker, Counter[str]
]:  # fmt: skip
    chance = random.Random(seed)
    checker = StreamChecker(seed)
    ahead_bytes = chance.choice((0, 20_000, 200_000, 2 * MIB))

    def opened(cls: type, place: torch.device, **options: object) -> TransferPipeline:
        return checker.pipeline(place, ahead_bytes, chance.choice((1 << 13, 1 << 16)), chance.choice((2, 4)))

    patches.setattr(TransferPipeline, "open", classmethod(opened))
    patches.setattr(SimMemory, "release_cached", lambda self: checker.empty_cache())
    budget_bytes = chance.choice(BUDGETS_MIB) * MIB
    sim.configure(0, budget_bytes)
    sim.recover(0)
    sim.reset_peak(0)
    with checker.watching():
        settings = EngineSettings("sim", 0, budget_bytes, loras_at_run_time=chance.random() < 0.3)
        session = Session(Engine.open(settings), catalog, chance, known)
        for _ in range(ROUNDS):
            session.act()
        session.end()
    return checker, session.done


@pytest.mark.nightly(usually="tests/pool/devices/test_stream_order.py")
@pytest.mark.timeout(1200)
def test_random_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr(loader, "LEAST_STAGED_BYTES", 256)
    for name, value in (("SLICE_SECONDS", 1.0), ("SLICE_BYTES", 1 << 18), ("REST", 0.0)):
        monkeypatch.setattr(preloader, name, value)
    for number, name in ((1, "toy"), (2, "toy2")):
        write_tiny_checkpoint(tmp_path / f"{name}.safetensors", number, metadata={"modelspec.resolution": "64x64"})
    (tmp_path / "loras").mkdir()
    for number in (1, 2, 3):
        write_tiny_lora(tmp_path / "loras" / f"l{number}.safetensors", number)
    catalog = Catalog([tmp_path], [tmp_path / "loras"], "sim")
    known: dict[Key, np.ndarray] = {}
    total: Counter[str] = Counter()
    for seed in SEEDS:
        with monkeypatch.context() as patches:
            checker, done = play(catalog, seed, known, patches)
        assert checker.findings == {}, f"seed {seed}"
        assert done["wrong result"] == 0, f"seed {seed}"
        assert sim.memory_stats(0).used_bytes == 0, f"seed {seed}: {done}"
        total += done
    assert total["image"] > 0
    assert total["begin"] > 0
