"""Measures how long a start takes: `generate` until its first image is on disk, and `up` until the pool answers.

    python -m benchmarks.startup [--rounds 5] [--checkout DIR ...] [--device cpu] [--steps 8] [--only TEXT]

Each is compared with a script that makes the same image with diffusers alone (`benchmarks/bare_shapes.py`). Everything
runs in new processes; systems take turns, so that other load on the machine affects all of them; figures are medians
with the range. CPU seconds are those of all processes of the command at the moment that is measured, by process.
With --checkout, versions in other folders are measured in the same turns. The five default rounds take less than three
minutes on two quiet cores: about half a minute each, of which the ends of the commands, which are not measured, are a
quarter.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.cpu_parts import cpu_seconds
from benchmarks.spread import spread

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "examples" / "shapes" / "models"
#: the most that a start may take
LIMIT_SECONDS = 300.0
#: interval of looks for the first image
LOOK_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Start:
    """One start: seconds until the awaited moment, and the CPU seconds of each part until then."""

    seconds: float
    cpu_seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Way:
    """Something to measure. `run` starts it in the folder that it gets, waits for the moment, and ends it."""

    name: str
    run: Callable[[Path], Start]
    starts: list[Start] = field(default_factory=list)


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checkout", type=Path, action="append", default=[], help="another version; repeatable")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", default="", help="measure only what has this text in its name")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="startup-") as text:
        place = Path(text)
        write_config(place, wanted.device, wanted.workers)
        ways = [way for way in all_ways(place, wanted) if wanted.only in way.name]
        begun, loads = time.monotonic(), [os.getloadavg()[0]]
        for turn in range(wanted.rounds):
            for number, way in enumerate(ways):
                folder = place / f"{turn}-{number}"
                folder.mkdir()
                way.starts.append(way.run(folder))
                print(f"{way.name}: {way.starts[-1].seconds:.2f} s", file=sys.stderr, flush=True)
        loads.append(os.getloadavg()[0])
    print(f"{wanted.workers} workers on {wanted.device}, {wanted.rounds} rounds in turns, {os.cpu_count()} cores; load")
    print(f"average {loads[0]:.1f} before and {loads[1]:.1f} after {time.monotonic() - begun:.0f} s\n")
    print(table(ways))
    print(cpu_table([way for way in ways if len(way.starts[0].cpu_seconds) > 1]))


def write_config(place: Path, device: str, workers: int) -> None:
    """Write the configuration of the pools: the example model on this machine."""
    text = f'[pool]\ndevice = "{device}"\nworkers = {workers}\n[models]\nfolders = ["{MODELS}"]\n'
    (place / "pool.toml").write_text(f'{text}[cluster]\naddress = "local"\n')


def all_ways(place: Path, wanted: argparse.Namespace) -> list[Way]:
    """Return what is measured, in order. Converts the model for diffusers."""
    model = place / "diffusers"
    ways = []
    if wanted.only in "bare diffusers script":
        convert = [sys.executable, "-m", "modelpool", "convert", "shapes", "--to", "diffusers", "--dtype", "fp32"]
        convert += ["--out", str(model), "--config", str(place / "pool.toml")]
        subprocess.run(convert, check=True, env=environment(place, ROOT), cwd=place, capture_output=True)
        ways.append(Way("bare diffusers script", lambda folder: bare(folder, model, wanted.steps)))
    for checkout in [*wanted.checkout, ROOT]:
        code = checkout.resolve()
        suffix = f" ({code.name})" if wanted.checkout else ""
        ways.append(Way(f"`generate`{suffix}", partial(generate, place=place, code=code, steps=wanted.steps)))
        ways.append(Way(f"`up`{suffix}", partial(up, place=place, code=code)))
    return ways


def environment(place: Path, code: Path) -> dict[str, str]:
    """Return the environment of the commands of a checkout."""
    return {**os.environ, "PYTHONPATH": str(code), "XDG_STATE_HOME": str(place / "state")}


def bare(folder: Path, model: Path, steps: int) -> Start:
    """Make an image with diffusers alone."""
    script = str(ROOT / "benchmarks" / "bare_shapes.py")
    command = [sys.executable, script, str(model), str(folder / "image.png"), "--steps", str(steps)]
    with running(command, folder, dict(os.environ)) as (process, begun):
        return awaited(process, begun, lambda: has_image(folder))


def generate(folder: Path, place: Path, code: Path, steps: int) -> Start:
    """Make an image with `modelpool generate`."""
    command = [sys.executable, "-m", "modelpool", "generate", "a red circle", "--steps", str(steps), "--seed", "1"]
    command += ["--config", str(place / "pool.toml"), "--out", str(folder)]
    with running(command, folder, environment(place, code)) as (process, begun):
        start = awaited(process, begun, lambda: has_image(folder))
        if process.wait(LIMIT_SECONDS):
            raise RuntimeError(f"`generate` ended with {process.returncode}:\n{output_of(folder)}")
        return start


def up(folder: Path, place: Path, code: Path) -> Start:
    """Start a pool with `modelpool up` until it answers the question for its status, and end it."""
    command = [sys.executable, "-m", "modelpool", "up", "--name", "startup", "--config", str(place / "pool.toml")]
    with running(command, folder, environment(place, code)) as (process, begun):
        start = awaited(process, begun, lambda: answers(place, process.pid))
        process.terminate()
        process.wait(LIMIT_SECONDS)
        return start


@contextlib.contextmanager
def running(
    command: Sequence[str], folder: Path, variables: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """Run a command; yield it and the time of its start."""
    with (folder / "output.txt").open("wb") as output:
        begun = time.monotonic()
        process = subprocess.Popen(command, cwd=folder, env=dict(variables), stdout=output, stderr=output)
        try:
            yield process, begun
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def awaited(process: subprocess.Popen[bytes], begun: float, is_over: Callable[[], bool]) -> Start:
    """Return the cost of a start when `is_over`. Raises RuntimeError if the process ends before."""
    while not is_over():
        if process.poll() is not None and not is_over():
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
        if time.monotonic() - begun > LIMIT_SECONDS:
            raise RuntimeError(f"{process.args!r} is not ready after {LIMIT_SECONDS:.0f} s")
        time.sleep(LOOK_SECONDS)
    return Start(time.monotonic() - begun, cpu_seconds(process.pid))


def has_image(folder: Path) -> bool:
    """Whether a finished image is in the folder: files have their final names when they are complete."""
    return any(name.endswith(".png") and not name.startswith(".") for name in os.listdir(folder))


def answers(place: Path, pid: int) -> bool:
    """Whether the pool of process `pid` has written its run file and answers the question for its status."""
    for path in (place / "state").rglob("startup*.json"):
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(path.read_text())
            if known.get("pid") == pid and known.get("status_socket"):
                with socket.socket(socket.AF_UNIX) as asking, contextlib.suppress(OSError):
                    asking.connect(known["status_socket"])
                    return b'"status"' in asking.recv(1 << 16)
    return False


def output_of(folder: Path) -> str:
    """Return what a command has printed, its last part."""
    return (folder / "output.txt").read_text(errors="replace")[-2000:]


def table(ways: Sequence[Way]) -> str:
    """Return seconds and CPU seconds of all ways as a Markdown table."""
    lines = ["| until the first image, or the first answer | seconds | CPU seconds |", "|---|---|---|"]
    for way in ways:
        seconds = spread([start.seconds for start in way.starts])
        lines.append(f"| {way.name} | {seconds} | {spread([sum(s.cpu_seconds.values()) for s in way.starts])} |")
    return "\n".join([*lines, ""])


def cpu_table(ways: Sequence[Way]) -> str:
    """Return the CPU seconds of each part of a start as a Markdown table."""
    parts = dict.fromkeys(part for way in ways for start in way.starts for part in start.cpu_seconds)
    lines = [f"| CPU seconds | {' | '.join(way.name for way in ways)} |", "|---" * (len(ways) + 1) + "|"]
    for part in parts:
        cells = [spread([start.cpu_seconds.get(part, 0.0) for start in way.starts]) for way in ways]
        lines.append(f"| {part} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
