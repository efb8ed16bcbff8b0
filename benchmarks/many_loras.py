"""Measures mappings and memory of worker and controller while one worker uses thousands of LoRA files, each once.

Writes copies of the example LoRA (equal weights, different content hashes) to a temporary folder, requests one image
with each through a pool with one simulated GPU, and prints a row per batch: mappings of LoRA files and anonymous memory
of the worker and of the controller. Linux only. Run from the repository:

    python -m benchmarks.many_loras [LORAS] [BATCH]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import psutil
from safetensors.torch import load_file, save_file

from modelpool import GenerateRequest, ModelPool

SHAPES = Path(__file__).resolve().parents[1] / "examples" / "shapes"
MIB = 1 << 20


def write_loras(folder: Path, count: int) -> list[str]:
    """Write `count` files with equal weights and different metadata; return their names."""
    weights = load_file(SHAPES / "loras" / "light.safetensors")
    names = [f"lora{number:05d}" for number in range(count)]
    for name in names:
        save_file(weights, folder / f"{name}.safetensors", metadata={"copy": name})
    return names


def process_of(name: str) -> psutil.Process:
    """Return the process of the Ray actor whose title contains `name`."""
    (found,) = [p for p in psutil.process_iter(["cmdline"]) if f"ray::{name}" in " ".join(p.info["cmdline"] or ())]
    return found


def figures(process: psutil.Process, folder: Path) -> tuple[int, float]:
    """Return the number of files of `folder` that the process maps, and its anonymous memory in MiB."""
    maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[-1] for line in maps if str(folder) in line}
    return len(files), process.memory_full_info().uss / MIB


def main(count: int = 2000, batch: int = 250) -> None:
    """Measure and print the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loras = write_loras(folder, count)
        pool_settings = {
            "device": "sim",
            "workers": 1,
            "vram": "64MiB",
            "models": [SHAPES / "models"],
            "loras": [folder],
        }
        with ModelPool.start(**pool_settings) as pool:
            pool.wait_ready(300)
            processes = {title: process_of(title) for title in ("GpuWorker", "Controller")}
            print("| LoRAs used | worker: mapped | worker: MiB | controller: mapped | controller: MiB |")
            print("|---|---|---|---|---|")
            for begin in range(0, count, batch):
                requests = [
                    GenerateRequest(
                        model="shapes", prompt="a", loras=[lora], seed=1, steps=1, cfg=1, width=64, height=64
                    )
                    for lora in loras[begin : begin + batch]
                ]
                jobs = pool.submit(requests, output=False)
                jobs.wait(3600)
                assert not jobs.failures, jobs.failures[0]
                cells = [cell for process in processes.values() for cell in figures(process, folder)]
                row = " | ".join(f"{cell:.0f}" for cell in cells)
                print(f"| {begin + len(requests)} | {row} |", flush=True)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
