"""Compares loading and streaming with the bandwidth of a GPU's link: `python -m benchmarks.gpu_memory`.

Measures three rows in one run, each with its bound: loading a model against a copy from pinned memory; sampling-like
passes with half of the weights resident against fully resident, where computing takes longer than copying; private host
memory of a loaded model in addition to its mapped file. Meaningful figures need a CUDA GPU;
`--device cpu --layers 4 --width 64` runs the same code on any machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.weights_loading import anonymous_bytes
from modelpool.pool.devices.transfer_pipeline import TransferPipeline
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.weights.patcher.compute_context import RunTools
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget
from modelpool.pool.weights.patcher.weight_form import WeightForm
from modelpool.pool.weights.patches.patch_set import PatchSet
from modelpool.pool.weights.plan.eviction_plan import choose_modules
from modelpool.pool.weights.quant.open_weights import open_weights

MIB = 1 << 20
TURNS = 7
PASSES = 8


class Stack(nn.Sequential):
    """A sequence of equal linear layers."""

    def __init__(self, layers: int, width: int) -> None:
        with torch.device("meta"):
            super().__init__(*[nn.Linear(width, width, bias=False, dtype=torch.float16) for _ in range(layers)])


def open_stack(path: Path, layers: int, width: int, device: torch.device, pipeline: TransferPipeline) -> ModelPatcher:
    """Return the stack over views of its mapped file. Writes the file if it is missing."""
    if not path.exists():
        weights = torch.randn(width, width, dtype=torch.float32).mul(width**-0.5).half()
        save_file({f"{i}.weight": weights.clone() for i in range(layers)}, path)
    stack = Stack(layers, width)
    stack.load_state_dict(dict(open_weights(path)), assign=True)
    form = WeightForm(torch.float16)
    return ModelPatcher.of(
        ComponentKey("stack"),
        Role.DIFFUSION_MODEL,
        stack.requires_grad_(False),
        device,
        form,
        RunTools(pipeline=pipeline),
    )


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return the wall seconds of `work`, until the device has finished it."""
    _wait(device)
    started = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - started


def pinned_rate(device: torch.device, size_bytes: int) -> float:
    """Return the bytes per second of one copy from pinned memory: the bandwidth of the link."""
    source = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    return size_bytes / statistics.median(
        seconds(device, lambda: target.copy_(source, non_blocking=True)) for _ in range(TURNS)
    )


def target(patcher: ModelPatcher, share: float) -> WeightsTarget:
    """Return a target with that share of the bytes resident."""
    modules = patcher.modules()
    wanted_bytes = int(share * sum(m.resident_bytes for m in modules))
    return WeightsTarget(choose_modules(modules, wanted_bytes, frozenset()), PatchSet())


def load_rate(patcher: ModelPatcher) -> float:
    """Return the bytes per second of loading the complete model."""
    rates = []
    for _ in range(TURNS):
        patcher.unload()
        moved: list[int] = []
        took = seconds(patcher.device, lambda m=moved: m.append(patcher.realize(target(patcher, 1.0)).uploaded_bytes))  # type: ignore[misc]
        rates.append(moved[0] / took)
    return statistics.median(rates)


def pass_seconds(patcher: ModelPatcher, share: float, rows: int, width: int) -> float:
    """Return the seconds of one pass with that share resident. A first pass determines the order of the weights."""
    patcher.realize(target(patcher, share))
    inputs = torch.randn(rows, width, device=patcher.device, dtype=torch.float16)
    with patcher.running() as stack:
        stack(inputs)
        return seconds(patcher.device, lambda: [stack(inputs) for _ in range(PASSES)]) / PASSES


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument(
        "--rows", type=int, default=16384, help="batch rows; enough that computing takes longer than copying"
    )
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("found no CUDA GPU; figures of another device do not describe a link")
    device = torch.device(asked.device, 0) if asked.device == "cuda" else torch.device(asked.device)
    with tempfile.TemporaryDirectory() as folder, TransferPipeline.open(device) as pipeline:
        path = Path(folder) / "stack.safetensors"
        patcher = open_stack(path, asked.layers, asked.width, device, pipeline)
        link = pinned_rate(device, min(256 * MIB, path.stat().st_size))
        patcher.realize(target(patcher, 1.0))
        patcher.unload()
        before_bytes = anonymous_bytes()
        loaded = load_rate(patcher)
        private_bytes = max(0, anonymous_bytes() - before_bytes) if device.type == "cuda" else 0
        ratios = []
        for _ in range(TURNS):
            resident = pass_seconds(patcher, 1.0, asked.rows, asked.width)
            ratios.append(pass_seconds(patcher, 0.5, asked.rows, asked.width) / resident)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        print(f"{name}, {asked.layers} layers of {asked.width} x {asked.width}, float16, medians of {TURNS} turns\n")
        print("| measurement | figure | bound |\n|---|---|---|")
        print(f"| loading, fraction of the pinned rate ({link / 1e9:.1f} GB/s) | {loaded / link:.2f} | at least 0.85 |")
        print(f"| half resident / fully resident, seconds per pass | {statistics.median(ratios):.3f} | at most 1.10 |")
        print(f"| private host memory while loaded, MiB | {private_bytes / MIB:.0f} | near 0 |")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
