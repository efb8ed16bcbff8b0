"""Runs the GPU benchmark in four commands of 9.5 minutes: `python -m benchmarks.gpu correctness --out FOLDER`, then
memory, sampling and features, with a folder for each; without a name, all of them (`--minutes` for other times).

The parts of a command come in order of value, each in a child process with an end of its time, so that a crash or a
hang of the driver ends one part and not the run. After each part, `table.md` and `results.json` in FOLDER are complete
up to there; the output of the children is in `log.txt`. Runs from a plain source tree. Parts that need a package which
is not installed are skipped, with the reason. `--device cpu` or `sim` runs the same code with tiny models on any
machine. Before the parts, the command measures how slow the machine is at the time: what cannot be interrupted, such as
compiling, is begun with as much more time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from benchmarks.gpu import calibration
from benchmarks.gpu.calibration import START_SECONDS, Calibration
from benchmarks.gpu.figures import figures_table
from benchmarks.gpu.measurements import SKIPPED, Measurement, read_measurements, table_of
from benchmarks.gpu.setting import PREFIX

ROOT = Path(__file__).resolve().parents[2]
#: a part that has not stopped by itself is ended after its time, this many seconds and this share of its time later: a
#: measurement that has begun is worth more than the beginning of the next part
GRACE_SECONDS, GRACE_SHARE = 20.0, 0.5
#: at the end of the run: for writing the results, and the share of its time that only a part takes which is late
END_SECONDS, LATE_SHARE = 2.0, 0.08
#: a part is not started with less, or with less than this many times what the start of a process takes
LEAST_SECONDS, LEAST_STARTS = 5.0, 1.5
#: folder in memory on Linux
SHARED_MEMORY = Path("/dev/shm")
#: for Flux, SDXL and some reserve
MODEL_BYTES = 48 << 30


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the run.

    name    its name, which `benchmarks.gpu.part` knows
    weight  its share of the time that is left, relative to the parts behind it
    models  models that it reads: those that a later part reads, too, are kept for it
    """

    name: str
    weight: float
    models: tuple[str, ...] = ()


#: the four commands of a visit, each with its parts in order of value
COMMANDS: Mapping[str, tuple[Part, ...]] = {
    # what may be wrong: order of streams first, then numbers
    "correctness": (
        Part("tests", 3.0),
        Part("sanitizer", 1.0),
        Part("zoo", 1.5),
        Part("precision", 2.0),
        Part("families", 2.0),
    ),
    # what plans and transfers assume
    "memory": (
        Part("device", 1.0),
        Part("transfers", 2.0, ("sdxl",)),
        Part("memory", 1.5, ("sdxl",)),
        Part("switch", 2.0, ("sdxl", "flux")),
        Part("loading flux", 1.5, ("flux",)),
    ),
    # against diffusers, at published shapes
    "sampling": (
        Part("sampling sdxl", 2.0, ("sdxl",)),
        Part("more sdxl", 2.0, ("sdxl",)),
        Part("attention", 0.7),
        Part("sampling flux", 3.0, ("flux",)),
        Part("more flux", 3.0, ("flux",)),
        Part("sampling wan", 2.0, ("wan",)),
        Part("sampling sd15", 1.0, ("sd15",)),
    ),
    # what is off by default, or takes long
    "features": (
        Part("overlap sdxl", 1.0, ("sdxl",)),
        Part("captures", 2.5),
        Part("gangs", 1.5),
        Part("soak", 1.5),
        Part("compiled sdxl", 3.0, ("sdxl",)),
        Part("sampling flux_fp8", 2.0, ("flux_fp8",)),
        Part("compiled flux", 3.0, ("flux",)),
        Part("overlap sd15", 0.7, ("sd15",)),
        Part("pool", 1.5, ("sd15",)),
    ),
}
#: all of them
PARTS = tuple(part for parts in COMMANDS.values() for part in parts)
#: the command of each part
COMMAND_OF: Mapping[str, str] = {part.name: command for command, parts in COMMANDS.items() for part in parts}
#: time of one command
COMMAND_MINUTES = 9.5


def seconds_for(part: Part, later: Sequence[Part], left_seconds: float) -> float:
    """Return the time of `part`: its share of what is left. Time that earlier parts did not use is in it. Pure."""
    return left_seconds * part.weight / (part.weight + sum(other.weight for other in later))


def run_parts(
    parts: Sequence[Part],
    minutes: float,
    out: Path,
    models: Path,
    command_of: Callable[[Part, float, Path], Sequence[str]],
    least_seconds: float | None = None,
) -> None:
    """Run the parts one after the other and write the results after each.

    `command_of` returns the command of a part, with the end of its time on the monotonic clock and the file for its
    measurements. A part may take longer, until the end of the run at most; those behind it get less. Parts write models
    to the folder `models`. No part is begun with less than `least_seconds` (None: `LEAST_SECONDS`). After each part,
    all that no later part reads is removed from the folder: models take tens of gigabytes of memory.
    """
    out.mkdir(parents=True, exist_ok=True)
    rows_path = out / "rows.jsonl"
    rows_path.unlink(missing_ok=True)
    least_seconds = LEAST_SECONDS if least_seconds is None else least_seconds
    ends_at = time.monotonic() + 60 * minutes
    last_part_ends_at = ends_at - END_SECONDS - LATE_SHARE * 60 * minutes
    ended: list[dict[str, object]] = []
    with (out / "log.txt").open("w", encoding="utf-8") as log:
        for number, part in enumerate(parts):
            left_seconds = last_part_ends_at - time.monotonic()
            seconds = seconds_for(part, parts[number + 1 :], left_seconds)
            if seconds < least_seconds:
                why = f"out of time, {max(0.0, seconds):.0f} s were left of the {least_seconds:.0f} that it needs"
                _append(rows_path, Measurement(part.name, "the whole part", note=f"{SKIPPED}{why}"))
                continue
            log.write(f"\n===== {part.name}, {seconds:.0f} s\n")
            log.flush()
            started = time.monotonic()
            outcome = _run_child(
                command_of(part, started + seconds, rows_path), _last_end(started, seconds, ends_at), log
            )
            took_seconds = time.monotonic() - started
            kept = {name for later in parts[number + 1 :] for name in later.models}
            for left in models.iterdir():
                if left.name not in kept:
                    shutil.rmtree(left, ignore_errors=True)
            ended.append(
                {
                    "part": part.name,
                    "seconds": round(took_seconds, 1),
                    "of_seconds": round(seconds, 1),
                    "outcome": outcome,
                    "load": round(_load(), 1),
                }
            )
            if outcome != "done":
                _append(rows_path, Measurement(part.name, "the whole part", is_met=False, note=outcome))
            write_results(rows_path, out, ended)
            print(f"{part.name}: {outcome}, {took_seconds:.0f} s", flush=True)
    write_results(rows_path, out, ended)


def write_results(rows_path: Path, out: Path, ended: Sequence[dict[str, object]]) -> None:
    """Write the table and the JSON of the measurements so far."""
    rows = read_measurements(rows_path)
    ran = [str(part["part"]) for part in ended]
    figures = figures_table(rows, COMMAND_OF, ran)
    page = f"{table_of(rows, 'GPU benchmark')}\n## Figures\n\n{figures}\n## Parts\n\n{_parts_table(ended)}"
    (out / "table.md").write_text(page, encoding="utf-8")
    content = {"parts": list(ended), "measurements": [asdict(row) for row in rows]}
    (out / "results.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _parts_table(ended: Sequence[dict[str, object]]) -> str:
    """A Markdown table of the parts that have ended. The load is the machine's, the average of a minute."""
    lines = ["| part | seconds | of | outcome | load |", "|--|--|--|--|--|"]
    lines += [f"| {' | '.join(str(value) for value in part.values())} |" for part in ended]
    return "\n".join(lines) + "\n"


def _load() -> float:
    """The load of the machine; 0 where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _last_end(started: float, seconds: float, ends_at: float) -> float:
    """Return when a part that does not stop is ended. Pure."""
    return min(ends_at - END_SECONDS, started + seconds + max(GRACE_SECONDS, GRACE_SHARE * seconds))


def _run_child(command: Sequence[str], ends_at: float, log: IO[str]) -> str:
    """Run a child in a process group of its own until `ends_at` at the latest; returns how it ended."""
    seconds = max(0.1, ends_at - time.monotonic())
    environment = _environment()
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log.fileno(), stderr=log.fileno(), start_new_session=True
    )
    try:
        code = child.wait(seconds)
    except subprocess.TimeoutExpired:
        _end(child)
        return f"ended after {seconds:.0f} s: it did not stop by itself"
    except BaseException:  # an interrupt does not reach the child, which would go on using the device
        _end(child)
        raise
    return "done" if code == 0 else f"exit status {code}; see log.txt"


def _environment() -> dict[str, str]:
    paths = os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH", "")) if path)
    return {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **os.environ, "PYTHONPATH": paths}


def _end(child: subprocess.Popen[bytes]) -> None:
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _least_seconds(machine: Calibration) -> float:
    """Return the time without which no part is begun. Pure."""
    return max(LEAST_SECONDS, LEAST_STARTS * min(machine.start_seconds, 2 * START_SECONDS))


def _append(path: Path, row: Measurement) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def main() -> None:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", nargs="?", choices=(*COMMANDS, "all"), default="all", help="part of a visit; or all")
    parser.add_argument("--minutes", type=float, help=f"time of the whole run; {COMMAND_MINUTES} for each command")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--device", default="cuda", help="cuda, sim or cpu")
    parser.add_argument("--size", choices=("full", "small"), help="published or tiny shapes; full on cuda")
    parser.add_argument("--models", type=Path, help="folder for the models; /dev/shm if there is room")
    parser.add_argument("--parts", help="names of parts, separated by commas; all if missing")
    asked = parser.parse_args()
    known = PARTS if asked.command == "all" else COMMANDS[asked.command]
    minutes = asked.minutes or COMMAND_MINUTES * (len(COMMANDS) if asked.command == "all" else 1)
    names = asked.parts.split(",") if asked.parts else [part.name for part in known]
    unknown = set(names) - {part.name for part in known}
    if unknown:
        parser.error(f"--parts: found {sorted(unknown)}, expected some of {', '.join(part.name for part in known)}")
    began = time.monotonic()
    machine = calibration.measure(_environment(), ROOT)
    print(
        f"calibration: the host is {machine.slowness:.1f} times as slow as planned for, load {_load():.1f}", flush=True
    )
    size = asked.size or ("full" if asked.device == "cuda" else "small")

    def command_of(part: Part, part_ends_at: float, rows_path: Path) -> list[str]:
        command = [sys.executable, "-m", "benchmarks.gpu.part", part.name, "--device", asked.device, "--size", size]
        command += ["--rows", str(rows_path), "--ends-at", f"{part_ends_at:.3f}"]
        return [*command, "--slowness", f"{machine.slowness:.2f}", "--models", str(models)]

    parts = [part for part in known if part.name in names]
    has_room = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > MODEL_BYTES
    root = asked.models or (SHARED_MEMORY if has_room and size == "full" else None)
    if root is None and size == "full":
        print(f"models are on a disk: {SHARED_MEMORY} has less than {MODEL_BYTES >> 30} GiB; files may be read slowly")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=root) as folder:
        models = Path(folder).resolve()
        left = minutes - (time.monotonic() - began) / 60
        run_parts(parts, left, asked.out.resolve(), models, command_of, _least_seconds(machine))
    print((asked.out / "table.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
