"""`Engine`: everything that one GPU does, in one process. Opens models, leases memory, runs stages.

Knows one device and no other; neither Ray nor the scheduler. Use it directly for explicit control in a script; the
worker actor is a thin shell around it. Not thread safe, apart from the hooks of a run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pool.compute_tools import ComputeTools
from pool.devices.capabilities import detect_capabilities
from pool.devices.kinds import OpenDevice, open_device
from pool.devices.upload_road import UploadRoad
from pool.devices.uploads import AHEAD_BYTES
from pool.open_model import OpenModel
from pool.ops.attention import AttentionBackend, attention_priority
from pool.patcher import ModelPatcher
from pool.residency import Residency
from pool.spec import ComponentKey, Role, RunCost, TaskSpec
from pool.stages import decode, encode, sample
from pool.text.tokenizer import ClipTokenizer
from pool.vram_manager import Lease, VramManager
from pool.work import (
    DecodeWork,
    Encoded,
    EncodeWork,
    Latent,
    LoraRef,
    ModelRef,
    Result,
    RunHooks,
    SampleWork,
    Stopped,
    Work,
)

#: what is copied once at start to learn the speed of the link, at most
LINK_PROBE_BYTES = 32 << 20
#: of a small device, no more than this part is for copies that are made ahead
AHEAD_SHARE = 32


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What one engine is opened with.

    device        "cuda", "sim" or "cpu"
    index         which device of that kind this process sees
    budget_bytes  most that weights, scratch and activations may take together; None is what the device has
    threads       CPU threads of torch; the same everywhere, since it can change the last bits of a result
    """

    device: str
    index: int = 0
    budget_bytes: int | None = None
    threads: int = 1


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """How an engine introduces itself."""

    capacity_bytes: int
    link_bytes_per_second: float
    device_name: str


class Engine:
    """One GPU's worth of models. Open with `Engine.open`, end with `close`."""

    def __init__(
        self,
        device: OpenDevice,
        facts: EngineFacts,
        road: UploadRoad,
        attention: tuple[AttentionBackend, ...] = (),
    ) -> None:
        self._device = device
        self._facts = facts
        self._vram = VramManager(facts.capacity_bytes)
        self._road = road
        self._tools = ComputeTools(device.memory.ledger, road, attention=attention)
        self._tokenizer = ClipTokenizer.load()
        self._models: dict[str, OpenModel] = {}
        self._patchers: dict[ComponentKey, ModelPatcher] = {}

    @classmethod
    def open(cls, settings: EngineSettings) -> Engine:
        """Take a device. Sets torch's thread count for this process.

        Raises UserError when there is no such device.
        """
        torch.set_num_threads(settings.threads)
        device = open_device(settings.device, settings.index, settings.budget_bytes)
        capacity_bytes = min(device.memory.total_bytes(), settings.budget_bytes or device.memory.total_bytes())
        link = _measure_link(device.torch_device, capacity_bytes)
        road = UploadRoad.open(device.torch_device, ahead_bytes=min(AHEAD_BYTES, capacity_bytes // AHEAD_SHARE))
        capabilities = detect_capabilities(device.kind, settings.index, capacity_bytes)
        # copies that are made ahead are outside of what plans know of
        facts = EngineFacts(capacity_bytes - road.ahead_bytes, link, device.name)
        return cls(device, facts, road, attention_priority(capabilities))

    def introduce(self) -> EngineFacts:
        """What this engine can hold and how fast bytes get there."""
        return self._facts

    def residency(self) -> Residency:
        """Which weights are on the device."""
        return self._vram.residency()

    def run(
        self, task: TaskSpec, work: Work, inputs: tuple[Result, ...], hooks: RunHooks, fresh: bool = False
    ) -> tuple[Result, RunCost]:
        """Do `work` and say what it cost. `task` carries the sizes that were planned with.

        `fresh` takes everything off the device first (a second try after running out of memory).
        Raises DoesNotFit, torch.OutOfMemoryError, Stopped, or a UserError about a file; residency is exact afterwards.
        """
        if fresh:
            self._vram.unload_all()
        if hooks.should_stop():
            raise Stopped
        memory = self._device.memory
        memory.reset_peak()
        patcher = self._patcher(work)
        uses = [(patcher, patcher.use(task.uses[0].passes))]
        started = time.perf_counter()
        with self._vram.lease(uses, task.activation_bytes) as lease:
            loaded = time.perf_counter()
            crossed_bytes = memory.transfers().h2d_bytes
            result = self._run_stage(work, inputs, patcher, hooks)
            ended = time.perf_counter()
            streamed_bytes = memory.transfers().h2d_bytes - crossed_bytes if lease.plan.streamed_bytes else 0
            return result, _cost(lease, loaded - started, ended - loaded, streamed_bytes, memory.peak_bytes())

    def patcher(self, model: ModelRef, role: Role, loras: Sequence[LoraRef] = ()) -> ModelPatcher:
        """A clone over one component of `model`, with the patches of `loras`. Opens the file when it is new."""
        opened = self._models.get(model.sha256)
        if opened is None:
            opened = self._models[model.sha256] = OpenModel(model, self._device.kind.value)
        component = opened.component(role)
        patches = opened.patch_set(role, loras)
        base = self._patchers.get(component.key)
        if base is None:
            base = ModelPatcher.of(
                component.key,
                role,
                component.built.module,
                self._device.torch_device,
                component.form,
                self._tools,
            )
            self._patchers[component.key] = base
            self._vram.add(base)
        clone = base.clone()
        clone.patches = patches
        return clone

    def close(self) -> None:
        """Take every byte off the device, and give back what streaming took of the host. Idempotent."""
        self._vram.unload_all()
        self._road.close()

    def _patcher(self, work: Work) -> ModelPatcher:
        match work:
            case EncodeWork():
                return self.patcher(work.model, Role.TEXT_ENCODER, work.loras)
            case SampleWork():
                return self.patcher(work.model, Role.DIFFUSION_MODEL, work.loras)
            case DecodeWork():
                return self.patcher(work.model, Role.VAE)

    def _run_stage(self, work: Work, inputs: tuple[Result, ...], patcher: ModelPatcher, hooks: RunHooks) -> Result:
        match work:
            case EncodeWork():
                return encode(work, patcher, self._tokenizer, hooks)
            case SampleWork():
                latent = self._models[work.model.sha256].checkpoint.latent
                return sample(work, _encoded(inputs), patcher, latent, hooks)
            case DecodeWork():
                latent = self._models[work.model.sha256].checkpoint.latent
                return decode(_latent(inputs), patcher, latent, hooks)


def _encoded(inputs: tuple[Result, ...]) -> tuple[Encoded, ...]:
    assert all(isinstance(i, Encoded) for i in inputs), f"sampling reads encoded texts, not {inputs}"
    return tuple(i for i in inputs if isinstance(i, Encoded))


def _latent(inputs: tuple[Result, ...]) -> Latent:
    (latent,) = inputs
    assert isinstance(latent, Latent), f"decoding reads a latent, not {latent}"
    return latent


def _cost(lease: Lease, load_seconds: float, run_seconds: float, streamed_bytes: int, peak_bytes: int) -> RunCost:
    return RunCost(
        load_seconds=load_seconds,
        run_seconds=run_seconds,
        uploaded_bytes=lease.uploaded_bytes,
        streamed_bytes=streamed_bytes,
        peak_bytes=peak_bytes,
        resident=lease.all_resident,
        patch_switches=lease.patch_switches,
    )


def _measure_link(device: torch.device, capacity_bytes: int) -> float:
    """Host to device, bytes a second: one copy, after a small one that wakes the device."""
    probe = torch.zeros(min(LINK_PROBE_BYTES, capacity_bytes // 4), dtype=torch.uint8)
    probe[:1].to(device)
    started = time.perf_counter()
    copied = probe.to(device, copy=True)
    copied[-1].item()  # waits for the copy
    return probe.nbytes / max(time.perf_counter() - started, 1e-9)
