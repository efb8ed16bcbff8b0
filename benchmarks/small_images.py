"""Measures small images through a complete pool against diffusers alone: 24 images of the example model, two processes.

    python -m benchmarks.small_images [--images 24] [--rounds 7] [--warm-up 3] [--devices cpu,sim] [--limits 1,8]
                                      [--batches 8] [--workers 2]

Systems: a pool with two workers on each device (`--workers`), with each `batch_limit` and with each `batch` of
requests, submits all images at once and waits for their pixels, without files; as many processes with bare diffusers
share the images, and make them one by one, or in batches of 8. Where the workers leave no core free, as two do on two
cores, the controller and the command take theirs from them. Each worker and each process computes on one CPU thread, in
float32, 8 steps of Euler with guidance. All have made images before (`--warm-up` rounds, in which a pool learns what
batches gain). Prompts and seeds are new in each round, and the same for all systems.

Every system is a process of its own, which waits while others have their turn. Figures are medians with the range. The
default takes less than four minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.cpu_parts import cpu_seconds
from benchmarks.spread import spread

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "examples" / "shapes" / "models"
COLORS = ("red", "green", "blue", "yellow", "purple", "cyan")
SHAPES = ("circle", "square", "triangle")
BATCH = 8
STAGES = ("encode", "sample", "decode")


@dataclass(slots=True)
class System:
    """A system that makes images in one or more processes of this module, and its rounds.

    arguments  of each process, after the name of its part
    seconds    of each measured round
    tasks      of a pool in all measured rounds: stage and size of the batch
    loads      of a pool in each measured round
    cpu        CPU seconds of each part (`cpu_parts`) in all measured rounds
    """

    name: str
    arguments: tuple[tuple[str, ...], ...]
    seconds: list[float] = field(default_factory=list)
    tasks: Counter[tuple[str, int]] = field(default_factory=Counter)
    loads: list[int] = field(default_factory=list)
    cpu: Counter[str] = field(default_factory=Counter)


def main() -> None:
    """Measure and print the tables, or be one process of a system."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--devices", default="cpu,sim")
    parser.add_argument("--limits", default="1,8")
    parser.add_argument("--batches", default="8")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--be", nargs="+", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.be:
        {"pool": be_pool, "bare": be_bare}[wanted.be[0]](wanted, *wanted.be[1:])
        return
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="small-images-") as folder, contextlib.ExitStack() as opened:
        systems = all_systems(wanted, Path(folder))
        begun = time.monotonic()
        running = [opened.enter_context(started(system, wanted, Path(folder))) for system in systems]
        for turn in range(wanted.warm_up + wanted.rounds):
            for system, processes in zip(systems, running, strict=True):
                measure(system, processes, turn, counts=turn >= wanted.warm_up)
            spent = ", ".join(f"{system.name} {system.seconds[-1]:.2f} s" for system in systems if system.seconds)
            print(f"round {turn}: {spent or 'warm-up'}", file=sys.stderr, flush=True)
        loads.append(os.getloadavg()[0])
        print(f"{wanted.images} images, {wanted.workers} workers or processes, {wanted.rounds} rounds in turns after")
        print(f"{wanted.warm_up} of warm-up, {os.cpu_count()} cores; load average {loads[0]:.1f} before and")
        print(f"{loads[1]:.1f} after {time.monotonic() - begun:.0f} s\n")
        print(table(systems, wanted.images))
        print(task_table(systems))
        print(cpu_table(systems, wanted.images * wanted.rounds))


def all_systems(wanted: argparse.Namespace, folder: Path) -> list[System]:
    """Return the systems: the bare ones first. Converts the model for diffusers."""
    model = folder / "diffusers"
    convert = [sys.executable, "-m", "modelpool", "convert", str(MODELS / "shapes.safetensors"), "--to", "diffusers"]
    subprocess.run([*convert, "--dtype", "fp32", "--out", str(model)], check=True, capture_output=True, cwd=folder)
    bare = [
        System(name, tuple(("bare", str(model), str(size), str(part)) for part in range(wanted.workers)))
        for name, size in (("bare diffusers, one by one", 1), (f"bare diffusers, batches of {BATCH}", BATCH))
    ]
    pools = [
        System(f"pool on {device}, `batch_limit` {limit}", (("pool", device, limit, "1"),))
        for device in wanted.devices.split(",")
        for limit in filter(None, wanted.limits.split(","))
    ]
    fixed = [
        System(f"pool on {device}, `batch` = {size}", (("pool", device, "1", size),))
        for device in wanted.devices.split(",")
        for size in filter(None, wanted.batches.split(","))
    ]
    return [*bare, *pools, *fixed]


@contextlib.contextmanager
def started(system: System, wanted: argparse.Namespace, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Run the processes of a system; yield them when they are ready."""
    processes = []
    state = folder / f"state-{len(list(folder.iterdir()))}"
    state.mkdir()
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(state), "OMP_NUM_THREADS": "1"}
    variables |= {"TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    common = ["--images", str(wanted.images), "--steps", str(wanted.steps), "--workers", str(wanted.workers)]
    try:
        for arguments in system.arguments:
            command = [sys.executable, "-m", "benchmarks.small_images", *common, "--be", *arguments]
            processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables, cwd=folder
                )
            )
        for process in processes:
            answer_of(process)
        yield processes
    finally:
        for process in processes:
            stream_in(process).close()
        for process in processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def measure(system: System, processes: Sequence[subprocess.Popen[str]], turn: int, counts: bool) -> None:
    """Have a system make the images of a round."""
    before = Counter[str]()
    for process in processes:
        before.update(cpu_seconds(process.pid))
    begun = time.monotonic()
    for process in processes:
        stream_in(process).write(f"{turn}\n")
        stream_in(process).flush()
    answers = [answer_of(process) for process in processes]
    if not counts:
        return
    system.seconds.append(time.monotonic() - begun)
    for process in processes:
        system.cpu.update(cpu_seconds(process.pid))
    system.cpu.subtract(before)
    if "tasks" in answers[0]:
        system.loads.append(answers[0]["loads"])
        system.tasks.update({(stage, size): count for stage, size, count in answers[0]["tasks"]})


def answer_of(process: subprocess.Popen[str]) -> Any:
    """Return the next message of a process of a system. Raises RuntimeError if it has ended."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise RuntimeError(f"{process.args!r} ended with {process.wait()}")


def stream_in(process: subprocess.Popen[str]) -> IO[str]:
    """Return the stream to a process."""
    assert process.stdin is not None
    return process.stdin


def report(**facts: object) -> None:
    """Send a message to the parent."""
    print(json.dumps(facts), flush=True)


def work_of(turn: int, images: int) -> list[tuple[str, int]]:
    """Return prompts and seeds of a round."""
    kinds = [f"a {color} {shape}" for color in COLORS for shape in SHAPES]
    pairs = [f"{one} and {other}" for one in kinds for other in kinds if one != other]
    numbers = range(turn * images, (turn + 1) * images)
    again = [f" number {number // len(pairs)}" if number >= len(pairs) else "" for number in numbers]
    return [(pairs[number * 7 % len(pairs)] + more, number) for number, more in zip(numbers, again, strict=True)]


def be_bare(wanted: argparse.Namespace, model: str, size: str, part: str) -> None:
    """Make a part of the images of each round with diffusers."""
    from benchmarks.bare_shapes import draw, open_pipeline

    pipeline, number = open_pipeline(model), int(size)
    report(ready=True)
    for line in sys.stdin:
        work = work_of(int(line), wanted.images)[int(part) :: wanted.workers]
        images = 0
        for start in range(0, len(work), number):
            prompts, seeds = zip(*work[start : start + number], strict=True)
            images += len(draw(pipeline, prompts, seeds, wanted.steps))
        report(images=images)


def be_pool(wanted: argparse.Namespace, device: str, limit: str, size: str) -> None:
    """Make all images of each round with a pool, in forward passes of `size` images, or up to `limit`."""
    from benchmarks.bare_shapes import GUIDANCE, SIDE
    from modelpool import ModelPool
    from modelpool.actors.config.config import PoolConfig

    config = PoolConfig.model_validate(
        {
            "pool": {"device": device, "workers": wanted.workers},
            "models": {"folders": [str(MODELS)]},
            "cluster": {"address": "local"},
            "scheduler": {"batch_limit": int(limit)},
        }
    )
    with ModelPool.start(config) as pool:
        pool.wait_ready(300)
        report(ready=True)
        for line in sys.stdin:
            requests = [
                {"model": "shapes", "prompt": prompt, "seed": seed, "steps": wanted.steps, "cfg": GUIDANCE}
                | {"sampler": "euler", "width": SIDE, "height": SIDE, "batch": size}
                for prompt, seed in work_of(int(line), wanted.images)
            ]
            jobs = pool.submit(requests, output=False)
            images = sum(1 for image in jobs if image.pixels.shape == (SIDE, SIDE, 3))
            assert images == wanted.images, f"{images} images: {jobs.failures()}"
            done = [task for task in jobs.summary().tasks if not task.shared]
            batches = Counter((task.stage.value, task.batched) for task in done)
            loads = sum(1 for task in done if task.uploaded_bytes)
            report(images=images, loads=loads, tasks=[(*kind, count) for kind, count in batches.items()])


def table(systems: Sequence[System], images: int) -> str:
    """Return seconds, speed and loads as a Markdown table; ratios are those of the seconds in the same round."""
    single, batches = systems[0], systems[1]
    lines = [f"| system | seconds | images/s | {single.name}: seconds / seconds | {batches.name}: the same | loads |"]
    lines.append("|---|---|---|---|---|---|")
    for system in systems:
        cells = [spread(system.seconds), f"{images / statistics.median(system.seconds):.2f}"]
        for other in (single, batches):
            ratios = [theirs / ours for theirs, ours in zip(other.seconds, system.seconds, strict=True)]
            cells.append("" if system in (single, batches) and other is system else spread(ratios))
        cells.append(f"{statistics.median(system.loads):g}" if system.loads else "")
        lines.append(f"| {system.name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def task_table(systems: Sequence[System]) -> str:
    """Return how many tasks of all rounds ran in batches of each size as a Markdown table."""
    pools = [system for system in systems if system.tasks]
    lines = [f"| tasks by the size of their batch | {' | '.join(STAGES)} |", "|---" * (len(STAGES) + 1) + "|"]
    for system in pools:
        cells = []
        for stage in STAGES:
            sizes = sorted(size for known, size in system.tasks if known == stage)
            cells.append(", ".join(f"{system.tasks[stage, size]} in {size}" for size in sizes))
        lines.append(f"| {system.name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def cpu_table(systems: Sequence[System], images: int) -> str:
    """Return the CPU milliseconds per image of each part of each system as a Markdown table."""
    parts: list[str] = list(dict.fromkeys(name for system in systems for name in system.cpu))
    parts = [part for part in parts if any(system.cpu[part] > 0 for system in systems)]
    lines = [f"| CPU ms per image | {' | '.join(parts)} | all |", "|---" * (len(parts) + 2) + "|"]
    for system in systems:
        cells = [f"{system.cpu[part] * 1000 / images:.1f}" for part in parts]
        lines.append(f"| {system.name} | {' | '.join(cells)} | {system.cpu.total() * 1000 / images:.1f} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
