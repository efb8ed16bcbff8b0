"""Real processes that share the runs of requests: each opens a folder with a tiny model, cuts the request, and samples
its runs in a gang."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.values.core.stage_params import Latent, Result, SampleParams, SamplerState
from modelpool.pool.values.specs.gang import Gang
from modelpool.pool.values.specs.spec import JobId, TaskId, WorkerId
from tests.pool.families.tiny_model import QUIET, TinyModel
from tests.pool.input_names import results_read

ANSWER_SECONDS = 120.0
BUDGET_BYTES = 512 << 20
_GANGS = itertools.count(1)


@dataclass(frozen=True)
class Asked:
    """A request for the model called "tiny" in a folder.

    gang     samples each of its runs; None: this member alone
    changed  the place of the component with another weight on this member among those of the run; -1: none
    streams  all weights stream to a simulated device, else they are on the CPU
    """

    folder: Path
    fields: Mapping[str, Any]
    gang: Gang | None = None
    changed: int = -1
    streams: bool = False


@dataclass(frozen=True)
class Sampled:
    """The latents of a request, one behind the other, or how it failed."""

    latents: NDArray[np.float32] | None
    error: str = ""


class AskedMembers:
    """The processes. Close them."""

    def __init__(self, count: int) -> None:
        context: Any = multiprocessing.get_context("fork")  # a fork has all imports done
        self._ends: list[Any] = []
        self._processes: list[Any] = []
        for _ in range(count):
            end, other = context.Pipe()
            process = context.Process(target=_serve, args=(other,), daemon=True)
            process.start()
            other.close()
            self._ends.append(end)
            self._processes.append(process)

    def alone(self, folder: Path, fields: Mapping[str, Any], streams: bool = False) -> Sampled:
        """What one of them samples."""
        self._ends[0].send(Asked(folder, fields, streams=streams))
        return self._answer(0)

    def shared(
        self,
        folder: Path,
        fields: Mapping[str, Any],
        *,
        changed: int = -1,
        streams: bool = False,
        others: Sequence[Mapping[str, Any]] = (),
    ) -> list[Sampled]:
        """What the first ones sample together, as many as `fields` has GPUs; `changed` is of the last member.
        `others`:
        what each is asked for, if that differs."""
        count: int = fields["gpus"]
        self._ends[0].send("address")
        address = self._answer(0)
        names = tuple(WorkerId(f"gpu-{rank}") for rank in range(count))
        number = next(_GANGS)
        for rank in range(count):
            gang = Gang(f"asked {number}", names, rank, address)
            own = others[rank] if others else fields
            self._ends[rank].send(Asked(folder, own, gang, changed if rank == count - 1 else -1, streams))
        return [self._answer(rank) for rank in range(count)]

    def _answer(self, rank: int) -> Any:
        assert self._ends[rank].poll(ANSWER_SECONDS), f"no answer of member {rank}"
        return self._ends[rank].recv()

    def close(self) -> None:
        """End the processes."""
        for process, end in zip(self._processes, self._ends, strict=True):
            process.kill()
            process.join()
            end.close()


def _serve(pipe: Connection) -> None:
    """Answer until the other end closes."""
    torch.set_num_threads(1)
    from modelpool.actors.worker.gang_store import GangStore

    store, opened = GangStore(), dict[tuple[Path, bool], TinyModel]()
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            os._exit(0)
        if asked == "address":
            pipe.send(store.address("127.0.0.1"))
            continue
        key = asked.folder, asked.streams
        if key not in opened:
            for model in opened.values():
                model.close()
            opened = {key: _opened(*key)}
        pipe.send(_sampled(opened[key], asked))


def _opened(folder: Path, streams: bool) -> TinyModel:
    loras = folder / "loras"
    found = TinyModel.of_folder(folder, "sim" if streams else "cpu", (loras,) if loras.is_dir() else ())
    if streams:
        found.close()
        settings = EngineSettings("sim", 0, budget_bytes=BUDGET_BYTES, vram_policy=VramPolicy.NONE)
        found.engine = Engine.open(settings)
    return found


def _sampled(tiny: TinyModel, asked: Asked) -> Sampled:
    try:
        return Sampled(np.concatenate([latent.ravel() for latent in _latents(tiny, asked)]))
    except Exception as failed:
        text = f"{type(failed).__name__}: {failed}"
        if os.environ.get("GANG_TRACE"):
            text += "".join(traceback.format_exception(failed)[-8:])[-2500:]
        return Sampled(None, text)


def _latents(tiny: TinyModel, asked: Asked) -> Iterator[NDArray[np.float32]]:
    request, given = InputImages(lambda result: result).bring(
        GenerateRequest(**{"model": "tiny", "prompt": "a photo of a red cube", "seed": 11, **asked.fields})
    )
    _, cut = build_graph(request, JobId("job"), tiny.catalog)
    results: dict[TaskId, Result] = dict(given)  # type: ignore[arg-type] # here a reference is the result itself
    sampled = sum(isinstance(work, SampleParams) for work in cut.works.values())
    for task in cut.job.tasks:
        work, read = cut.works[task.task_id], results_read(task, results)
        if isinstance(work, SampleParams):
            sampled -= 1
            with _changed(tiny, work, asked.changed):
                made = tiny.engine.run(task, work, read, QUIET, gang=asked.gang)[0]
            yield from made.arrays if isinstance(made, Latent | SamplerState) else ()
        elif sampled:  # modules behind the last run are of no interest
            made = tiny.engine.run(task, work, read, QUIET)[0]
        else:
            break
        results[task.task_id] = made


@contextmanager
def _changed(tiny: TinyModel, work: SampleParams, place: int) -> Iterator[None]:
    """Have one weight of a component of the run be another one."""
    if place < 0:
        yield
        return
    hosts = tiny.engine._used_by(work)[place].host_parameters
    weight = hosts[min(name for name in hosts if "weight" in name)]
    before = weight.detach().clone()
    with torch.no_grad():
        weight.add_(0.01)
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(before)
