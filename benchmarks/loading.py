"""Compares time to the first forward of a diffusion model, and its host memory, with diffusers and safetensors.

Four models and four methods, with the files in the page cache ("warm") or not ("cold"). Every load runs in a separate
process, forked from one that has imported everything; the methods take turns. Run from the repository:
`python -m benchmarks.loading [sd15|sdxl|flux|flux_fp8] ... [--runs N] [--only warm|cold]` (all models without names).
It needs 5 GB of disk. Cold files need Linux, and a file system whose pages can be dropped; a note follows the table if
the files were not cold.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import ParamSpec, TypeVar

from benchmarks.loading_files import MODELS, Files, written
from benchmarks.loading_ways import WAYS, Cost, measure

MIB = 1 << 20
RUNS = 5
#: memory that is used just before each load of a cold file, as a multiple of the file
TOUCHED = 2
#: size of each read that warms a file
BLOCK_BYTES = 16 << 20
#: a file was not cold if less than this share of it came from the disk
COLD_SHARE = 0.9

#: The state of the C library's heap after a load determines whether the scratch of each convolution is reused memory
#: or new pages, which can cost a fifth of a first forward. These settings leave room for it in all methods. Source:
#: mallopt(3)
HEAP = {"MALLOC_TOP_PAD_": str(128 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Costs = Mapping[str, Sequence[Cost]]


def main(names: Sequence[str], runs: int, states: Sequence[bool]) -> None:
    """Print a table for each of the models `names` and each of the `states` of its files: cold or not."""
    # processes are forked from one without threads, and nothing may use the network
    os.environ.update(HEAP, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            files = in_child(written, name, Path(folder))
            for is_cold in states:
                print_tables(name, files, is_cold, turns(name, files, is_cold, runs))


def turns(name: str, files: Files, is_cold: bool, runs: int) -> Costs:
    """Measure each method `runs` times, in turns; each turn starts with the next method."""
    costs: dict[str, list[Cost]] = {way: [] for way in WAYS}
    ways = list(WAYS)
    for number in range(runs):
        first = number % len(ways)
        for way in ways[first:] + ways[:first]:
            for file in files.all():
                prepare(file, is_cold)
            touched_bytes = TOUCHED * files.single.stat().st_size if is_cold else 0
            costs[way].append(in_child(measure, way, name, files, touched_bytes))
    checks = {way: taken[0].check for way, taken in costs.items()}
    ours = checks["modelpool"]
    assert all(abs(check - ours) <= 0.02 * ours for check in checks.values()), f"other results: {checks}"
    return costs


def prepare(file: Path, is_cold: bool) -> None:
    """Remove `file` from the page cache, or read it completely into the cache."""
    with file.open("rb", buffering=0) as opened:
        if is_cold:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return
        block = bytearray(BLOCK_BYTES)
        while opened.readinto(block):
            pass


def in_child(call: Callable[Arguments, Result], /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
    """Return the result of `call` in a new process that has imported everything."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.loading_ways"])
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(call, *arguments, **named).result()


def print_tables(name: str, files: Files, is_cold: bool, costs: Costs) -> None:
    """Print a row for each method: medians, and the median of its ratio to modelpool in the same turn."""
    weights_bytes, single_bytes = files.weights.stat().st_size, files.single.stat().st_size
    print(f"\n{MODELS[name].title}: a diffusion model of {weights_bytes / MIB:.0f} MiB in a single file of ", end="")
    print(f"{single_bytes / MIB:.0f} MiB, {'not ' if is_cold else ''}in the page cache:\n")
    print("| method | module s | first forward s | ratio | CPU s | ratio | private MiB | mapped MiB | x file | peak |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    first = costs["modelpool"]
    for way, taken in costs.items():
        ratio, cpu_ratio = (ratio_to(first, taken, field) for field in ("seconds", "cpu_seconds"))
        own, shared, peak = (median(taken, f"{kind}_bytes") for kind in ("private", "file", "peak"))
        print(
            f"| {WAYS[way][0]} | {median(taken, 'loaded_seconds'):.2f} | {median(taken, 'seconds'):.2f} | {ratio:.2f} "
            f"| {median(taken, 'cpu_seconds'):.2f} | {cpu_ratio:.2f} | {own / MIB:.0f} | {shared / MIB:.0f} "
            f"| {(own + shared) / single_bytes:.2f} | {peak / single_bytes:.2f} |",
            flush=True,
        )
    read_bytes = min(median(taken, "read_bytes") for taken in costs.values())
    if is_cold and read_bytes < COLD_SHARE * weights_bytes:
        print(f"\nThe files were not cold: only {read_bytes / weights_bytes:.0%} of the model came from the disk.")


def ratio_to(first: Sequence[Cost], taken: Sequence[Cost], field: str) -> float:
    """Return the median of the ratios of one figure to that of `first` in the same turn."""
    return statistics.median(getattr(t, field) / getattr(f, field) for t, f in zip(taken, first, strict=True))


def median(taken: Sequence[Cost], field: str) -> float:
    """Return the median of one figure."""
    return statistics.median(getattr(cost, field) for cost in taken)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--only", choices=("warm", "cold"), help="only cached, or only uncached files; default: both")
    given = parser.parse_args()
    main(given.names or tuple(MODELS), given.runs, {"warm": (False,), "cold": (True,)}.get(given.only, (False, True)))
