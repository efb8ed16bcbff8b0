"""What a gang costs before it computes: processes with a GPU each meet as the workers of a pool do, and exchange
tensors. On other devices than CUDA they go over gloo."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from modelpool.actors.worker.gang_store import LOOPBACK, GangStore
from modelpool.pool.engine.gang.gang_group import GangGroup
from modelpool.pool.engine.gang.gang_layout import layout_of
from modelpool.pool.values.specs.gang import Gang
from modelpool.pool.values.specs.spec import WorkerId

#: limit of the wait for a member
ANSWER_SECONDS = 120.0
TURNS = 5


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one member has measured.

    forming_seconds  until all have met and are connected
    bytes_per_second  that it sends to the others, all at the same time
    held_bytes       device memory of its connections; 0 on other devices than CUDA
    error            how it failed; "" if it did not
    """

    forming_seconds: float = 0.0
    bytes_per_second: float = 0.0
    held_bytes: int = 0
    error: str = ""


def exchange_between(count: int, device: str, size_bytes: int) -> list[Exchange]:
    """Return what each of `count` members has measured, which exchange `size_bytes` each."""
    # a fork has all imports done, but no CUDA
    context: Any = multiprocessing.get_context("spawn" if device == "cuda" else "fork")
    store = GangStore()
    address, names = store.address(LOOPBACK), tuple(WorkerId(f"gpu-{rank}") for rank in range(count))
    ends: list[Connection] = []
    processes: list[Any] = []
    try:
        for rank in range(count):
            end, other = context.Pipe()
            gang = Gang(f"exchange of {count}", names, rank, address)
            process = context.Process(target=_member, args=(other, gang, device, size_bytes), daemon=True)
            process.start()
            other.close()
            ends.append(end)
            processes.append(process)
        return [_answer(end) for end in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()
        for end in ends:
            end.close()
        store.close()


def copy_rate(size_bytes: int) -> float:
    """Return the bytes per second of a copy from the first GPU to the second one."""
    source = torch.ones(size_bytes, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(size_bytes, dtype=torch.uint8, device="cuda:1")
    seconds = []
    for _ in range(TURNS):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        seconds.append(time.perf_counter() - began)
    return size_bytes / statistics.median(seconds)


def _answer(end: Connection) -> Exchange:
    if not end.poll(ANSWER_SECONDS):
        return Exchange(error=f"no answer within {ANSWER_SECONDS:.0f} s")
    try:
        found: Exchange = end.recv()
    except EOFError:
        return Exchange(error="it ended; see log.txt")
    return found


def _member(pipe: Connection, gang: Gang, device: str, size_bytes: int) -> None:
    """Be one member."""
    torch.set_num_threads(1)
    try:
        pipe.send(_measured(gang, device, size_bytes))
    except Exception as error:
        pipe.send(Exchange(error=f"{type(error).__name__}: {error}"[:300]))
    pipe.close()


def _measured(gang: Gang, device: str, size_bytes: int) -> Exchange:
    from benchmarks.gpu.transfers import torch_device

    place = torch.device("cuda", gang.rank) if device == "cuda" else torch_device(device)
    layout = layout_of(gang.degree, 1)
    values = size_bytes // 4 // gang.degree * gang.degree
    own = torch.ones(values, device=place)
    before_bytes = torch.cuda.mem_get_info(place)[0] if device == "cuda" else 0
    group = GangGroup(gang, layout, place)
    began = time.perf_counter()
    group.meet(lambda: False)
    forming_seconds = time.perf_counter() - began
    seconds = []
    try:
        for turn in range(TURNS + 1):
            group.agree((turn,))
            began = time.perf_counter()
            group.exchange(own.chunk(gang.degree), [values // gang.degree] * gang.degree)
            group.await_device()
            seconds.append(time.perf_counter() - began)
        group.agree((TURNS,))
        held_bytes = max(0, before_bytes - torch.cuda.mem_get_info(place)[0]) if device == "cuda" else 0
        if device == "cuda":  # the received tensor is torch's
            held_bytes = max(0, held_bytes - (torch.cuda.memory_reserved(place) - own.nbytes))
    finally:
        group.leave()
    sent_bytes = own.nbytes * (gang.degree - 1) / gang.degree
    return Exchange(forming_seconds, sent_bytes / statistics.median(seconds[1:]), held_bytes)
