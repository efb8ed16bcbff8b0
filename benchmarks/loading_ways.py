"""The ways to load a diffusion model that `benchmarks.loading` compares, and what one of them costs in this process.

Seconds begin with paths in hand and end with the first forward's result. Memory is the kernel's account of what came to
this process meanwhile (/proc/self/smaps_rollup): anonymous pages, which are its own, and its share of mapped files.
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
from diffusers import AutoencoderKL as AutoencoderKL  # the imports of diffusers are lazy, and not what is measured
from safetensors.torch import load_file
from torch import nn
from transformers import CLIPTextModelWithProjection as CLIPTextModelWithProjection

from benchmarks.loading_files import MODELS, Files, Model
from modelpool.actors.worker.storage_meter import StorageMeter
from modelpool.pool.loading.build_checkpoint import open_checkpoint
from modelpool.pool.ops.classes import swap_to_casting
from modelpool.pool.ops.context import compute
from modelpool.pool.specs.spec import Role

CPU = torch.device("cpu")
ROLLUP, STATUS, CLEAR = (Path("/proc/self") / name for name in ("smaps_rollup", "status", "clear_refs"))
#: sets the peak in `STATUS` back to what is there now. Source: Linux, Documentation/filesystems/proc.rst
_RESET_PEAK = "5"


@dataclass(frozen=True, slots=True)
class Cost:
    """What one loading took.

    loaded_seconds   until there was a module
    private_bytes    anonymous memory that came to the process and stayed
    file_bytes       its share of mapped files, likewise
    peak_bytes       the most that was mapped at once, beyond what was at the beginning
    read_bytes       from the disk
    check            of the forward's result: what all ways must agree on
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
    """Views of the mapped single file under casting layers."""
    checkpoint = open_checkpoint(files.single)
    checkpoint.prefetch(Role.DIFFUSION_MODEL)
    module = checkpoint.build(Role.DIFFUSION_MODEL).module
    swap_to_casting(module)
    return module


def with_single_file(model: Model, files: Files) -> nn.Module:
    """diffusers, from the same file, with the configuration at hand and told the type to compute in."""
    loaded: nn.Module = model.cls.from_single_file(
        str(files.single), config=str(files.folder), torch_dtype=model.compute, local_files_only=True
    )
    return loaded.eval()


def with_pretrained(model: Model, files: Files) -> nn.Module:
    """diffusers, from its own folder."""
    loaded: nn.Module = model.cls.from_pretrained(str(files.folder), torch_dtype=model.compute, local_files_only=True)
    return loaded.eval()


def with_load_file(model: Model, files: Files) -> nn.Module:
    """By hand and knowing everything: class, configuration and names. Without weights, then given them as they are."""
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
    """Load and run once in this process; `touched_bytes` as of `touch`."""
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
    """Use so much memory and give it back, so that all ways find free memory in the same state: the host of a virtual
    machine may have taken any part of it back, and each page of that costs microseconds when it is touched again."""
    room = mmap.mmap(-1, size_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # free blocks are used whole, as the page cache would use them
        room.madvise(mmap.MADV_HUGEPAGE)
    view = torch.frombuffer(room, dtype=torch.uint8)
    view[:: mmap.PAGESIZE] = 1
    del view
    room.close()


def call(module: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The first forward."""
    result: torch.Tensor = module(**inputs, return_dict=False)[0]
    return result


def warm_up(dtype: torch.dtype) -> None:
    """What torch sets up once in a process for the kernels of a forward."""
    x = torch.ones(1, 8, 8, 8, dtype=dtype)
    nn.functional.conv2d(x, torch.ones(8, 8, 3, 3, dtype=dtype))
    nn.functional.linear(x, torch.ones(8, 8, dtype=dtype))
    with torch.device("meta"):
        nn.Linear(1, 1)


def rolled_up(field: str) -> int:
    """Bytes of one kind in all of this process' mappings."""
    return kib_of(ROLLUP, field)


def kib_of(file: Path, field: str) -> int:
    """A line of the kernel's account, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB", file.read_text(), re.MULTILINE)
    assert found is not None, f"{file}: found no line {field!r}"
    return 1024 * int(found[1])
