"""Compares loading a 2 GB checkpoint with diffusers: seconds and private memory until its diffusion model can run.

Each method runs in a new process with the file in the page cache. Time is measured from the end of the imports. Private
memory is anonymous memory as reported by the kernel: pages that no other process shares and no file backs.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.values.specs.spec import Role
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

MIB = 1 << 20
RUNS = 5


def anonymous_bytes() -> int:
    """Return the current private memory of this process."""
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Anonymous:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None, "found no line 'Anonymous' in smaps_rollup"
    return 1024 * int(found[1])


def with_modelpool(path: Path) -> object:
    """Build all components over views of the mapped file."""
    checkpoint = open_checkpoint(path)
    return [checkpoint.build(role).module for role in checkpoint.roles]


def with_diffusers(path: Path) -> object:
    """Load only the diffusion model, in float16, with a local configuration."""
    import diffusers
    import torch

    return diffusers.UNet2DConditionModel.from_single_file(
        str(path), config=str(path.parent / "unet"), torch_dtype=torch.float16
    )


def with_diffusers_default(path: Path) -> object:
    """Load only the diffusion model, without `torch_dtype`."""
    import diffusers

    return diffusers.UNet2DConditionModel.from_single_file(str(path), config=str(path.parent / "unet"))


def with_load_file(path: Path) -> object:
    """Load all tensors into memory, without modules."""
    from safetensors.torch import load_file

    return {key: tensor.clone() for key, tensor in load_file(path).items()}


WAYS: Mapping[str, tuple[str, Callable[[Path], object]]] = {
    "modelpool": ("modelpool: UNet, VAE and text encoder", with_modelpool),
    "diffusers": ("diffusers from_single_file, UNet, float16", with_diffusers),
    "default": ("diffusers from_single_file, UNet, default dtype", with_diffusers_default),
    "load_file": ("safetensors load_file into memory, no modules", with_load_file),
}


def measure(way: str, path: Path) -> dict[str, float]:
    """Load once in this process."""
    import diffusers
    import transformers

    assert diffusers.UNet2DConditionModel  # these imports are lazy, and are not measured
    assert transformers.CLIPTextModel
    before_bytes, begun = anonymous_bytes(), time.perf_counter()
    held = WAYS[way][1](path)
    seconds = time.perf_counter() - begun
    private_bytes = anonymous_bytes() - before_bytes
    assert held
    return {"seconds": seconds, "private_bytes": private_bytes}


def print_loading() -> None:
    """Write a file in the layout and size of SD1.5, load it with each method, and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.safetensors"
        write_tiny_checkpoint(path, layout=layouts.sd15())
        unet = open_checkpoint(path).build(Role.DIFFUSION_MODEL).module
        unet.save_config(Path(folder) / "unet")  # type: ignore[operator] # diffusers is not typed
        print(f"\nLoading a file of {path.stat().st_size / 1e9:.2f} GB from the page cache\n")
        print("| method | median seconds | private MiB |\n|---|---|---|")
        for way, (title, _) in WAYS.items():
            runs = [in_child(way, path) for _ in range(RUNS)]
            seconds = statistics.median(r["seconds"] for r in runs)
            private_bytes = statistics.median(r["private_bytes"] for r in runs)
            print(f"| {title} | {seconds:.2f} | {private_bytes / MIB:.0f} |", flush=True)


def in_child(way: str, path: Path) -> dict[str, float]:
    """Run `measure` in a new process."""
    command = [sys.executable, "-m", "benchmarks.weights_loading", way, str(path)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
