"""An engine and a catalog without torch, for tests of everything around them. Importable in Ray's workers too.

Results are pure functions of work and inputs, so that a test can say what an image must be. What an engine does beside
that is asked for in the prompt, by the words below.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from modelpool.actors.client.client import ModelPool
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.control.pool_plan import NodeSettings, PoolPlan
from modelpool.pool.catalog.registry.listings import FileNames
from modelpool.pool.families.two_experts import TWO_EXPERTS
from modelpool.pool.families.unet_families import CASCADES
from modelpool.pool.inference.operations.operate import operate
from modelpool.pool.inference.operations.own_nodes import NO_NODES, OpenedNode
from modelpool.pool.models.text.chunks import embeddings_in
from modelpool.pool.values.core.batch_gains import BatchedWork, MeasuredGain
from modelpool.pool.values.core.errors import AdapterMismatch, UserError, unknown_name
from modelpool.pool.values.core.prompt_tokens import TokenizedPrompt
from modelpool.pool.values.core.sampling_facts import (
    PLAIN_SAMPLING,
    AudioFacts,
    FirstFrameMode,
    ImageConcat,
    ModelDefaults,
    SamplingFacts,
    VideoFacts,
)
from modelpool.pool.values.core.stage_params import (
    AudioSamples,
    BatchMember,
    ControlMaskMode,
    ControlRef,
    DecodeParams,
    EmbeddingRef,
    Encoded,
    EncodeImageParams,
    EncodeParams,
    FoundImagePrompt,
    ImagePixels,
    ImagePromptRef,
    Latent,
    LoraRef,
    Mask,
    ModelRef,
    OperationParams,
    Outcome,
    Result,
    RunHooks,
    RunState,
    SampleParams,
    SamplerState,
    StageParams,
    Stopped,
    UpscaleParams,
    UpscalerRef,
    VideoFrames,
    control_key,
    upscaler_key,
)
from modelpool.pool.values.core.task_inputs import TaskInputs
from modelpool.pool.values.specs.eviction_hints import EvictionHints
from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentSpec,
    ComponentUse,
    ExecutionMode,
    Role,
    RunCost,
    TaskSpec,
    WorkerId,
)
from modelpool.pool.weights.plan.eviction_plan import Residency, plan
from modelpool.pool.weights.plan.preload_plan import RunningLease, plan_preload
from tests.pool.input_names import results_read

MIB = 1 << 20
CAPACITY_BYTES = 64 * MIB
SIZES = {Role.TEXT_ENCODER: 8 * MIB, Role.DIFFUSION_MODEL: 20 * MIB, Role.VAE: 4 * MIB}
NATIVE_SIZE = (64, 64)
#: name -> roles that the LoRA changes
LORAS = {
    "light": (Role.DIFFUSION_MODEL,),
    "thick": (Role.TEXT_ENCODER, Role.DIFFUSION_MODEL),
    "words": (Role.TEXT_ENCODER,),
    "odd": (Role.TEXT_ENCODER, Role.DIFFUSION_MODEL),
}
#: the model that is told which part of an image to make anew
FILLS_HOLES = "filler"
#: the upscaler
UPSCALER = "double"
CONTROLS = ("canny", "depth", "union", "inpaint", "repaint", "beside")
#: those that read latents; the first has modes
READS_LATENT = ("union", "beside")
#: those that are told a hole, and how
HOLES = {"inpaint": ControlMaskMode.ALWAYS, "repaint": ControlMaskMode.MASKED, "beside": ControlMaskMode.SEPARATE}
#: models of videos, one that may begin with an image and one that must, and one of audio
VIDEOS, BEGINS, AUDIOS = "films", "moves", "sounds"
#: a model that makes no image's latent, and the one that makes one of it
HANDS_ON, DECODES = "small", "large"
#: a model that is two diffusion models
PAIR = "pair"
MODELS = ("shapes", "forms", FILLS_HOLES, VIDEOS, BEGINS, AUDIOS, HANDS_ON, DECODES, PAIR)
SAMPLING = {
    FILLS_HOLES: SamplingFacts(image_concat=ImageConcat.INPAINT),
    VIDEOS: SamplingFacts(side_multiple=16, video=VideoFacts(17, 4, 8.0, FirstFrameMode.KEPT)),
    BEGINS: SamplingFacts(side_multiple=16, video=VideoFacts(9, 4, 16.0, FirstFrameMode.CONCATENATED)),
    AUDIOS: SamplingFacts(audio=AudioFacts(2.0, 8000, 64)),
    HANDS_ON: CASCADES["cascade_c"].sampling,
    DECODES: CASCADES["cascade_b"].sampling,
    PAIR: TWO_EXPERTS["wan_t2v"].sampling,
}
#: frames per second of videos that have sound
SOUNDING = 25.0
#: a LoRA of which one key belongs to no model
PARTIAL_LORA = "odd"

# What a prompt may ask of the engine.
FAIL = "FAIL"  #: raise an error of ours while sampling
ENDLESS = "ENDLESS"  #: sample until stopped
HOLD_ONCE = "HOLD-ONCE"  #: the first attempt says so and waits to be killed
GATED = "GATED"  #: wait at the gate after the first step
ONLY_FIRST_FAILS = "FLAKY"  #: run out of memory the first time


def _alone(state: RunState) -> tuple[RunState, ...]:
    return (state,)


def sha(text: str) -> str:
    """A made-up file hash."""
    return hashlib.sha256(text.encode()).hexdigest()


def component_key(model: ModelRef, role: Role) -> ComponentKey:
    """What the components of a fake model are called."""
    return ComponentKey(f"{model.name}/{role.value}@{model.sha256[:10]}")


class FakeControls:
    """ControlNets without files."""

    def find(self, name: str, strength: float, start: float, end: float, mode: str | int | None = None) -> ControlRef:
        if name not in CONTROLS:
            raise unknown_name("ControlNet", name, CONTROLS)
        number = None if mode is None else ("canny", "depth").index(mode) if isinstance(mode, str) else mode
        place = f"/controls/{name}.safetensors"
        own = strength, start, end, number, name in READS_LATENT
        return ControlRef(name, place, sha(name), *own, mask_mode=HOLES.get(name))

    def use_with(self, model: ModelRef, control: ControlRef, passes: int = 1) -> tuple[ComponentSpec, ComponentUse]:
        key = control_key(control)
        return ComponentSpec(key, Role.CONTROLNET, 2 * MIB, 2 * MIB), ComponentUse(key, MIB, passes=passes)


class FakeUpscalers:
    """One upscaler without a file, which doubles the sides."""

    def find(self, name: str) -> UpscalerRef:
        if name != UPSCALER:
            raise unknown_name("upscaler", name, (UPSCALER,))
        return UpscalerRef(name, f"/upscalers/{name}.pth", sha(name), 2)

    def needs(self, work: UpscaleParams) -> tuple[ComponentSpec, ComponentUse]:
        key = upscaler_key(work.model)
        return ComponentSpec(key, Role.UPSCALER, MIB, MIB), ComponentUse(key, MIB)

    def execution_modes(self, work: UpscaleParams) -> tuple[ExecutionMode, ...]:
        return (ExecutionMode(work.width * work.height),)

    def run_seconds(self, work: UpscaleParams) -> float:
        return 0.001


class FakeImagePrompts:
    """No image prompt adapters."""

    def find(self, name: str, images: int, encoder: str = "") -> FoundImagePrompt:
        raise unknown_name("image prompt adapter", name, ())

    def encoder_for(self, model: ModelRef, encoder: str = "") -> ModelRef:
        return ModelRef(encoder or "vision", "/vision.safetensors", sha(encoder or "vision"))

    def use_with(self, model: ModelRef, prompt: ImagePromptRef) -> tuple[ComponentSpec, ComponentUse]:
        raise AssertionError(f"asked for {prompt}")


class FakeEmbeddings:
    """One textual inversion without a file."""

    def of(self, text: str, loras: Sequence[LoraRef] = ()) -> tuple[EmbeddingRef, ...]:
        return tuple(EmbeddingRef(name, f"/{name}.safetensors", sha(name), 2) for name in embeddings_in(text))


class FakeCatalog:
    """Two models and three LoRAs without files."""

    #: measured, of batches
    gains: tuple[MeasuredGain, ...] = ()
    controls = FakeControls()
    upscalers = FakeUpscalers()
    image_prompts = FakeImagePrompts()
    embeddings = FakeEmbeddings()
    own_nodes: Mapping[str, OpenedNode] = NO_NODES

    def models(self) -> tuple[object, ...]:
        return tuple(MODELS)

    def loras(self) -> tuple[object, ...]:
        return tuple(LORAS)

    def file_names(self) -> FileNames:
        return FileNames(upscalers=(UPSCALER,))

    def tiny_decoders(self) -> tuple[tuple[str, str], ...]:
        return (("taesd", "/models/taesd.safetensors"),)

    def find_model(self, name: str) -> ModelRef:
        if name not in MODELS:
            raise unknown_name("model", name, MODELS)
        return ModelRef(name, f"/models/{name}.safetensors", sha(name))

    def find_decoder(self, model: ModelRef, name: str = "") -> ModelRef:
        return self.find_model(name or DECODES)

    def batched_work(self, model: ModelRef) -> BatchedWork:
        return BatchedWork(model.name, "cpu", 1000, self.gains)

    def lora_warning(self, model: ModelRef, lora: LoraRef) -> str | None:
        return "3 of 4 keys matched, not used: odd" if lora.name == PARTIAL_LORA else None

    def reference_factor(self, lora: LoraRef) -> int:
        return 1

    def find_lora(self, name: str, strength: float) -> LoraRef:
        if name == "alien":
            raise AdapterMismatch("alien: 0 of 12 keys belong to this model")
        if name not in LORAS:
            raise unknown_name("LoRA", name, LORAS)
        return LoraRef(name, f"/loras/{name}.safetensors", sha(name), strength)

    def components(self, model: ModelRef) -> dict[Role, ComponentSpec]:
        second = {Role.DIFFUSION_MODEL_2: SIZES[Role.DIFFUSION_MODEL]} if model.name == PAIR else {}
        return {role: ComponentSpec(component_key(model, role), role, n, n) for role, n in (SIZES | second).items()}

    def model_defaults(self, model: ModelRef) -> ModelDefaults:
        return ModelDefaults(*NATIVE_SIZE, SAMPLING.get(model.name, PLAIN_SAMPLING))

    def use(self, model: ModelRef, role: Role, loras: tuple[LoraRef, ...], passes: int = 1) -> ComponentUse:
        digest = sha(repr(loras))[:10] if loras else ""
        adapters = tuple(self.lora_spec(lora).key for lora in loras)
        return ComponentUse(component_key(model, role), MIB, digest, 2 * MIB if loras else 0, passes, adapters)

    def lora_spec(self, lora: LoraRef) -> ComponentSpec:
        return ComponentSpec(ComponentKey(f"{lora.name}/lora@{lora.sha256[:10]}"), Role.LORA, MIB, MIB)

    def touches(self, model: ModelRef, role: Role, lora: LoraRef) -> bool:
        halves = {Role.DIFFUSION_MODEL: "high", Role.DIFFUSION_MODEL_2: "low"}
        named = Role.DIFFUSION_MODEL if role is Role.DIFFUSION_MODEL_2 else role
        return named in LORAS[lora.name] and (not lora.noise or halves.get(role) == lora.noise)

    def tokenize(self, work: EncodeParams) -> TokenizedPrompt:
        return TokenizedPrompt((), 77 * (1 + len(work.text) // 300), is_usual=len(work.text) < 300)

    def activation_bytes(self, model: ModelRef, work: StageParams, context_tokens: Sequence[int] = ()) -> int:
        size = getattr(work, "shape", work)
        return getattr(size, "width", 64) * getattr(size, "height", 64) // 4 + sum(context_tokens)

    def divisions(
        self, model: ModelRef, work: StageParams, context_tokens: Sequence[int] = ()
    ) -> tuple[ExecutionMode, ...]:
        if isinstance(work, EncodeParams):
            return ()
        return (ExecutionMode(self.activation_bytes(model, work, context_tokens) * 999 // 1000, batch=1, slowdown=1.5),)

    def execution_modes(
        self, model: ModelRef, work: StageParams, context_tokens: Sequence[int] = ()
    ) -> tuple[ExecutionMode, ...]:
        whole = ExecutionMode(self.activation_bytes(model, work, context_tokens))
        return (whole, *self.divisions(model, work, context_tokens))

    def learn(self, task: TaskSpec, cost: RunCost) -> None:
        pass

    def run_seconds(self, model: ModelRef, work: StageParams) -> float:
        return 0.001


@dataclass(frozen=True)
class Facts:
    """See `pool.engine.engine_capacity.EngineFacts`."""

    capacity_bytes: int
    link_bytes_per_second: float
    device_name: str
    holds_shares: bool = False
    gang_link_bytes_per_second: float = 0.0


class OutOfMemory(UserError):
    """Stands in for torch's in engines that do without torch."""


class FixedCapacity:
    """The memory of an engine that never has more."""

    may_grow = False

    def grow(self) -> None:
        raise AssertionError("nobody was told that it could")


class FakeEngine:
    """Runs by arithmetic. `folder` holds the gates of the prompts that ask for them."""

    def __init__(self, folder: Path | None = None, image_side: int = 0) -> None:
        self._folder = folder
        self._image_side = image_side
        self._residency = Residency(CAPACITY_BYTES)
        self.capacity = FixedCapacity()

    def introduce(self) -> Facts:
        return Facts(CAPACITY_BYTES, 1e9, "fake")

    def residency(self) -> Residency:
        return self._residency

    def close(self) -> None:
        self._residency = Residency(self._residency.capacity_bytes)

    def run(
        self,
        task: TaskSpec,
        work: StageParams,
        inputs: Mapping[str, Result],
        hooks: RunHooks,
        fresh: bool = False,
        needed_next: tuple[ComponentKey, ...] = (),
        resume: RunState | None = None,
    ) -> tuple[Result, RunCost]:
        if fresh:
            self._residency = Residency(CAPACITY_BYTES)
        specs = {use.component: spec_of(work.model, use.component) for use in task.uses}
        hints = EvictionHints(needed_next)
        planned = plan(self._residency, task.uses, specs, task.activation_bytes, hints=hints)
        self._residency = planned.after
        started = time.perf_counter()
        paused = self._sample(inputs, work, hooks, resume) if isinstance(work, SampleParams) else None
        result = paused or result_of(work, inputs, self._image_side)
        cost = RunCost(
            run_seconds=time.perf_counter() - started,
            uploaded_bytes=planned.upload_bytes,
            streamed_bytes=planned.streamed_bytes,
            resident=planned.all_resident,
            patch_switches=len(planned.switched),
        )
        return result, cost

    def begin(self, *args: Any, **named: Any) -> Callable[[], tuple[Result, RunCost]]:
        made = self.run(*args, **named)
        return lambda: made

    @property
    def is_pending(self) -> bool:
        return False

    def poll_pending(self) -> None: ...

    def release_pending(self) -> None: ...

    def load_weights(
        self,
        model: ModelRef,
        roles: Sequence[Role],
        kept: Sequence[ComponentKey] = (),
        should_stop: Callable[[], bool] = lambda: False,
    ) -> int:
        keys = [component_key(model, role) for role in roles]
        uses, specs = [ComponentUse(key, 0) for key in keys], {key: spec_of(model, key) for key in keys}
        moves = plan_preload(self._residency, RunningLease(frozenset(kept), 0), uses, specs, 0)
        self._residency = moves.after(self._residency)
        return moves.upload_bytes

    def run_batch(
        self, members: Sequence[BatchMember], needed_next: tuple[ComponentKey, ...] = ()
    ) -> tuple[Outcome, ...]:
        """One after the other, by the same arithmetic; each has what it has alone."""
        outcomes: list[Outcome] = []
        for member in members:
            try:
                alone = member.task, member.work, member.inputs, member.hooks
                result, cost = self.run(*alone, needed_next=needed_next, resume=member.resume)
                outcomes.append((result, replace(cost, batched=len(members))))
            except Exception as raised:
                outcomes.append(raised)
        return tuple(outcomes)

    def _sample(
        self, inputs: Mapping[str, Result], work: SampleParams, hooks: RunHooks, resume: RunState | None
    ) -> RunState | None:
        """The steps; its state where it is asked to pause."""
        text = text_of(inputs["positive"])
        if FAIL in text:
            raise RuntimeError("the engine was asked to fail")
        if HOLD_ONCE in text and self._first_time("held"):
            self._say("reached", str(os.getpid()))
            self._hear("never")
        first = 0 if resume is None else resume.step
        step, steps = first, work.steps_run
        while step < steps or ENDLESS in text:
            if hooks.should_stop():
                raise Stopped
            if ENDLESS in text:
                time.sleep(0.001)  # what each step reports is kept
            if step > first and step < steps:
                state = RunState(step, steps, SamplerState(np.full((4, 1, 1), step, np.float32)))
                hooks.checkpoint(partial(_alone, state))
                if hooks.should_pause():
                    return state
            step += 1
            hooks.on_step(step, step + 1 if ENDLESS in text else steps)
            if ENDLESS in text and step == 1:
                self._say("reached", str(os.getpid()))
            if GATED in text and step == 1:
                self._hear("gate")
        return None

    def _first_time(self, name: str) -> bool:
        assert self._folder is not None
        try:
            (self._folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _say(self, pipe: str, word: str) -> None:
        """Write a line to a named pipe; waits for a reader. Without a folder nobody reads."""
        if self._folder is not None:
            (self._folder / pipe).write_text(f"{word}\n")

    def _hear(self, pipe: str) -> str:
        """Read from a named pipe; waits for a writer."""
        assert self._folder is not None
        return (self._folder / pipe).read_text()


def spec_of(model: ModelRef | UpscalerRef, key: ComponentKey) -> ComponentSpec:
    """The sizes that `FakeCatalog` tells."""
    if isinstance(model, UpscalerRef):
        return FakeUpscalers().needs(UpscaleParams(model, 1, 1, 2, 2))[0]
    catalog = FakeCatalog()
    controls = [catalog.controls.use_with(model, catalog.controls.find(name, 1.0, 0.0, 1.0))[0] for name in CONTROLS]
    return next(spec for spec in (*catalog.components(model).values(), *controls) if spec.key == key)


def text_of(encoded: Result) -> str:
    """The text that a fake `Encoded` carries."""
    assert isinstance(encoded, Encoded)
    return bytes(encoded.context_LD[0].astype(np.uint8)).decode()


def result_of(work: StageParams, inputs: Mapping[str, Result], image_side: int = 0) -> Result:
    """What a fake engine makes. Images have `image_side` where one is given, else the size asked for."""
    match work:
        case EncodeParams():
            return Encoded(np.frombuffer(work.text.encode(), np.uint8).astype(np.float32)[None])
        case SampleParams():
            seed = int.from_bytes(hashlib.sha256(_bytes_of_all(inputs) + repr(work).encode()).digest()[:8], "big")
            samples = np.random.default_rng(seed).random((4, work.shape.height // 8, work.shape.width // 8), np.float32)
            assert isinstance(inputs.get("sampler_state"), SamplerState) == work.schedule.resumes, (
                f"{work} reads {inputs}"
            )
            halfway = SamplerState(samples, (1.0, 0.9), np.stack([samples + 1, samples + 2]), samples + 3)
            return halfway if work.schedule.switch and not work.schedule.low_noise else Latent(samples)
        case EncodeImageParams():
            seed = int.from_bytes(hashlib.sha256(_bytes_of_all(inputs) + repr(work).encode()).digest()[:8], "big")
            return Latent(np.random.default_rng(seed).random((4, work.height // 8, work.width // 8), np.float32))
        case DecodeParams():
            shape = work.shape
            height, width = (image_side or shape.height), (image_side or shape.width)
            seed = int.from_bytes(hashlib.sha256(_bytes_of_all(inputs)).digest()[:8], "big")
            random = np.random.default_rng(seed)
            if shape.frames:
                video_shape = (shape.frames, height, width, 3)
                samples = np.sin(np.arange(8000 * shape.frames // SOUNDING)[:, None] / np.array([4, 9])).astype(
                    np.float32
                )
                sound = AudioSamples(samples * 0.5, 8000) if shape.frame_rate == SOUNDING else None
                return VideoFrames(random.integers(0, 256, video_shape, np.uint8), shape.frame_rate, sound)
            if shape.seconds:
                return AudioSamples(random.random((int(shape.seconds * 8000), 2), np.float32) * 2 - 1, 8000)
            return ImagePixels(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))
        case OperationParams():
            return operate(work, TaskInputs(inputs))
        case UpscaleParams():
            image = inputs["image"]
            assert isinstance(image, ImagePixels)
            return ImagePixels(np.resize(image.pixels_HWC, (work.out_height, work.out_width, 3)))


def _bytes_of_all(inputs: Mapping[str, Result]) -> bytes:
    """The inputs of a task with their names, so that two of them that changed places make another result."""
    return b"".join(name.encode() + bytes_of(inputs[name]) for name in sorted(inputs))


def bytes_of(result: Result) -> bytes:
    """The numbers of a result that an image depends on."""
    match result:
        case Encoded():
            return result.context_LD.tobytes()
        case Latent():
            return result.samples_CHW.tobytes()
        case SamplerState() | RunState():
            return b"".join(array.tobytes() for array in result.arrays)
        case ImagePixels():
            return result.pixels_HWC.tobytes()
        case Mask():
            return result.values_HW.tobytes()
        case VideoFrames():
            return result.frames_THWC.tobytes()
        case AudioSamples():
            return result.samples_SC.tobytes()


def image_of(
    job_works: dict, job_tasks: tuple[TaskSpec, ...], image_side: int = 0, given: dict | None = None
) -> ImagePixels:
    """The image of a cut job, made here, of the results that are `given`."""
    made: dict = dict(given or {})
    for task in job_tasks:
        made[task.task_id] = result_of(job_works[task.task_id], results_read(task, made), image_side)
    return made[job_tasks[-1].task_id]


def fake_plan(
    config: PoolConfig,
    gpu_count: int,
    can_grow: bool,
    folder: Path | None = None,
    image_side: int = 0,
    engine: type[FakeEngine] = FakeEngine,
    heartbeat_seconds: float = 3.0,
    overlaps_decode: bool = False,
) -> PoolPlan:
    """Like `plan_pool`, with fake engines on CPUs."""
    count = config.pool.workers if isinstance(config.pool.workers, int) else 2
    return PoolPlan(
        worker_ids=tuple(WorkerId(f"gpu-{i}") for i in range(count)),
        gpus_per_worker=0,
        budget_bytes=CAPACITY_BYTES,
        open_engine=partial(engine, folder, image_side),
        open_catalog=FakeCatalog,
        scheduler=config.scheduler,
        record=config.output.record,
        nodes=NodeSettings(heartbeat_seconds=heartbeat_seconds),
        overlaps_decode=overlaps_decode,
    )


@dataclass(frozen=True)
class TracedImage(ImagePixels):
    """An image that leaves a note wherever it is unpickled."""

    notes: Path = Path()

    def __reduce__(self):
        return _unpickled, (self.pixels_HWC, self.notes)


@dataclass(frozen=True)
class TracedLatent(Latent):
    """A latent that does the same."""

    notes: Path = Path()

    def __reduce__(self):
        return _unpickled_latent, (self.samples_CHW, self.notes)


def _unpickled(pixels_HWC: np.ndarray, notes: Path) -> TracedImage:
    (notes / f"picture-{os.getpid()}").touch()
    return TracedImage(pixels_HWC, notes=notes)


def _unpickled_latent(samples_CHW: np.ndarray, notes: Path) -> TracedLatent:
    (notes / f"latent-{os.getpid()}").touch()
    return TracedLatent(samples_CHW, notes=notes)


class TracingEngine(FakeEngine):
    """Makes images and latents that leave notes in the folder."""

    def run(self, *args, **kwargs) -> tuple[Result, RunCost]:
        result, cost = super().run(*args, **kwargs)
        assert self._folder is not None
        if isinstance(result, ImagePixels):
            result = TracedImage(result.pixels_HWC, notes=self._folder)
        elif isinstance(result, Latent):
            result = TracedLatent(result.samples_CHW, notes=self._folder)
        return result, cost


class GrowingEngine(FakeEngine):
    """Has twice the memory when it takes it."""

    may_grow = True

    def __init__(self, folder: Path | None = None, image_side: int = 0) -> None:
        super().__init__(folder, image_side)
        self.capacity = self

    def grow(self) -> None:
        self._residency, self.may_grow = Residency(2 * CAPACITY_BYTES), False


class TellingEngine(FakeEngine):
    """Says in its device's name where its packages come from."""

    def introduce(self) -> Facts:
        names = ("modelpool.pool", "modelpool.scheduler", "modelpool.actors", "modelpool")
        places = [str(importlib.import_module(name).__file__) for name in names]
        return Facts(CAPACITY_BYTES, 1e9, os.pathsep.join(places))


def make_pipes(folder: Path) -> Path:
    """The named pipes that fake engines speak and listen through."""
    for name in ("reached", "gate", "never"):
        os.mkfifo(folder / name)
    return folder


def start_fake_pool(name: str, workers: int = 2, record: Path | None = None, **plan) -> ModelPool:
    """A pool of fake engines on Ray, by a name of its own."""
    from modelpool.actors.client.opening import start_pool

    config = PoolConfig().override(workers=workers, name=name, record=record)
    opened = start_pool(config, partial(fake_plan, **plan), preload=())
    return ModelPool(opened.connection, opened.close, None, opened.address, node_writers=opened.node_writers)
