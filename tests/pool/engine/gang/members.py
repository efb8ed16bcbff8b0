"""Real processes that share runs: each has an engine of its own, on the simulated or the CPU device."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.engine import EngineSettings
from modelpool.pool.values.core.sampling_facts import FirstFrameMode
from modelpool.pool.values.core.stage_params import (
    Encoded,
    EncodeImageParams,
    ImagePixels,
    Latent,
    RunHooks,
    RunState,
    SamplerState,
    VideoBeginning,
)
from modelpool.pool.values.specs.gang import ANY_GPUS, Gang
from modelpool.pool.values.specs.spec import Role, RunCost, WorkerId
from modelpool.pool.weights.plan.eviction_plan import needed_bytes
from tests.pool.families.whole_transformer import STEPS, Whole

if TYPE_CHECKING:
    from tests.pool.families.tiny_model import TinyModel

#: a process of the tests may import, load and sample for so long
ANSWER_SECONDS = 120.0
BUDGET_BYTES = 512 << 20
_GANGS = itertools.count(1)


@dataclass(frozen=True)
class Wish:
    """What a member samples.

    gang          None: alone
    lora          whether with the LoRA of the folder
    step_seconds  how long each step takes at least
    patched       whether a weight on this member's device is changed first
    texts         texts of guidance: 1 is the prompt alone
    gpus          `SampleParams.gpus`
    begins        whether a video begins with an image
    switch        steps of the first of two experts, which ends with its state
    stops_after   seconds after which this member is asked to stop, as by another controller; 0: never
    resume        the state that it goes on from
    """

    gang: Gang | None
    steps: int = 3
    lora: bool = False
    step_seconds: float = 0.0
    patched: bool = False
    texts: int = 2
    gpus: int = ANY_GPUS
    begins: bool = False
    switch: int = 0
    stops_after: float = 0.0
    resume: RunState | None = None


@dataclass(frozen=True)
class Answer:
    """What a member made, or how it failed."""

    #: its values, and its sound's
    latent: NDArray[np.float32] | None
    error: str = ""
    suspects: tuple[int, ...] = ()
    state: Any = None
    seconds: float = 0.0
    cost: RunCost = field(default_factory=RunCost)
    #: weights on its device after the run, and all memory that is used there, without garbage
    resident_bytes: int = 0
    used_bytes: int = 0


class Member:
    """One process. It answers wishes in order."""

    def __init__(self, folder: Path, family: Any, streams: bool, device: str, index: int, memory: _Memory) -> None:
        # a fork has all imports done, but no CUDA
        context: Any = multiprocessing.get_context("spawn" if device == "cuda" else "fork")
        self._end, other = context.Pipe()
        args = (other, folder, family, streams, device, index, memory)
        self.process = context.Process(target=_serve, args=args, daemon=True)
        self.process.start()
        other.close()

    def ask(self, wish: Wish) -> None:
        self._end.send(wish)

    def tell(self, what: str) -> Any:
        """The answer to "address", "weight bytes", "links" or "texts"."""
        self._end.send(what)
        return self.value()

    def value(self) -> Any:
        assert self._end.poll(ANSWER_SECONDS), f"no answer of {self.process.pid}"
        try:
            return self._end.recv()
        except (EOFError, ConnectionResetError):  # the second if it ended with a wish that it had not read
            self.process.join(ANSWER_SECONDS)
            raise AssertionError(f"{self.process.pid} has ended, with exit code {self.process.exitcode}") from None

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
            self.process.kill()
        self.process.join()
        self._end.close()


@dataclass
class Members:
    """The processes of a test, and who leads next."""

    each: list[Member]

    def gangs(self, ranks: Sequence[int] | None = None) -> list[Gang]:
        """A new gang of some members, as each of them has it."""
        chosen = list(range(len(self.each))) if ranks is None else list(ranks)
        names = tuple(WorkerId(f"gpu-{place}") for place in chosen)
        address = self.each[chosen[0]].tell("address")
        number = next(_GANGS)
        return [Gang(f"gang {number}", names, rank, address) for rank in range(len(chosen))]

    def texts(self) -> int:
        """How many texts the model reads with guidance."""
        count: int = self.each[0].tell("texts")
        return count

    def sample(self, wish: Wish, ranks: Sequence[int] | None = None) -> list[Answer]:
        """Have some members sample in a gang."""
        self.begin(wish, ranks)
        return self.answers(ranks)

    def begin(self, wish: Wish, ranks: Sequence[int] | None = None) -> None:
        chosen = range(len(self.each)) if ranks is None else ranks
        for place, gang in zip(chosen, self.gangs(ranks), strict=True):
            self.each[place].ask(replace(wish, gang=gang))

    def answers(self, ranks: Sequence[int] | None = None) -> list[Answer]:
        return [self.each[place].value() for place in (range(len(self.each)) if ranks is None else ranks)]

    def alone(self, wish: Wish, place: int = 0) -> Answer:
        self.each[place].ask(wish)
        answer: Answer = self.each[place].value()
        return answer


@contextmanager
def members(
    count: int,
    folder: Path,
    family: Any,
    *,
    streams: bool | Sequence[bool] = False,
    device: str = "sim",
    times_too_large: float = 0.0,
    peer_bytes_per_second: float | None = None,
) -> Iterator[Members]:
    """Some processes with a tiny model each, from one file; on CUDA each with a GPU of its own. `streams`: all of them,
    or each. `times_too_large`: the diffusion model, for what a member has for weights beside a run."""
    each_streams = [streams] * count if isinstance(streams, bool) else list(streams)
    first = Whole(folder, family, settings=EngineSettings("cpu"))
    write_lora(first, folder / "loras")
    memory = _Memory(BUDGET_BYTES, peer_bytes_per_second)
    if times_too_large:
        memory = _memory_for(first, times_too_large, peer_bytes_per_second)
    first.engine.close()
    started: list[Member] = []
    try:
        for place in range(count):
            index = place if device == "cuda" else 0  # each process has simulated devices of its own
            started.append(
                Member(folder, family, each_streams[place], device, index, memory)
            )  # those that are there are closed
        yield Members(started)
    finally:
        for member in started:
            member.close()


@dataclass(frozen=True)
class _Memory:
    """The memory of each simulated device, `EngineSettings.peer_bytes_per_second`, and for a model that is too large
    the activations of a run that reads one text at a time, and texts: there is no room for text encoders."""

    budget_bytes: int
    peer_bytes_per_second: float | None
    sampling_bytes: int = 0
    texts: tuple[Encoded, ...] = ()


def _memory_for(whole: Whole, times_too_large: float, peer_bytes_per_second: float | None) -> _Memory:
    """The memory in which a run has room for so small a part of its weights."""
    work = whole.sampling(1)
    use = whole.catalog.use(whole.model, Role.DIFFUSION_MODEL, ())
    sampling_bytes = whole.catalog.figures.activation_bytes(whole.model, work)
    spec = whole.engine.patcher(whole.model, Role.DIFFUSION_MODEL).spec()
    budget_bytes = needed_bytes((use,), sampling_bytes) + int(spec.weight_bytes / times_too_large)
    return _Memory(budget_bytes, peer_bytes_per_second, sampling_bytes, whole.texts())


def write_lora(whole: Whole | TinyModel, folder: Path) -> None:
    """Write "style", a LoRA of the diffusion model."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, weight in whole.module(Role.DIFFUSION_MODEL).named_parameters():
        if name.endswith(("to_q.weight", "to_v.weight")) and "refiner" not in name:
            out, into = weight.shape
            stem = f"transformer.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(4, into, generator=generator) * 0.2
            tensors[f"{stem}.lora_B.weight"] = torch.randn(out, 4, generator=generator) * 0.2
    save_file(tensors, folder / "style.safetensors")


def _serve(
    pipe: Connection, folder: Path, family: Any, streams: bool, device: str, index: int, memory: _Memory
) -> None:
    """Answer wishes until the other end closes."""
    torch.set_num_threads(1)
    from modelpool.actors.worker.gang_store import GangStore
    from modelpool.pool.catalog.catalog import Catalog

    policy = {"vram_policy": VramPolicy.NONE} if streams else {}
    budget_bytes = memory.budget_bytes if device == "sim" else None
    settings = EngineSettings(device, index, budget_bytes, peer_bytes_per_second=memory.peer_bytes_per_second, **policy)
    whole = Whole(folder, family, write=False, settings=settings)
    whole.catalog = Catalog((folder,), (folder / "loras",), device)
    whole.model = whole.catalog.find_model("tiny")
    whole.passes, whole.sampling_bytes = STEPS if memory.texts else 1, memory.sampling_bytes
    store, texts = GangStore(), memory.texts or whole.texts()
    while True:
        try:
            wish = pipe.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)
        if wish == "address":
            pipe.send(store.address("127.0.0.1"))
        elif wish == "weight bytes":
            pipe.send(whole.engine.patcher(whole.model, Role.DIFFUSION_MODEL).spec().weight_bytes)
        elif wish == "links":
            pipe.send([each.link for _, each in whole.engine._share._measured.items()])
        elif wish == "texts":
            pipe.send(len(texts))
        else:
            pipe.send(_answer(whole, texts, wish))


def _answer(whole: Whole, texts: tuple[Encoded, ...], wish: Wish) -> Answer:
    loras = (whole.catalog.find_lora("style", 1.0),) if wish.lora else ()
    hooks = RunHooks(lambda done, steps: None, _slow(wish.step_seconds, wish.stops_after))
    began = time.monotonic()
    whole.gang, whole.gpus = wish.gang, wish.gpus
    try:
        with _changed(whole, loras) if wish.patched else _nothing():
            read = texts[: wish.texts]  # some families read one only
            work = whole.sampling(len(read), loras, wish.begins, wish.steps)
            work = replace(work, schedule=replace(work.schedule, switch=wish.switch))
            beginning = [_beginning(whole)] if wish.begins else []
            made = whole.run(work, *read, *beginning, hooks=hooks, resume=wish.resume)
        assert isinstance(made, Latent | SamplerState)
        values = np.concatenate([array.ravel() for array in made.arrays])
        resident_bytes, used_bytes = _memory_of(whole)
        return Answer(
            values,
            seconds=time.monotonic() - began,
            cost=whole.cost,
            resident_bytes=resident_bytes,
            used_bytes=used_bytes,
        )
    except Exception as failed:
        text = f"{type(failed).__name__}: {failed}"
        if os.environ.get("GANG_TRACE"):
            text += "".join(traceback.format_exception(failed)[-6:])[-1500:]
        suspects, state = getattr(failed, "suspects", ()), getattr(failed, "state", None)
        seconds = time.monotonic() - began
    # without the frames of the error
    return Answer(None, text, suspects, state, seconds, RunCost(), *_memory_of(whole))


def _memory_of(whole: Whole) -> tuple[int, int]:
    """Weights on the device, and all memory in use there."""
    gc.collect()
    memory = whole.engine.device.memory
    return whole.engine.residency().used_bytes, memory.total_bytes() - memory.free_bytes()


def _beginning(whole: Whole) -> Latent:
    """The latent of an image, as the model reads it."""
    width, height = whole.sides
    pixels = np.random.default_rng(3).integers(0, 255, (height, width, 3), np.uint8)
    video = whole.family.sampling.video
    concatenated = video is not None and video.begins is FirstFrameMode.CONCATENATED
    work = EncodeImageParams(whole.model, width, height, video=VideoBeginning(whole.frames) if concatenated else None)
    made = whole.run(work, ImagePixels(pixels))
    assert isinstance(made, Latent)
    return made


def _slow(seconds: float, stops_after: float = 0.0) -> Callable[[], bool]:
    """A `should_stop` that takes its time: it is asked at layers and steps."""
    began = time.monotonic()

    def should_stop() -> bool:
        time.sleep(seconds)
        return 0.0 < stops_after < time.monotonic() - began

    return should_stop


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _changed(whole: Whole, loras: Any) -> Iterator[None]:
    """Change one weight of the diffusion model where it is: on the device, or on the host if it streams."""
    patcher = whole.engine.patcher(whole.model, Role.DIFFUSION_MODEL, loras)
    modules = dict(patcher.module.named_modules())
    resident = [name for name in sorted(patcher.resident_modules()) if hasattr(modules[name], "weight")]
    hosts = patcher.host_parameters
    weight = modules[resident[0]].weight if resident else hosts[min(name for name in hosts if "weight" in name)]
    before = weight.detach().clone()
    with torch.no_grad():
        weight.add_(0.01)
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(before)
