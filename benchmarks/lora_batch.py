"""Measures uploads and LoRA switches of a batch with several LoRAs on several simulated GPUs.

Runs the same 200 jobs, with alternating LoRAs, through the real pool twice: placed by expected completion time, and in
arrival order. Run from the repository: `python -m benchmarks.lora_batch`.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from modelpool import GenerateRequest, ModelPool
from modelpool.actors.config.config import PoolConfig
from modelpool.pool.values.specs.spec import Stage

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "laptop.toml"
JOBS = 200
LORAS = ("light", "outline")
PROMPTS = ("a red circle", "a blue square", "a yellow triangle", "a green circle")
MIB = 1 << 20


def run(placement: str) -> str:
    """Run the batch once; return a row of the table."""
    config = PoolConfig.load(CONFIG).override(device="sim", workers=3, vram="64MiB")
    config = config.model_copy(update={"scheduler": dataclasses.replace(config.scheduler, placement=placement)})
    with ModelPool.start(config) as pool:
        pool.wait_ready(300)
        requests = [
            GenerateRequest(
                model="shapes", prompt=PROMPTS[i % 4], seed=i, steps=4, loras=[(LORAS[i % len(LORAS)], 0.8)]
            )
            for i in range(JOBS)
        ]
        begun = time.perf_counter()
        summary = pool.submit(requests, output=False).wait(900)
        seconds = time.perf_counter() - begun
        status = pool.status()
    assert summary.succeeded == JOBS
    samples = [task for task in summary.tasks if task.stage is Stage.SAMPLE]
    resident = sum(task.resident for task in samples)
    return (
        f"| {placement} | {status.patch_switches} | {status.uploaded_bytes / MIB:.1f} | "
        f"{100 * resident / len(samples):.0f}% | {seconds:.1f} |"
    )


def main() -> None:
    """Print the table."""
    print(f"{JOBS} jobs, {len(LORAS)} alternating LoRAs, 3 simulated GPUs, 4 steps")
    print("| placement | LoRA switches | uploaded, MiB | sample tasks with all weights resident | wall seconds |")
    print("|---|---|---|---|---|")
    for placement in ("soonest", "arrival_order"):
        print(run(placement), flush=True)


if __name__ == "__main__":
    main()
