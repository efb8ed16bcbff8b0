"""Measures a machine before a run of the GPU benchmark: how much slower it computes and starts processes now than the
machine that the times of the parts were chosen for. Other programs that use it count.

`python -m benchmarks.gpu.calibration` prints the seconds of a fixed computation; starting it takes as long as starting
a part.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: seconds of the computation, and of the process that does it, on two idle virtual cores
COMPUTE_SECONDS, START_SECONDS = 0.3, 5.0
#: sides of the matrices, and how often they are multiplied
SIDE, COUNT = 512, 100
#: a machine that takes longer is as slow as this
MOST_SLOWNESS = 6.0
#: limit of the measurement
MOST_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a machine takes now.

    compute_seconds  of the computation
    start_seconds    until a process has imported what parts import
    """

    compute_seconds: float = COMPUTE_SECONDS
    start_seconds: float = START_SECONDS

    @property
    def slowness(self) -> float:
        """How many times as long as planned the work of the host takes, at least 1: nothing gets less time than it
        needs on an idle machine. A first start also reads files, so it tells nothing about later work."""
        return min(MOST_SLOWNESS, max(1.0, self.compute_seconds / COMPUTE_SECONDS))


def measure(environment: Mapping[str, str], root: Path) -> Calibration:
    """Measure in a child process, as parts are; a child that does not end is as slow as anything."""
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu.calibration"],
            cwd=root, env=dict(environment), capture_output=True, text=True, timeout=MOST_SECONDS, check=True,
        )  # fmt: skip
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return Calibration(MOST_SECONDS, MOST_SECONDS)
    compute_seconds = float(done.stdout.split()[-1])
    return Calibration(compute_seconds, max(0.0, time.monotonic() - started - compute_seconds))


def main() -> None:
    """Import what parts import, and compute."""
    import torch

    import benchmarks.gpu.engine_jobs  # noqa: F401 - what it imports takes the time of a start

    torch.set_num_threads(1)
    x = torch.ones(SIDE, SIDE)
    x @ x
    started = time.monotonic()
    for _ in range(COUNT):
        x = torch.tanh(x @ x)
    print(time.monotonic() - started)


if __name__ == "__main__":
    main()
