"""Compares estimated with measured activation memory, for the architectures of the tests' zoo on a simulated device.

The simulated device counts every byte and has no margin, so a run with too low an estimate would have run out of
memory. Each architecture runs at two or three sizes (as built, twice the batch, twice as wide), in float32 and
bfloat16.
Run from the repository: `python -m benchmarks.activations [FAMILY ...]`. Prints a table in markdown.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

import torch

from modelpool.pool.devices.sim import device as sim
from tests.pool.zoo import FAMILIES, build
from tests.pool.zoo.peaks import Peak, peaks_of
from tests.pool.zoo.sizes import sizes_of

DTYPES = (torch.float32, torch.bfloat16)
INDEX = 0
BUDGET_BYTES = 1 << 30


def peaks_of_family(family: str) -> dict[str, Peak]:
    """Return the peaks of one architecture by size and dtype. Each runs in a new module: some keep state of a run."""
    found = {}
    for dtype in DTYPES:
        for size in sizes_of(family, build(family)):
            case = build(family)
            inputs = {size: sizes_of(family, case)[size]}
            found[f"{size}, {dtype}"] = peaks_of(case, inputs, dtype, torch.device("sim", INDEX))[size]
    return found


def main(families: Sequence[str]) -> int:
    """Print the table. Returns 1 if an estimate was below the measured value."""
    sim.install()
    sim.configure(INDEX, BUDGET_BYTES)
    print("| architecture | runs | largest measured | median error | largest underestimate | largest overestimate |")
    print("|---|---|---|---|---|---|")
    errors = []
    for family in families:
        peaks = peaks_of_family(family)
        errors.extend(peak.error for peak in peaks.values())
        largest_bytes = max(peak.measured_bytes for peak in peaks.values())
        print(_row(family, [peak.error for peak in peaks.values()], f"{largest_bytes:,} B"), flush=True)
    print(_row("all", errors, ""))
    return int(min(errors) < 0)


def _row(name: str, errors: Sequence[float], largest: str) -> str:
    median = statistics.median(abs(error) for error in errors)
    under, over = max(0.0, *(-error for error in errors)), max(0.0, *errors)
    return f"| {name} | {len(errors)} | {largest} | {median:.2%} | {under:.2%} | {over:.2%} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(FAMILIES)))
