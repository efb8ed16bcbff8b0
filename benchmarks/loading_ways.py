"""The methods to load a diffusion model that `benchmarks.loading` compares, and the cost of one in this process.

Time is measured from known paths to the result of the first forward. Memory is the growth of this process in that time,
as reported by the kernel (/proc/self/smaps_rollup): anonymous pages, which are private, and its share of mapped files.
"""

from __future__ import annotations

import mmap
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL as AutoencoderKL  # diffusers imports lazily; imports are not measured
from safetensors.torch import load_file
from torch import nn
from transformers import CLIPTextModelWithProjection as CLIPTextModelWithProjection

from benchmarks.loading_files import MODELS, Files, Model
from modelpool.actors.worker.storage_meter import StorageMeter
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.ops.casting_classes import swap_to_casting
from modelpool.pool.weights.ops.context import compute

CPU = torch.device("cpu")
ROLLUP, STATUS, CLEAR = (Path("/proc/self") / name for name in ("smaps_rollup", "status", "clear_refs"))
#: resets the peak in `STATUS` to the current value. Source: Linux, Documentation/filesystems/proc.rst
_RESET_PEAK = "5"


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one load.

    loaded_seconds   time until the module was built
    private_bytes    growth of the process's anonymous memory
    file_bytes       growth of its share of mapped files
    peak_bytes       growth of its peak resident memory
    read_bytes       bytes read from the disk
    check            a figure of the forward's result, on which all methods must agree
    """

    loaded_seconds: float
    seconds: float
    cpu_seconds: float
    private_bytes: int
    file_bytes: int
    peak_bytes: int
    read_bytes: int
    check: float


def with_modelpool(model: Model, files: Files) -> nn.Module:
    """Load with modelpool: casting layers over views of the mapped single file."""
    checkpoint = open_checkpoint(files.single)
    checkpoint.prefetch(Role.DIFFUSION_MODEL)
    module = checkpoint.build(Role.DIFFUSION_MODEL).module
    swap_to_casting(module)
    return module


def with_single_file(model: Model, files: Files) -> nn.Module:
    """Load with diffusers from the same file, with a local configuration and the compute dtype set."""
    loaded: nn.Module = model.cls.from_single_file(
        str(files.single), config=str(files.folder), torch_dtype=model.compute, local_files_only=True
    )
    return loaded.eval()


def with_pretrained(model: Model, files: Files) -> nn.Module:
    """Load with diffusers from its own folder format."""
    loaded: nn.Module = model.cls.from_pretrained(str(files.folder), torch_dtype=model.compute, local_files_only=True)
    return loaded.eval()


def with_load_file(model: Model, files: Files) -> nn.Module:
    """Load manually, with known class, configuration and names: build without weights, then assign the tensors."""
    with torch.device("meta"):
        module: nn.Module = model.cls.from_config(model.cls.load_config(str(files.folder)))
    tensors = load_file(files.weights)
    if model.stored != model.compute:
        tensors = {key: tensor.to(model.compute) for key, tensor in tensors.items()}
    module.load_state_dict(tensors, assign=True)
    return module.eval().requires_grad_(False)


WAYS: Mapping[str, tuple[str, Callable[[Model, Files], nn.Module]]] = {
    "modelpool": ("modelpool, single file", with_modelpool),
    "from_single_file": ("diffusers from_single_file", with_single_file),
    "from_pretrained": ("diffusers from_pretrained, folder", with_pretrained),
    "load_file": ("safetensors load_file and load_state_dict(assign), folder", with_load_file),
}


def measure(way: str, name: str, files: Files, touched_bytes: int = 0) -> Cost:
    """Load and run once in this process; `touched_bytes` as in `touch`."""
    model = MODELS[name]
    inputs, meter = model.inputs(model.compute), StorageMeter()
    warm_up(model.compute)
    if touched_bytes:
        touch(touched_bytes)
    CLEAR.write_text(_RESET_PEAK)
    private_bytes, file_bytes = rolled_up("Anonymous"), rolled_up("Pss_File")
    peak_bytes, read_bytes = -kib_of(STATUS, "VmHWM"), -meter.read_bytes()
    begun, cpu_begun = time.perf_counter(), time.process_time()
    module = WAYS[way][1](model, files)
    loaded_seconds = time.perf_counter() - begun
    with torch.no_grad(), compute(CPU, model.compute):
        result = call(module, inputs)
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu_begun
    return Cost(
        loaded_seconds,
        seconds,
        cpu_seconds,
        rolled_up("Anonymous") - private_bytes,
        rolled_up("Pss_File") - file_bytes,
        peak_bytes + kib_of(STATUS, "VmHWM"),
        read_bytes + meter.read_bytes(),
        float(result.float().abs().mean()),
    )


def touch(size_bytes: int) -> None:
    """Use and free this much memory, so that all methods start with free memory in the same state: the host of a
    virtual machine may have reclaimed any part of it, and each such page costs microseconds at its next use."""
    room = mmap.mmap(-1, size_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # uses free blocks completely, as the page cache would
        room.madvise(mmap.MADV_HUGEPAGE)
    view = torch.frombuffer(room, dtype=torch.uint8)
    view[:: mmap.PAGESIZE] = 1
    del view
    room.close()


def call(module: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Run one forward."""
    result: torch.Tensor = module(**inputs, return_dict=False)[0]
    return result


def warm_up(dtype: torch.dtype) -> None:
    """Run the kernels of a forward once, so that torch has initialised them in this process."""
    x = torch.ones(1, 8, 8, 8, dtype=dtype)
    nn.functional.conv2d(x, torch.ones(8, 8, 3, 3, dtype=dtype))
    nn.functional.linear(x, torch.ones(8, 8, dtype=dtype))
    with torch.device("meta"):
        nn.Linear(1, 1)


def rolled_up(field: str) -> int:
    """Return the bytes of one kind in all mappings of this process."""
    return kib_of(ROLLUP, field)


def kib_of(file: Path, field: str) -> int:
    """Return the value of one line of a file in /proc, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB", file.read_text(), re.MULTILINE)
    assert found is not None, f"{file}: found no line {field!r}"
    return 1024 * int(found[1])
