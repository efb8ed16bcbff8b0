"""Part "memory": host memory of several workers that have the same weights on one device.

Each worker is a process of its own with an engine, as in a pool. All of them load the file, then each measures itself
while the others still hold it. The file is in the page cache once, whoever maps it; what counts beyond that is private
memory that the weights have added to each process.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import torch

from benchmarks.gpu.engine_jobs import EngineJobs, open_engine
from benchmarks.gpu.measurements import OutOfTime, Record
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.transfers import measured_file
from modelpool.actors.worker.process_memory import process_memory
from modelpool.pool.values.specs.spec import Role

COUNTS = (1, 2, 4)
#: of the file, that may be on the host
MOST_COPIES = 1.05
#: seconds that are left for the end of the part
RESERVE_SECONDS = 3.0


def run(record: Record, setting: Setting) -> None:
    """Measure with one worker and with several."""
    path = measured_file(record, setting, "sdxl")
    for count in COUNTS[:2] if setting.small else COUNTS:
        name = f"host memory of the weights with {count} {'worker' if count == 1 else 'workers'}"
        with record.attempting(name, least_seconds=setting.least(20.0)):
            reports = measure(setting.device, path, count, record)
            copies, note = copies_of(reports, path.stat().st_size)
            record.add(name, copies, "of the file", 1.0, f"at most {MOST_COPIES}",
                       setting.met(copies <= MOST_COPIES), note)  # fmt: skip


def copies_of(reports: Sequence[Mapping[str, int]], file_bytes: int) -> tuple[float, str]:
    """Return how often the weights are on the host, with details. Pages of the file that are not mapped now are in the
    page cache all the same. Weights of a device whose memory is the host's are left out."""
    shared_bytes = sum(report["pss_bytes"] for report in reports)
    private_bytes = sum(max(0, report["anonymous_bytes"] - report["device_bytes"]) for report in reports)
    note = f"mapped {shared_bytes / 1e9:.2f} GB, private {private_bytes / 1e9:.3f} GB, file {file_bytes / 1e9:.2f} GB"
    return (max(shared_bytes, file_bytes) + private_bytes) / file_bytes, note


def measure(device: str, path: Path, count: int, record: Record) -> list[dict[str, int]]:
    """Return the report of each of `count` workers. Raises OutOfTime, and RuntimeError if one of them fails."""
    command = [sys.executable, "-m", "benchmarks.gpu.worker_memory", "--device", device, "--file", str(path)]
    command += ["--workers", str(count)]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    try:
        lines = [Lines(_pipe(worker.stdout)) for worker in workers]
        for each in lines:
            each.next(record)  # it has loaded
        for worker in workers:
            print("measure", file=_pipe(worker.stdin), flush=True)
        return [json.loads(each.next(record)) for each in lines]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            _pipe(worker.stdin).close()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "requested"
    return pipe


class Lines:
    """The lines that a worker prints, read by a thread, so that waiting for one has an end."""

    def __init__(self, pipe: IO[str]) -> None:
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(pipe,), daemon=True).start()

    def next(self, record: Record) -> str:
        """Return the next line. Raises OutOfTime if it does not come in time, RuntimeError if there is none."""
        try:
            line = self._lines.get(timeout=max(0.1, record.seconds_left - RESERVE_SECONDS))
        except queue.Empty:
            raise OutOfTime("a worker has not answered") from None
        if not line:
            raise RuntimeError("a worker ended; see log.txt")
        return line

    def _read(self, pipe: IO[str]) -> None:
        for line in pipe:
            self._lines.put(line)
        self._lines.put("")


def main() -> None:
    """Be one worker: load, say so, and measure when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True)
    asked = parser.parse_args()
    budget_bytes = None
    if asked.device == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info()
        budget_bytes = int(0.9 * free_bytes / asked.workers)
    engine = open_engine(asked.device, budget_bytes)
    jobs = EngineJobs(asked.file, engine)
    patcher = engine.patcher(jobs.model, Role.DIFFUSION_MODEL)
    patcher.modules()  # what does not depend on the weights
    before_bytes = process_memory().anonymous_bytes
    engine.load_weights(jobs.model, (Role.DIFFUSION_MODEL,))
    print("loaded", flush=True)
    sys.stdin.readline()
    found = process_memory()
    report = {
        "pss_bytes": found.weights_pss_bytes,
        "anonymous_bytes": max(0, found.anonymous_bytes - before_bytes),
        "device_bytes": 0 if asked.device == "cuda" else engine.residency().used_bytes,
    }
    print(json.dumps(report), flush=True)
    sys.stdin.readline()  # the others measure, too


if __name__ == "__main__":
    main()
