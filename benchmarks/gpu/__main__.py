"""Runs all parts of the GPU benchmark within a time: `python -m benchmarks.gpu --minutes 8 --out FOLDER`.

The parts come in order of value, each in a child process with a time limit, so that a crash or a hang of the driver
ends one part and not the run. After each part, `table.md` and `results.json` in FOLDER are complete up to there; the
output of the children is in `log.txt`. Runs from a plain source tree. Parts that need a package which is not installed
are skipped, with the reason. `--device cpu` or `sim` runs the same code with tiny models on any machine.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu.measurements import Measurement, read_measurements, table_of
from benchmarks.gpu.setting import PREFIX

ROOT = Path(__file__).resolve().parents[2]
#: seconds that a part may take to stop by itself after its time
GRACE_SECONDS = 3.0
#: a part is not started with less
LEAST_SECONDS = 5.0
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


#: in order of value: what may be wrong, then the comparisons with diffusers, then refinements
PARTS = (
    Part("tests", 2.5),
    Part("zoo", 1.5),
    Part("transfers", 1.5, ("sdxl",)),
    Part("sampling sdxl", 2.0, ("sdxl",)),
    Part("sampling flux", 3.0, ("flux",)),
    Part("compiled sdxl", 3.0, ("sdxl",)),
    Part("memory", 1.0, ("sdxl",)),
    Part("switch", 1.5, ("sdxl", "flux")),
    Part("families", 1.5),
    Part("soak", 1.5),
    Part("overlap sdxl", 1.0, ("sdxl",)),
    Part("more sdxl", 1.5, ("sdxl",)),
    Part("compiled flux", 3.0, ("flux",)),
    Part("more flux", 2.5, ("flux",)),
    Part("loading flux", 1.5, ("flux",)),
    Part("sampling flux_fp8", 2.0, ("flux_fp8",)),
    Part("sampling sd15", 1.0, ("sd15",)),
    Part("overlap sd15", 0.7, ("sd15",)),
    Part("sampling wan", 2.0, ("wan",)),
    Part("pool", 1.5, ("sd15",)),
)


def seconds_for(part: Part, later: Sequence[Part], left_seconds: float) -> float:
    """Return the time of `part`: its share of what is left. Time that earlier parts did not use is in it. Pure."""
    return left_seconds * part.weight / (part.weight + sum(other.weight for other in later))


def run_parts(
    parts: Sequence[Part],
    minutes: float,
    out: Path,
    models: Path,
    command_of: Callable[[Part, float, Path], Sequence[str]],
) -> None:
    """Run the parts one after the other and write the results after each.

    `command_of` returns the command of a part, with its seconds and the file for its measurements. Parts write models
    to the folder `models`. After each part, all that no later part reads is removed from it: models take tens of
    gigabytes of memory.
    """
    out.mkdir(parents=True, exist_ok=True)
    rows_path = out / "rows.jsonl"
    rows_path.unlink(missing_ok=True)
    ends_at = time.monotonic() + 60 * minutes
    ended: list[dict[str, object]] = []
    with (out / "log.txt").open("w", encoding="utf-8") as log:
        for number, part in enumerate(parts):
            left_seconds = ends_at - time.monotonic()
            seconds = seconds_for(part, parts[number + 1 :], left_seconds)
            if seconds < LEAST_SECONDS:
                row = Measurement(part.name, "the whole part", note="skipped: out of time")
                _append(rows_path, row)
                continue
            log.write(f"\n===== {part.name}, {seconds:.0f} s\n")
            log.flush()
            started = time.monotonic()
            outcome = _run_child(command_of(part, seconds, rows_path), seconds, log.fileno())
            took_seconds = time.monotonic() - started
            kept = {name for later in parts[number + 1 :] for name in later.models}
            for left in models.iterdir():
                if left.name not in kept:
                    shutil.rmtree(left, ignore_errors=True)
            ended.append({"part": part.name, "seconds": round(took_seconds, 1), "outcome": outcome})
            if outcome != "done":
                _append(rows_path, Measurement(part.name, "the whole part", is_met=False, note=outcome))
            write_results(rows_path, out, ended)
            print(f"{part.name}: {outcome}, {took_seconds:.0f} s", flush=True)
    write_results(rows_path, out, ended)


def write_results(rows_path: Path, out: Path, ended: Sequence[dict[str, object]]) -> None:
    """Write the table and the JSON of the measurements so far."""
    rows = read_measurements(rows_path)
    (out / "table.md").write_text(table_of(rows, "GPU benchmark"), encoding="utf-8")
    content = {"parts": list(ended), "measurements": [asdict(row) for row in rows]}
    (out / "results.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _run_child(command: Sequence[str], seconds: float, log: int) -> str:
    """Run a child in a process group of its own for at most `seconds`; returns how it ended."""
    paths = os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH", "")) if path)
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **os.environ, "PYTHONPATH": paths}
    child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        code = child.wait(seconds)
    except subprocess.TimeoutExpired:
        _end(child)
        return f"ended after {seconds:.0f} s: it did not stop by itself"
    except BaseException:  # an interrupt does not reach the child, which would go on using the device
        _end(child)
        raise
    return "done" if code == 0 else f"exit status {code}; see log.txt"


def _end(child: subprocess.Popen[bytes]) -> None:
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _append(path: Path, row: Measurement) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def main() -> None:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="time of the whole run")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--device", default="cuda", help="cuda, sim or cpu")
    parser.add_argument("--size", choices=("full", "small"), help="published or tiny shapes; full on cuda")
    parser.add_argument("--models", type=Path, help="folder for the models; /dev/shm if there is room")
    parser.add_argument("--parts", help="names of parts, separated by commas; all if missing")
    asked = parser.parse_args()
    names = asked.parts.split(",") if asked.parts else [part.name for part in PARTS]
    unknown = set(names) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"--parts: found {sorted(unknown)}, expected some of {', '.join(part.name for part in PARTS)}")
    size = asked.size or ("full" if asked.device == "cuda" else "small")

    def command_of(part: Part, seconds: float, rows_path: Path) -> list[str]:
        command = [sys.executable, "-m", "benchmarks.gpu.part", part.name, "--device", asked.device, "--size", size]
        command += ["--rows", str(rows_path), "--seconds", f"{seconds - GRACE_SECONDS:.1f}"]
        return [*command, "--models", str(models)]

    parts = [part for part in PARTS if part.name in names]
    has_room = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > MODEL_BYTES
    root = asked.models or (SHARED_MEMORY if has_room and size == "full" else None)
    if root is None and size == "full":
        print(f"models are on a disk: {SHARED_MEMORY} has less than {MODEL_BYTES >> 30} GiB; files may be read slowly")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=root) as folder:
        models = Path(folder).resolve()
        run_parts(parts, asked.minutes, asked.out.resolve(), models, command_of)
    print((asked.out / "table.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
