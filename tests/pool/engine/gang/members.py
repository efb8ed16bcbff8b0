"""Real processes that share runs: each has an engine of its own, on the simulated or the CPU device."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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
)
from modelpool.pool.values.specs.gang import ANY_GPUS, Gang
from modelpool.pool.values.specs.spec import Role, WorkerId
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.whole_transformer import Whole

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

    #: its values, and those of its sound
    latent: NDArray[np.float32] | None
    error: str = ""
    suspects: tuple[int, ...] = ()
    state: Any = None
    seconds: float = 0.0


class Member:
    """One process. It answers wishes in order."""

    def __init__(self, folder: Path, family: Any, streams: bool, device: str, index: int) -> None:
        # a fork has all imports done, but no CUDA
        context: Any = multiprocessing.get_context("spawn" if device == "cuda" else "fork")
        self._end, other = context.Pipe()
        args = (other, folder, family, streams, device, index)
        self.process = context.Process(target=_serve, args=args, daemon=True)
        self.process.start()
        other.close()

    def ask(self, wish: Wish) -> None:
        self._end.send(wish)

    def tell(self, what: str) -> Any:
        """The answer to "address" or "texts"."""
        self._end.send(what)
        return self.value()

    def value(self) -> Any:
        assert self._end.poll(ANSWER_SECONDS), f"no answer of {self.process.pid}"
        return self._end.recv()

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
    count: int, folder: Path, family: Any, *, streams: bool | Sequence[bool] = False, device: str = "sim"
) -> Iterator[Members]:
    """Some processes with a tiny model each, from one file; on CUDA each with a GPU of its own. `streams`: all of them,
    or each."""
    each_streams = [streams] * count if isinstance(streams, bool) else list(streams)
    first = Whole(folder, family, settings=EngineSettings("cpu"))
    write_lora(first, folder / "loras")
    first.engine.close()
    started: list[Member] = []
    try:
        for place in range(count):
            index = place if device == "cuda" else 0  # each process has simulated devices of its own
            started.append(
                Member(folder, family, each_streams[place], device, index)
            )  # those that are there are closed
        yield Members(started)
    finally:
        for member in started:
            member.close()


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


def _serve(pipe: Connection, folder: Path, family: Any, streams: bool, device: str, index: int) -> None:
    """Answer wishes until the other end closes."""
    torch.set_num_threads(1)
    from modelpool.actors.worker.gang_store import GangStore
    from modelpool.pool.catalog.catalog import Catalog

    policy = {"vram_policy": VramPolicy.NONE} if streams else {}
    settings = EngineSettings(device, index, budget_bytes=BUDGET_BYTES if device == "sim" else None, **policy)
    whole = Whole(folder, family, write=False, settings=settings)
    whole.catalog = Catalog((folder,), (folder / "loras",), device)
    whole.model = whole.catalog.find_model("tiny")
    store, texts = GangStore(), whole.texts()
    while True:
        try:
            wish = pipe.recv()
        except EOFError:
            os._exit(0)
        if wish == "address":
            pipe.send(store.address("127.0.0.1"))
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
        return Answer(values, seconds=time.monotonic() - began)
    except Exception as failed:
        text = f"{type(failed).__name__}: {failed}"
        if os.environ.get("GANG_TRACE"):
            text += "".join(traceback.format_exception(failed)[-6:])[-1500:]
        suspects, state = getattr(failed, "suspects", ()), getattr(failed, "state", None)
        return Answer(None, text, suspects, state, time.monotonic() - began)


def _beginning(whole: Whole) -> Latent:
    """The latent of an image, as the model reads it."""
    width, height = whole.sides
    pixels = np.random.default_rng(3).integers(0, 255, (height, width, 3), np.uint8)
    video = whole.family.sampling.video
    concatenated = video is not None and video.begins is FirstFrameMode.CONCATENATED
    work = EncodeImageParams(whole.model, width, height, frames=whole.frames if concatenated else 0)
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
