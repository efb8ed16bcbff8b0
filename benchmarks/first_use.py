"""Measures what a new user waits for: help, errors, the first task of a large batch, and Ctrl-C.

Every figure is of the command itself, in a process of its own, with the example model on two simulated GPUs.

- help and errors: seconds until the command has ended, and seconds of CPU in it and its children
- first task: from the start of a worker to the first command to run a task, by the event log of the scheduler, and from
  the start of the command
- Ctrl-C: from the signal to the end of the command; sent `STOP_SECONDS` after the start of the command (the pool is
  starting, or requests are being checked), and `STOP_SECONDS` after the first task

Usage: python -m benchmarks.first_use [--runs 5] [--batch-runs 5] [--lines 50000] [--checkout DIR]

With --checkout, the code of another checkout is measured, such as an earlier version.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STOP_SECONDS = 15.0
#: limit for a batch to start its first task
MOST_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, and what it took."""

    code: int
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One run of a large batch that was stopped. Seconds; None if it did not come so far.

    after_up     first task after the first worker
    after_start  first task after the start of the command
    stop         the end of the command after Ctrl-C
    """

    after_up: float | None
    after_start: float | None
    stop: float


class Workplace:
    """A folder with a configuration, job files, and the code to measure."""

    def __init__(self, folder: Path, checkout: Path, lines: int) -> None:
        self.folder = folder
        self._checkout = checkout
        self.lines = lines
        shapes = ROOT / "examples" / "shapes"
        self._config(folder / "pool.toml", shapes / "models", shapes / "loras", record=True)
        self._config(folder / "missing.toml", folder / "modles", shapes / "loras", record=False)
        with (folder / "jobs.jsonl").open("w") as file:
            for line in range(lines):
                request = {"prompt": f"a red circle {line}", "steps": 4, "width": 32, "height": 32}
                file.write(f"{json.dumps(request)}\n")
        (folder / "file").touch()

    def run(self, *arguments: str) -> Ended:
        """Run a command to its end."""
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        with self._started(arguments) as process:
            code = process.wait()
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Ended(code, seconds, cpu_seconds)

    def stopped_batch(self, until_first_task: bool) -> BatchRun:
        """Run a large batch, and send Ctrl-C some time after its first task, or after its start."""
        record = self.folder / "events.log"
        record.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder) as out:
            began = time.monotonic()
            with self._started(("batch", "jobs.jsonl", "--model", "shapes", "--out", out, *self.config)) as process:
                while until_first_task and first_task(record) is None and time.monotonic() - began < MOST_SECONDS:
                    if process.poll() is not None:
                        raise RuntimeError(f"the batch ended with {process.returncode} before its first task")
                    time.sleep(0.2)
                time.sleep(STOP_SECONDS)
                signalled = time.monotonic()
                process.send_signal(signal.SIGINT)
                process.wait()
                stop = time.monotonic() - signalled
        found = first_task(record)
        return BatchRun(None, None, stop) if found is None else BatchRun(found[1] - found[0], found[1] - began, stop)

    @property
    def config(self) -> tuple[str, str]:
        """The option with the usable configuration."""
        return ("--config", "pool.toml")

    @contextlib.contextmanager
    def _started(self, arguments: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
        environment = {**os.environ, "PYTHONPATH": str(self._checkout), "XDG_STATE_HOME": str(self.folder / "state")}
        with (self.folder / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "modelpool", *arguments],
                cwd=self.folder,
                env=environment,
                stdout=output,
                stderr=output,
            )
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()

    def _config(self, path: Path, models: Path, loras: Path, record: bool) -> None:
        text = f'[pool]\ndevice = "sim"\nworkers = 2\nvram = "64MiB"\n[models]\nfolders = ["{models}"]\n'
        text += f'loras = ["{loras}"]\n[cluster]\naddress = "local"\n'
        path.write_text(f'{text}[output]\nrecord = "events.log"\n' if record else text)


def first_task(record: Path) -> tuple[float, float] | None:
    """Return when the first worker was up and when the first task was sent, on the machine's monotonic clock; None
    before that.
    """
    up: float | None = None
    with contextlib.suppress(OSError, json.JSONDecodeError), record.open() as lines:
        next(lines, None)
        for line in lines:
            entry: dict[str, Any] = json.loads(line)
            ((kind, event),) = entry["event"].items()
            if kind == "WorkerUp" and up is None:
                up = event["at"]
            if up is not None and any("RunTask" in command for command in entry["commands"]):
                return up, event["at"]
    return None


def commands(place: Workplace) -> dict[str, tuple[str, ...]]:
    """Return the commands that end by themselves, by their rows in the table."""
    generate = ("generate", "a red circle", "--out", "images")
    return {
        "`--help`": ("--help",),
        "`generate --help`": ("generate", "--help"),
        "`status`, no pool": ("status",),
        "misspelled model": (*generate, "--model", "shapse", *place.config),
        "misspelled LoRA": (*generate, "--lora", "lihgt", *place.config),
        "output folder that cannot be created": ("generate", "a red circle", "--out", "file/images", *place.config),
        "configured folder that is missing": (*generate, "--model", "shapes", "--config", "missing.toml"),
        "batch, misspelled model": ("batch", "jobs.jsonl", "--model", "shapse", "--out", "images", *place.config),
    }


def median(values: Sequence[float | None]) -> str:
    """Return the median of the values that exist, in seconds with the range; "-" without any."""
    found = sorted(value for value in values if value is not None)
    if not found:
        return "-"
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description="Measures what a new user waits for.")
    parser.add_argument("--runs", type=int, default=5, help="of each command (default: 5)")
    parser.add_argument("--batch-runs", type=int, default=5, help="of each batch (default: 5)")
    parser.add_argument("--lines", type=int, default=50_000, help="of the job file (default: 50000)")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="code to measure (default: this checkout)")
    parser.add_argument("--only", default="", help="measure only commands whose row contains this text")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Workplace(Path(folder), options.checkout.resolve(), options.lines)
        loads = [os.getloadavg()[0]]
        print("| command | seconds | CPU seconds | exit code |\n|---|---|---|---|", flush=True)
        for row, arguments in commands(place).items():
            if options.only in row:
                ended = [place.run(*arguments) for _ in range(options.runs)]
                codes = ", ".join(sorted({str(one.code) for one in ended}))
                seconds, cpu_seconds = median([o.seconds for o in ended]), median([o.cpu_seconds for o in ended])
                print(f"| {row} | {seconds} | {cpu_seconds} | {codes} |", flush=True)
        loads.append(os.getloadavg()[0])
        if options.batch_runs:
            print(f"\n| batch of {options.lines:,} lines | seconds |\n|---|---|", flush=True)
            runs = [place.stopped_batch(until_first_task=True) for _ in range(options.batch_runs)]
            print(f"| first task, after the first worker is up | {median([run.after_up for run in runs])} |")
            print(f"| first task, after the start of the command | {median([run.after_start for run in runs])} |")
            print(
                f"| Ctrl-C {STOP_SECONDS:.0f} s after the first task | {median([run.stop for run in runs])} |",
                flush=True,
            )
            runs = [place.stopped_batch(until_first_task=False) for _ in range(options.batch_runs)]
            print(f"| Ctrl-C {STOP_SECONDS:.0f} s after the start | {median([run.stop for run in runs])} |", flush=True)
        loads.append(os.getloadavg()[0])
        print(f"\nload (1 minute) before, between and after: {', '.join(f'{load:.1f}' for load in loads)}")


if __name__ == "__main__":
    main()
