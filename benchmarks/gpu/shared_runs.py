"""Part "gangs": what several GPUs take to share a run, and tiny models of several families on all GPUs of the machine
together, beside one GPU.

On a machine with one GPU, each measurement says so. On other devices than CUDA, two processes share runs over gloo.
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.gpu.gang_exchange import copy_rate, exchange_between
from benchmarks.gpu.measurements import Record
from benchmarks.gpu.setting import Setting
from modelpool.pool.devices.kind_names import DeviceKind
from modelpool.pool.devices.workspaces import communicator_bytes
from modelpool.pool.engine.gang.gang_layout import layout_of
from modelpool.scheduler.model.gang_times import FORMING_SECONDS
from tests.pool.engine.gang.members import Answer, Members, Wish, members
from tests.pool.families.tiny_relatives import ALL_FAMILIES

MIB = 1 << 20
#: a family whose members divide tokens in attention to text and image, and one of videos with guidance
FAMILIES = ("flux_dev", "wan_t2v")
GUIDED = "wan_t2v"
#: numbers of GPUs
DEGREES = (2, 4, 8)
#: of the largest value; bfloat16 has 8 bits
TOLERANCE = 2e-2
#: steps of a short and of a long run: the difference has no meeting in it
SHORT, LONG = 2, 10


def run(record: Record, setting: Setting) -> None:
    """Measure exchanges, then compare the latents and the steps of shared runs."""
    count = torch.cuda.device_count() if setting.device == "cuda" else 2
    degrees = [degree for degree in DEGREES if degree <= count]
    if not degrees:
        for name in ("forming a gang of 2 GPUs", "exchange between 2 GPUs", "copy from GPU 0 to GPU 1",
                     "memory of communicators of 2 GPUs", *(f"step of {each} on 2 GPUs" for each in FAMILIES),
                     "guidance on two GPUs"):  # fmt: skip
            record.skip(name, f"needs several GPUs, found {count}")
        return
    for degree in degrees:
        with record.attempting(f"forming a gang of {degree} GPUs", least_seconds=setting.least(30.0)):
            measure_exchange(record, setting, degree)
    with record.attempting("copy from GPU 0 to GPU 1"):
        if setting.device == "cuda":
            peers = "direct" if torch.cuda.can_device_access_peer(0, 1) else "over the host"
            record.add("copy from GPU 0 to GPU 1", copy_rate(512 * MIB) / 1e9, "GB/s", note=peers)
        else:
            record.skip("copy from GPU 0 to GPU 1", "only on CUDA")
    for name in FAMILIES:
        with record.attempting(f"step of {name}", least_seconds=setting.least(60.0)):
            folder = setting.work / name
            folder.mkdir()
            with members(degrees[-1], folder, ALL_FAMILIES[name], device=setting.device) as pool:
                compare(record, name, pool, degrees)


def measure_exchange(record: Record, setting: Setting, degree: int) -> None:
    """Record how long `degree` members take to meet, what they send each other, and the memory of their connections."""
    found = exchange_between(degree, setting.device, (4 if setting.small else 256) * MIB)
    if errors := [each.error for each in found if each.error]:
        raise RuntimeError(errors[0])
    forming = max(each.forming_seconds for each in found)
    record.add(f"forming a gang of {degree} GPUs", forming, "s", FORMING_SECONDS, "at most what the scheduler assumes",
               setting.met(forming <= FORMING_SECONDS))  # fmt: skip
    rate = min(each.bytes_per_second for each in found)
    record.add(f"exchange between {degree} GPUs", rate / 1e9, "GB/s", note="sent by each, all at the same time")
    name = f"memory of communicators of {degree} GPUs"
    if setting.device != "cuda":
        record.skip(name, "only on CUDA")
        return
    planned_bytes = communicator_bytes(DeviceKind.CUDA, layout_of(degree, 1).group_sizes)
    held_bytes = max(each.held_bytes for each in found)
    record.add(name, held_bytes / MIB, "MiB", planned_bytes / MIB, "never above", held_bytes <= planned_bytes)


def compare(record: Record, name: str, pool: Members, degrees: list[int]) -> None:
    """Record how far the latents of shared runs differ, and the time of a step, beside one worker."""
    alone = [pool.alone(Wish(None, steps=steps)) for steps in (SHORT, SHORT, LONG)]
    for degree in degrees:
        pool.sample(Wish(None, steps=SHORT), range(degree))  # kernels are chosen
        shared = [pool.sample(Wish(None, steps=steps), range(degree)) for steps in (SHORT, LONG)]
        errors = [each.error for each in (*alone, *shared[0], *shared[1]) if each.error]
        if errors:
            record.add(f"step of {name} on {degree} GPUs", goal="no error", is_met=False, note=errors[0])
            continue
        off = max(difference(each, alone[1]) for each in shared[0])
        record.add(f"{name} on {degree} GPUs, difference", off, "of the largest value", 0.0, f"up to {TOLERANCE:g}",
                   off <= TOLERANCE)  # fmt: skip
        step = step_ms(max(each.seconds for each in shared[0]), max(each.seconds for each in shared[1]))
        step_alone = step_ms(alone[1].seconds, alone[2].seconds)
        record.add(f"step of {name} on {degree} GPUs", step, "ms", step_alone, note="a tiny model, beside one GPU")
        if name == GUIDED and degree == 2:  # these two divide the texts
            record.add("guidance on two GPUs", step, "ms", step_alone, "the latent of one GPU", off <= TOLERANCE)


def step_ms(short_seconds: float, long_seconds: float) -> float:
    """Return the milliseconds of a step of runs of `SHORT` and of `LONG` steps."""
    return 1000 * max(0.0, long_seconds - short_seconds) / (LONG - SHORT)


def difference(found: Answer, expected: Answer) -> float:
    """Return the largest difference of two latents, relative to the largest value."""
    assert found.latent is not None
    assert expected.latent is not None
    return float(np.abs(found.latent - expected.latent).max()) / float(np.abs(expected.latent).max())
