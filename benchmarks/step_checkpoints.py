"""Measures step checkpoints: what they add to a run of 100 steps, and what a killed worker loses.

    python -m benchmarks.step_checkpoints [--rounds N] [--kills N] [--step-seconds S] [--interval S] [--folder DIR]

The sampler, its state, the worker, the files and the threads are the real ones; the model is a wait, during which the
thread that runs leaves the processor to others, as one that waits for a GPU does. Every state is written twice, to the
folder of the node and to that of the controller. Runs with and without checkpoints alternate, in an order that turns
around each round. A killed worker is a process that is killed at a random time. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelpool.actors.worker.gpu_worker import GpuWorker
from modelpool.actors.worker.step_checkpoints.checkpoint_disk import CheckpointDisk
from modelpool.actors.worker.step_checkpoints.checkpoint_folder import CheckpointFolder
from modelpool.actors.worker.wire.messages import CallId, RunRequest, StateSaved
from modelpool.actors.worker.worker_setup import Checkpointing, WorkerCallbacks
from modelpool.pool.inference.conditioning.conditions import Condition
from modelpool.pool.inference.conditioning.prompts import Prompts
from modelpool.pool.inference.guidance.guided_steps import ModelCall
from modelpool.pool.inference.guidance.guiders import ClassifierFreeGuidance
from modelpool.pool.inference.guidance.sampling_run import ImagesToDenoise, denoise_images
from modelpool.pool.inference.sampling.partial_run import partial_run_of, run_states
from modelpool.pool.inference.sampling.schedules import sd1_sigma_table
from modelpool.pool.values.core.stage_params import (
    GuidanceParams,
    Latent,
    ModelRef,
    OutputShape,
    Result,
    RunHooks,
    RunState,
    SampleParams,
    SamplingSchedule,
)
from modelpool.pool.values.core.task_inputs import TaskInputs
from modelpool.pool.values.specs.spec import RunCost, Stage, TaskId, TaskSpec, WorkerId
from modelpool.pool.weights.plan.eviction_plan import Residency

STEPS = 100
MIB = 1 << 20
#: latents: SDXL at 1024 x 1024, and a video of 81 frames at 1280 x 720 (Wan), its frames in one side
LATENTS = {"image": (4, 128, 128), "video": (16, 21 * 90, 160)}
#: the sampler with the largest state
SAMPLER = "uni_pc"
DEFAULT_SECONDS = 30.0
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Timed:
    """One run: its seconds, those of the processor in all threads, and those that each checkpoint delayed it."""

    seconds: float
    cpu_seconds: float
    copies: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """See `pool.engine.engine_capacity.EngineFacts`."""

    capacity_bytes: int = 1 << 30
    link_bytes_per_second: float = 1e9
    device_name: str = "a wait"


class WaitingEngine:
    """Samples a latent with a model that waits `step_seconds`; counts the seconds that runs spend on checkpoints."""

    def __init__(self, shape_CHW: tuple[int, ...], step_seconds: float, on_step: Callable[[int], None]) -> None:
        self._shape_CHW = shape_CHW
        self._step_seconds = step_seconds
        self._on_step = on_step
        self.checkpoint_seconds: list[float] = []

    def introduce(self) -> Facts:
        """Return made-up figures."""
        return Facts()

    def residency(self) -> Residency:
        """Return that of an empty device."""
        return Residency(1 << 30)

    def close(self) -> None:
        """Do nothing."""

    def run(
        self,
        task: TaskSpec,
        work: SampleParams,
        inputs: Mapping[str, Result],
        hooks: RunHooks,
        *more: object,
        resume: RunState | None = None,
    ) -> tuple[Result, RunCost]:
        """Sample."""

        def predict(x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor) -> Tensor:
            time.sleep(self._step_seconds)
            return x_BCHW * 0.1

        def checkpoint(states: Callable[[], Sequence[RunState]]) -> None:
            began = time.perf_counter()
            hooks.checkpoint(states)
            seconds = time.perf_counter() - began
            if seconds > 1e-4:  # not only a look at the clock
                self.checkpoint_seconds.append(seconds)

        def on_step(step: int, steps: int) -> None:
            hooks.on_step(step, steps)
            self._on_step(step)

        part = partial_run_of(
            (work,), (TaskInputs(inputs),), CPU, () if resume is None else (resume,), hooks.should_pause
        )
        latent_BCHW = denoise_images(
            ImagesToDenoise(work, (work.seed,), self._shape_CHW),
            Prompts(Condition(torch.zeros((1, 1, 8)))),
            ModelCall(predict, sd1_sigma_table()),
            ClassifierFreeGuidance(work.guidance.cfg),
            CPU,
            replace(hooks, on_step=on_step, checkpoint=checkpoint),
            part=part,
        )
        result: Result = run_states(part, work)[0] if part.paused else Latent(latent_BCHW[0].numpy())
        return result, RunCost()


def worker_of(
    shape_CHW: tuple[int, ...],
    step_seconds: float,
    interval_seconds: float | None,
    folder: Path,
    on_step: Callable[[int], None] = lambda step: None,
) -> tuple[GpuWorker, WaitingEngine]:
    """Return a worker that saves in `folder`, in the place of its node and in that of its controller."""
    engine = WaitingEngine(shape_CHW, step_seconds, on_step)
    archive = CheckpointFolder(folder / "controller", 1 << 40)

    def send(saved: StateSaved, state: RunState) -> None:
        archive.save(saved.task_id, state)

    worker = GpuWorker(
        WorkerId("gpu-0"),
        1,
        lambda: engine,  # type: ignore[arg-type, return-value]
        WorkerCallbacks(lambda step: None, on_state=send),
        checkpointing=Checkpointing(interval_seconds, CheckpointDisk(CheckpointFolder(folder / "node", 1 << 40))),
    )
    worker.start()
    return worker, engine


def request_of(seed: int) -> RunRequest:
    """Return a run of `STEPS` steps."""
    work = SampleParams(
        ModelRef("toy", "toy.safetensors", "00"),
        (),
        OutputShape(64, 64),
        SamplingSchedule(STEPS, SAMPLER, "normal"),
        GuidanceParams(1.0),
        seed,
    )
    return RunRequest(TaskSpec(TaskId(f"sample-{seed}"), Stage.SAMPLE, (), 0, 0.0), work, 1, seed)


def timed_run(shape_CHW: tuple[int, ...], step_seconds: float, interval_seconds: float | None, parent: Path) -> Timed:
    """Run once, in a new folder: a run resumes from what it finds."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=parent))
    worker, engine = worker_of(shape_CHW, step_seconds, interval_seconds, folder)
    cpu_seconds, began = time.process_time(), time.perf_counter()
    (report,), _ = worker.run(CallId(1), (request_of(1),))
    seconds = time.perf_counter() - began
    assert report.error is None, report.error
    assert report.cost.steps_before == 0, "it resumed"
    time.sleep(1.0)  # for the threads
    cpu_seconds = time.process_time() - cpu_seconds
    worker.close()
    shutil.rmtree(folder, ignore_errors=True)
    return Timed(seconds, cpu_seconds, tuple(engine.checkpoint_seconds))


def state_bytes(shape_CHW: tuple[int, ...]) -> int:
    """Return the bytes of a state in the middle of a run."""
    seen: list[int] = []

    def send(saved: StateSaved, state: RunState) -> None:
        seen.append(saved.state_bytes)

    engine = WaitingEngine(shape_CHW, 0.0, lambda step: None)
    worker = GpuWorker(
        WorkerId("gpu-0"),
        1,
        lambda: engine,  # type: ignore[arg-type, return-value]
        WorkerCallbacks(lambda step: None, on_state=send),
        checkpointing=Checkpointing(0.0),
    )
    worker.start()
    request = request_of(2)
    assert isinstance(request.work, SampleParams)
    worker.run(CallId(2), (replace(request, work=replace(request.work, steps=8)),))
    worker.close()
    return max(seen)


def overhead(wanted: argparse.Namespace, folder: Path) -> None:
    """Print what checkpoints add to a run."""
    print(
        f"| state | MiB | run without, s | with one every {wanted.interval:g} s, s | checkpoints "
        f"| each delays the run, ms | CPU of each, two files, ms | delay with one every {DEFAULT_SECONDS:g} s "
        f"| CPU with one every {DEFAULT_SECONDS:g} s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, shape_CHW in LATENTS.items():
        plain: list[Timed] = []
        saved: list[Timed] = []
        for number in range(wanted.rounds):
            for interval in ((None, wanted.interval), (wanted.interval, None))[number % 2]:
                timed = timed_run(shape_CHW, wanted.step_seconds, interval, folder)
                (plain if interval is None else saved).append(timed)
        copies = [seconds for timed in saved for seconds in timed.copies]
        delay, count = statistics.median(copies), len(copies) / wanted.rounds
        cpu = median_of(saved, "cpu_seconds") - median_of(plain, "cpu_seconds")
        print(
            f"| {name} | {state_bytes(shape_CHW) / MIB:.1f} | {spread(plain)} | {spread(saved)} | {count:.1f} "
            f"| {1000 * delay:.1f} (at most {1000 * max(copies):.1f}) | {1000 * cpu / count:.0f} "
            f"| {delay / DEFAULT_SECONDS:.3%} | {cpu / count / DEFAULT_SECONDS:.2%} |",
            flush=True,
        )


def median_of(runs: Sequence[Timed], field: str) -> float:
    """Return the median of one figure."""
    return statistics.median(getattr(timed, field) for timed in runs)


def spread(runs: Sequence[Timed]) -> str:
    """Format the seconds of runs."""
    seconds = [timed.seconds for timed in runs]
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def run_until_killed(name: str, step_seconds: float, interval_seconds: float, folder: str) -> None:
    """A process that runs, and prints each step that it has done, until it is killed."""
    torch.set_num_threads(1)
    worker, _ = worker_of(LATENTS[name], step_seconds, interval_seconds, Path(folder), partial(print, flush=True))
    worker.run(CallId(3), (request_of(3),))


def losses(wanted: argparse.Namespace, folder: Path) -> None:
    """Print the steps that are lost with a worker that is killed at a random time of its run."""
    print(f"| state | kills | seconds of work lost with one every {wanted.interval:g} s, median (worst) |")
    print("|---|---|---|")
    for name in LATENTS:
        lost = [seconds for _ in range(wanted.kills) if (seconds := lost_seconds(name, wanted, folder)) is not None]
        print(f"| {name} | {len(lost)} | {statistics.median(lost):.2f} ({max(lost):.2f}) |", flush=True)


def lost_seconds(name: str, wanted: argparse.Namespace, folder: Path) -> float | None:
    """Kill a run at a random time; return the seconds of work after its newest checkpoint. None if it ended first."""
    shutil.rmtree(folder, ignore_errors=True)
    code = f"from {__name__ if __name__ != '__main__' else 'benchmarks.step_checkpoints'} import run_until_killed; "
    code += f"run_until_killed({name!r}, {wanted.step_seconds}, {wanted.interval}, {str(folder)!r})"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    first = time.monotonic()
    time.sleep(random.uniform(2, 5) * wanted.interval)
    process.kill()
    ran_seconds = time.monotonic() - first
    steps = [1, *(int(line) for line in process.stdout.read().split())]
    process.wait()
    if steps[-1] >= STEPS:
        return None
    found: dict[Any, int] = CheckpointFolder(folder / "node", 1 << 40).steps()
    done = found.get(TaskId("sample-3"), 0)
    return ran_seconds - (done - 1) * ran_seconds / max(1, steps[-1] - 1)


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--interval", type=float, default=1.5)
    parser.add_argument("--folder", type=Path, help="for the checkpoints; by default a temporary one")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(1)
    folder = Path(tempfile.mkdtemp(prefix="step-checkpoints-", dir=wanted.folder))
    try:
        one, five, fifteen = os.getloadavg()
        print(f"{os.cpu_count()} cores, load {one:.1f} {five:.1f} {fifteen:.1f}\n")
        overhead(wanted, folder / "overhead")
        print()
        losses(wanted, folder / "losses")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
