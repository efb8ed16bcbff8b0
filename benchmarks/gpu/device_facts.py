"""Parts "device" and "attention": facts of a machine that the code assumes, measured: the link by number of fill
threads and NUMA node, memory of a context and of workspaces, the end of a killed process, the price of asking for free
memory, and each attention kernel on shapes of published models."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from benchmarks.gpu.measurements import Record
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.transfers import MIB, median_seconds, pinned_rate, synchronize, torch_device
from modelpool.pool.devices import loader
from modelpool.pool.devices.capabilities import detect_capabilities
from modelpool.pool.devices.device_kinds import device_kind
from modelpool.pool.devices.pinned_memory import CudaHostRegister
from modelpool.pool.devices.transfer_pipeline import TransferPipeline
from modelpool.pool.devices.workspaces import PRODUCT_STREAMS, workspace_bytes
from modelpool.pool.weights.ops.attention import AttentionBackend, use_attention_kernels

FILL_THREADS = (1, 2, 4, 8)
NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")
#: seconds that a killed process is followed
MOST_END_SECONDS = 30.0
#: batch, heads, query tokens, key tokens, size of a head
SHAPES = {
    "SDXL, 64 x 64 cells": (2, 10, 4096, 4096, 64),
    "SDXL, text": (2, 10, 4096, 77, 64),
    "Flux, 1024 x 1024": (1, 24, 4608, 4608, 128),
    "Wan, 81 frames of 832 x 480": (1, 12, 32760, 32760, 128),
    "VAE, 1024 x 1024": (1, 1, 16384, 16384, 512),
}
#: with `small`, tokens are divided by this
SMALL_DIVISOR = 128
#: takes memory, says so, and waits
HOLDER = """
import sys, time, torch
held = torch.ones(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
time.sleep(600)
"""


def run(record: Record, setting: Setting) -> None:
    """Measure the link, memory beside tensors, and the driver."""
    device = torch_device(setting.device)
    size_bytes = (4 if setting.small else 512) * MIB
    with record.attempting("asking for free memory"):
        measure_asking(record, setting)
    with record.attempting("context of a process"):
        measure_context(record, setting)
    with record.attempting("workspaces of one stream"):
        measure_workspaces(record, setting, device)
    with record.attempting("link with 1 fill thread"):
        measure_threads(record, device, size_bytes)
    with record.attempting("link from NUMA node"):
        measure_nodes(record, device, size_bytes)
    with record.attempting("memory of a killed process", least_seconds=setting.least(20.0)):
        measure_end_of_process(record, setting)


def run_attention(record: Record, setting: Setting) -> None:
    """Measure each kernel on each shape."""
    device = torch_device(setting.device)
    dtype = torch.float32 if setting.device == "cpu" else torch.float16
    for what, (batch, heads, queries, keys, size) in SHAPES.items():
        if setting.small:
            queries, keys = max(1, queries // SMALL_DIVISOR), max(1, keys // SMALL_DIVISOR)
        with record.attempting(f"attention, {what}"):
            q, k, v = (torch.randn(batch, heads, n, size, device=device, dtype=dtype) for n in (queries, keys, keys))
            for kernel in AttentionBackend:
                if kernel is AttentionBackend.MATH and batch * heads * queries * keys > 1 << 31:
                    record.skip(f"attention, {what}, {kernel.value}", "it needs memory for all pairs of tokens")
                    continue
                measure_kernel(record, device, f"attention, {what}, {kernel.value}", kernel, (q, k, v))


def measure_kernel(
    record: Record,
    device: torch.device,
    name: str,
    kernel: AttentionBackend,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Record the milliseconds of one kernel, or its refusal."""
    try:
        with use_attention_kernels((kernel,)):
            F.scaled_dot_product_attention(*inputs)
            seconds = median_seconds(device, lambda: F.scaled_dot_product_attention(*inputs))
    except torch.AcceleratorError:
        raise
    except RuntimeError as error:
        record.skip(name, f"it refuses the shape: {str(error)[:80]}")
        return
    record.add(name, 1000 * seconds, "ms")


def measure_asking(record: Record, setting: Setting) -> None:
    """Record the time of one question for free memory, which each plan asks."""
    if setting.device != "cuda":
        record.skip("asking for free memory", "only on CUDA")
        return
    torch.cuda.mem_get_info()
    count = 200
    started = time.perf_counter()
    for _ in range(count):
        torch.cuda.mem_get_info()
    record.add("asking for free memory", 1e6 * (time.perf_counter() - started) / count, "us")


def measure_context(record: Record, setting: Setting) -> None:
    """Record the memory that a process has before its first tensor, of another process."""
    if setting.device != "cuda":
        record.skip("context of a process", "only on CUDA")
        return
    before_bytes, _ = torch.cuda.mem_get_info()
    with _holding(1):
        after_bytes, _ = torch.cuda.mem_get_info()
    record.add("context of a process", (before_bytes - after_bytes) / MIB, "MiB")


def measure_workspaces(record: Record, setting: Setting, device: torch.device) -> None:
    """Record what the first products on a new stream take, against what plans leave out for it."""
    if setting.device != "cuda":
        record.skip("workspaces of one stream", "only on CUDA")
        return
    capabilities = detect_capabilities(device_kind("cuda"), 0)
    planned_bytes = workspace_bytes(
        capabilities.kind, capabilities.generation, capabilities.total_bytes, os.environ
    ) // PRODUCT_STREAMS  # fmt: skip
    x = torch.ones(256, 256, device=device, dtype=torch.float16)
    layer = torch.nn.Linear(256, 256, device=device, dtype=torch.float16)
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream(device)):
        before_bytes = torch.cuda.memory_allocated()
        made = (x @ x, layer(x))
        torch.cuda.synchronize()
        taken_bytes = torch.cuda.memory_allocated() - before_bytes - sum(each.nbytes for each in made)
    record.add("workspaces of one stream", taken_bytes / MIB, "MiB", planned_bytes / MIB, "never above",
               taken_bytes <= planned_bytes)  # fmt: skip


def measure_threads(record: Record, device: torch.device, size_bytes: int) -> None:
    """Record the speed of the loader with other numbers of threads that fill pinned buffers."""
    link = pinned_rate(device, size_bytes)
    parts = list(torch.zeros(size_bytes, dtype=torch.uint8).chunk(8))
    for count in FILL_THREADS:
        usual, loader.FILL_THREADS = loader.FILL_THREADS, count
        try:
            with TransferPipeline.open(device) as pipeline:
                pipeline.bring(parts[0])
                rate = size_bytes / median_seconds(device, lambda used=pipeline: [used.bring(part) for part in parts])
        finally:
            loader.FILL_THREADS = usual
        threads = "thread" if count == 1 else "threads"
        record.add(f"link with {count} fill {threads}", rate / 1e9, "GB/s", link / 1e9)


def measure_nodes(record: Record, device: torch.device, size_bytes: int) -> None:
    """Record the speed of copies from pinned memory of each NUMA node, and which one the device is at. Memory is of the
    node of the processor that writes it first, so it is not from torch's cache of pinned memory."""
    if not hasattr(os, "sched_setaffinity"):
        record.skip("link from NUMA node", "this system does not bind threads to processors")
        return
    nodes = sorted(NODES.glob("node[0-9]*")) if NODES.is_dir() else []
    own_number = node_of(device)
    allowed = os.sched_getaffinity(0)
    cores = {node.name[4:]: cores_of((node / "cpulist").read_text()) & allowed for node in nodes}
    for number, own in (cores or {"0": allowed}).items():
        if not own:
            record.skip(f"link from NUMA node {number}", "this process may not use its processors")
            continue
        try:
            os.sched_setaffinity(0, own)
            is_own = "; the device is at it" if number == own_number else ""
            record.add(f"link from NUMA node {number}", fresh_rate(device, size_bytes) / 1e9, "GB/s",
                       note=f"{len(own)} processors{is_own}")  # fmt: skip
        finally:
            os.sched_setaffinity(0, allowed)


def fresh_rate(device: torch.device, size_bytes: int) -> float:
    """Return the bytes per second of a copy from pinned memory that this thread has just got from the system."""
    host = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    register = CudaHostRegister(device) if device.type == "cuda" else None
    if register is not None and not register.pin(host.data_ptr(), size_bytes):
        raise RuntimeError("the driver does not pin memory")
    try:
        return size_bytes / median_seconds(device, lambda: target.copy_(host, non_blocking=True))
    finally:
        if register is not None:
            register.unpin(host.data_ptr())


def node_of(device: torch.device, devices: Path = PCI_DEVICES) -> str:
    """Return the number of the NUMA node that a CUDA device is at; "" if the system does not tell."""
    if device.type != "cuda":
        return ""
    facts = torch.cuda.get_device_properties(device)
    place = [getattr(facts, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if None in place:
        return ""
    file = devices / "{:04x}:{:02x}:{:02x}.0".format(*place) / "numa_node"
    return file.read_text().strip() if file.exists() else ""


def cores_of(text: str) -> set[int]:
    """Return the processors in a list of the kernel, such as "0-3,8"."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found.update(range(int(first), int(last or first) + 1))
    return found


def measure_end_of_process(record: Record, setting: Setting) -> None:
    """Record the seconds from the end of a process that held half of the free memory until it is free."""
    name = "memory of a killed process"
    if setting.device != "cuda":
        record.skip(name, "only on CUDA")
        return
    before_bytes, _ = torch.cuda.mem_get_info()
    with _holding(before_bytes // 2) as holder:
        os.kill(holder.pid, signal.SIGKILL)
        started = time.perf_counter()
        gone_seconds = 0.0
        while (seconds := time.perf_counter() - started) < MOST_END_SECONDS:
            if not gone_seconds and holder.poll() is not None:
                gone_seconds = seconds
            if torch.cuda.mem_get_info()[0] >= 0.99 * before_bytes:
                break
            time.sleep(0.01)
    record.add(name, seconds, "s until free", note=f"the process was gone after {gone_seconds:.2f} s, it held "
               f"{before_bytes / 2e9:.1f} GB")  # fmt: skip


@contextmanager
def _holding(size_bytes: int) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds memory of the device."""
    synchronize(torch.device("cuda"))
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(size_bytes)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        if holder.stdout.readline().strip() != "held":
            raise RuntimeError(f"a process that takes {size_bytes} bytes of the device ended; see log.txt")
        yield holder
    finally:
        holder.kill()
        holder.wait()
