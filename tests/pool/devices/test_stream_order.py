"""Work on several streams of a device: each read is after its write, and memory is not used again too early.

Proves, by the happens-before checker: streamed forwards, copies that stay, LoRA switches and preloads beside a run,
decodes that overlap with the next run, stops and errors in the middle are ordered by waits of streams and events; and
leaving out any one of them is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from torch import nn

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.devices import loader
from modelpool.pool.devices.device_kinds import SimMemory
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.transfer_pipeline import TransferPipeline
from modelpool.pool.engine.task_runner import TaskRunner
from modelpool.pool.values.core.stage_params import Latent
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.weights.ops.casting_classes import swap_to_casting
from modelpool.pool.weights.ops.context import compute
from modelpool.pool.weights.patcher.compute_context import RunTools
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget, realize_in_steps
from modelpool.pool.weights.patcher.out_of_memory import release_frames
from modelpool.pool.weights.patcher.weight_form import WeightForm
from modelpool.pool.weights.patches.patch_set import PatchSet
from tests.pool.devices.stream_checker import StreamChecker, install
from tests.pool.input_names import inputs_of
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint
from tests.pool.pipeline import QUIET, Pipeline, open_engine
from tests.pool.toy import make_toy, patches_for
from tests.pool.zoo import build, store_in

INDEX = 62  # of a simulated device that no other test uses
MIB = 1 << 20
TRIES = 6
IDS_BL = ((1, 4, 9, 49, 0),)


@pytest.fixture(autouse=True)
def _streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(monkeypatch)
    # so that tiny weights take the way of large ones
    monkeypatch.setattr(loader, "LEAST_STAGED_BYTES", 64)
    for index in (0, INDEX):
        sim.configure(index, 256 * MIB)
        sim.recover(index)
    yield
    assert StreamChecker.active is None


def device() -> torch.device:
    return torch.device("sim", INDEX)


def stream_a_model(checker: StreamChecker, ahead_bytes: int = 60_000, family: str = "clip") -> None:
    """Two runs of a model with weights on the host; the second one knows the order."""
    case = build(family, torch.float16)
    store_in(case.module, torch.float16)
    swap_to_casting(case.module)
    with checker.pipeline(device(), ahead_bytes, slots=3) as pipeline:
        order = None
        for _ in range(2):
            uploader = pipeline.uploader(order)
            for _ in range(2):
                with torch.no_grad(), compute(device(), torch.float32, uploader=uploader):
                    case.run(device())
            order = uploader.order
            uploader.close()


def drop_copies(checker: StreamChecker) -> None:
    """Copies that turn out not to be needed, and the memory of which is used again."""
    hosts = [torch.full((5_000,), float(value)) for value in range(6)]
    with checker.pipeline(device(), 60_000) as pipeline:
        uploader = pipeline.uploader()
        for host in hosts * 2:
            uploader.upload(host).sum()
        uploader.upload(hosts[4])
        torch.ones(5_000, device=device())
        uploader.close()
        torch.ones(30_000, device=device())


def load_and_read(checker: StreamChecker) -> None:
    """Weights that stay, read and freed."""
    with checker.pipeline(device(), 0) as pipeline:
        for value in range(6):
            pipeline.bring(torch.full((9_000,), float(value))).sum()


def patcher_on(pipeline: TransferPipeline) -> ModelPatcher:
    form, tools = WeightForm(torch.float32), RunTools(pipeline=pipeline)
    return ModelPatcher.of(ComponentKey("toy"), Role.DIFFUSION_MODEL, make_toy(), device(), form, tools)


def bring_beside(pipeline: TransferPipeline, patcher: ModelPatcher, patches: PatchSet) -> None:
    everything = frozenset(module.name for module in patcher.modules())
    with pipeline.overlapping():
        for _ in realize_in_steps(patcher, WeightsTarget(everything, patches)):
            pass


def switch_beside_runs(checker: StreamChecker) -> None:
    """LoRAs are switched in place while the run before is under way."""
    ids_BL = torch.tensor(IDS_BL, device=device())
    with checker.pipeline(device(), 0) as pipeline, torch.no_grad():
        patcher = patcher_on(pipeline)
        bring_beside(pipeline, patcher, PatchSet())
        pipeline.catch_up()
        for turn in range(4):
            with patcher.running() as module:
                module(ids_BL)
            bring_beside(pipeline, patcher, patches_for(make_toy(), f"lora {turn}", ("wide.weight", "narrow.weight")))
            pipeline.catch_up()
        patcher.unload()
        torch.ones(9_000, device=device())


def evict_after_a_switch(checker: StreamChecker) -> None:
    """Weights are switched beside a run, and evicted before anything has waited for the switch."""
    with checker.pipeline(device(), 0) as pipeline, torch.no_grad():
        patcher = patcher_on(pipeline)
        everything = frozenset(module.name for module in patcher.modules())
        patcher.realize(WeightsTarget(everything, PatchSet()))
        bring_beside(pipeline, patcher, patches_for(make_toy(), "lora", ("wide.weight",)))
        with pipeline.overlapping():
            patcher.unload()
        torch.ones(9_000, device=device())
        checker.empty_cache()
        pipeline.catch_up()


def preload_beside_runs(checker: StreamChecker) -> None:
    """Weights arrive beside other work, are read, and leave while they are read."""
    ids_BL = torch.tensor(IDS_BL, device=device())
    with checker.pipeline(device(), 0) as pipeline, torch.no_grad():
        patcher = patcher_on(pipeline)
        for _ in range(3):
            torch.ones(64, device=device()) * 2
            bring_beside(pipeline, patcher, PatchSet())
            pipeline.catch_up()
            with patcher.running() as module:
                module(ids_BL)
            patcher.unload()
            checker.empty_cache()
            with pipeline.overlapping():
                pipeline.keep([pipeline.bring(torch.ones(16_000))])
        pipeline.catch_up()


def load_and_fail(checker: StreamChecker) -> None:
    """A load that fails in the middle of a tensor. Its memory is used again."""
    with checker.pipeline(device(), 0, slot_bytes=1 << 12) as pipeline:
        fill, calls = pipeline._loader.fill, count()

        def failing(buffer: torch.Tensor, source: torch.Tensor) -> None:
            if next(calls) == 2:
                raise MemoryError("made up")
            fill(buffer, source)

        pipeline._loader.fill = failing  # type: ignore[method-assign]
        with pytest.raises(MemoryError) as raised:
            pipeline.bring(torch.zeros(1 << 15, dtype=torch.uint8))
        release_frames(raised.value)
        torch.ones(1 << 15, dtype=torch.uint8, device=device())


class Images:
    """Images on an engine over checked streams."""

    def __init__(self, checker: StreamChecker, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
        made = classmethod(lambda cls, place, **options: checker.pipeline(place, 60_000))
        monkeypatch.setattr(TransferPipeline, "open", made)
        monkeypatch.setattr(SimMemory, "release_cached", lambda self: checker.empty_cache())
        self._engine = open_engine("sim", 64 * MIB)
        self._pipeline = Pipeline(self._engine, catalog, {})
        prompt, negative, self._sample, self._decode = self._pipeline.works()
        self._texts = self._pipeline.run(prompt), self._pipeline.run(negative)

    def sample(self) -> Latent:
        latent = self._pipeline.run(self._sample, *self._texts)
        assert isinstance(latent, Latent)
        return latent

    def begin(self, latent: Latent) -> Callable[[], object]:
        """Begin a decode with weights that have to be loaded."""
        self._engine.vram.unload_all()
        task = self._pipeline.task(self._decode)
        return self._engine.begin(task, self._decode, inputs_of(self._decode, latent), QUIET)

    def overlap(self) -> None:
        """Decodes are computed beside the next sampling run; another thread waits for one of them."""
        latent = self.sample()
        for turn in range(2):
            ending = self.begin(latent)
            assert self._engine.is_pending
            latent = self.sample()
            if turn:
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(ending).result()
            else:
                ending()
        self._engine.close()

    def fail(self) -> None:
        """A decode fails in the middle, and its weights make way for others at once."""

        def failing(module: nn.Module, inputs: object) -> None:
            raise ValueError("made up")

        latent = self.sample()
        vae = self._engine.patcher(self._pipeline.model, Role.VAE).module
        hook = vae.get_submodule("decoder.conv_out").register_forward_pre_hook(failing)
        with pytest.raises(ValueError, match="made up") as raised:
            self.begin(latent)
        hook.remove()
        release_frames(raised.value)
        self._engine.vram.unload_all()
        torch.ones(9_000, device="sim:0")
        self.sample()
        self._engine.close()


def overlap_decodes(checker: StreamChecker, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    Images(checker, catalog, monkeypatch).overlap()


def fail_to_decode(checker: StreamChecker, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    Images(checker, catalog, monkeypatch).fail()


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    write_tiny_checkpoint(tmp_path / "toy.safetensors", 1, metadata={"modelspec.resolution": "64x64"})
    return Catalog([tmp_path], [], "sim")


Work: TypeAlias = Callable[..., None]
WORKS: tuple[Work, ...] = (
    stream_a_model, drop_copies, load_and_read, load_and_fail, switch_beside_runs, evict_after_a_switch,
    preload_beside_runs, overlap_decodes, fail_to_decode,
)  # fmt: skip
#: the work in which each fault is found; the kind of call and the function that makes it; which of its calls are left
#: out
FAULTS: dict[str, tuple[Work, str, str, int]] = {
    "a copy overwrites what is being read": (stream_a_model, "wait_stream", "take", 1),
    "one in ten copies does": (stream_a_model, "wait_stream", "take", 10),
    "a streamed weight is read before its copy": (stream_a_model, "wait_event", "hold", 1),
    "a loaded weight is read before its copy": (load_and_read, "wait_event", "bring", 1),
    "a preloaded weight is read before its copy": (preload_beside_runs, "wait_stream", "catch_up", 1),
    "a switch overwrites what is being read": (switch_beside_runs, "wait_event", "await_mark", 1),
    "a run does not note its end": (switch_beside_runs, "record", "mark", 1),
    "memory of preloaded weights is used again while they are read": (preload_beside_runs, "lend", "keep", 1),
    "memory is used again before a switch has written it": (evict_after_a_switch, "lend", "written", 1),
    "a decode begins before its weights are there": (overlap_decodes, "wait_stream", "on_overlap_stream", 1),
    "memory of a failed decode is used again": (fail_to_decode, "synchronize", "on_overlap_stream", 1),
    "memory of a failed load is used again": (load_and_fail, "wait_event", "bring", 1),
    "memory of a dropped copy is used again": (drop_copies, "wait_event", "drop", 1),
    "a buffer is filled while it is copied from": (stream_a_model, "synchronize", "wait", 1),
    "the end of a copy is not recorded": (stream_a_model, "record", "issue", 1),
}


def play(work: Work, checker: StreamChecker, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    with checker.watching(), monkeypatch.context() as patches:
        if work in (overlap_decodes, fail_to_decode):
            work(checker, catalog, patches)
        else:
            work(checker)
    assert checker.operations > 20 or work is load_and_fail


def test_nothing_is_read_or_used_again_too_early(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = {}
    for work in WORKS:
        for over in (0.0, 0.5):
            checker = StreamChecker(over=over)
            play(work, checker, catalog, monkeypatch)
            findings |= {(work.__name__, over): dict(checker.findings)} if checker.findings else {}
    assert findings == {}


def test_every_missing_wait_is_found(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    missed = []
    for fault, (work, kind, caller, every) in FAULTS.items():
        for _ in range(TRIES):  # a thread of its own copies ahead, and may happen to wait elsewhere
            checker = StreamChecker(over=0.0)
            checker.leave_out(kind, caller, every)
            play(work, checker, catalog, monkeypatch)
            assert checker.left_out > 0, f"nothing calls {kind} in {caller}: the fault is not planted"
            if checker.findings:
                break
        else:
            missed.append(fault)
    assert not missed


def test_pixels_that_nobody_waits_for_are_found(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two things protect them, either of which is enough: the wait for the end, and the stream of the copy."""
    found = {}
    for is_on_stream in (True, False):
        checker = StreamChecker(over=0.0)
        checker.leave_out("synchronize", "result")
        with monkeypatch.context() as patches:
            if not is_on_stream:
                patches.setattr(TaskRunner, "_brought", lambda self, bring: bring())
            play(overlap_decodes, checker, catalog, patches)
        found[is_on_stream] = bool(checker.findings)
    assert found == {True: False, False: True}
