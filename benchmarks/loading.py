"""Time to the first forward of a diffusion model, and the host memory it takes, beside diffusers and safetensors.

Four models, four ways, the files in the page cache ("warm") and not ("cold"): every loading is in a process of its own,
forked from one that has imported everything, all ways in turns. Run from the repository:
`python -m benchmarks.loading [sd15|sdxl|flux|flux_fp8] ... [--runs N] [--only warm|cold]` (all of them without names);
it takes 5 GB of disk. Cold files need Linux, and a file system whose pages may be dropped: the table says so where they
were not.
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
#: times the file: memory that each loading of a cold file finds as if it had been used a moment ago
TOUCHED = 2
#: of a file that is to be warm, read at once
BLOCK_BYTES = 16 << 20
#: a file of which less than this share came from the disk was not cold
COLD_SHARE = 0.9

#: What a loading happens to leave in the C library's heap decides whether the scratch of each convolution is memory
#: that was used before or fresh pages, up to a fifth of a first forward: all ways find room there. Source: mallopt(3)
HEAP = {"MALLOC_TOP_PAD_": str(128 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Costs = Mapping[str, Sequence[Cost]]


def main(names: Sequence[str], runs: int, states: Sequence[bool]) -> None:
    """Print a table for each of the models `names` and each of the `states` of its files: cold or not."""
    # processes are forked from one without threads, and nothing may reach for the network
    os.environ.update(HEAP, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            files = in_child(written, name, Path(folder))
            for is_cold in states:
                print_tables(name, files, is_cold, turns(name, files, is_cold, runs))


def turns(name: str, files: Files, is_cold: bool, runs: int) -> Costs:
    """Each way so many times, in turns that begin with another one each."""
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
    """Have none of `file` in the page cache, or all of it."""
    with file.open("rb", buffering=0) as opened:
        if is_cold:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return
        block = bytearray(BLOCK_BYTES)
        while opened.readinto(block):
            pass


def in_child(call: Callable[Arguments, Result], /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
    """What `call` gives in a fresh process that has imported everything."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.loading_ways"])
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(call, *arguments, **named).result()


def print_tables(name: str, files: Files, is_cold: bool, costs: Costs) -> None:
    """A row for each way: medians, and the median of its ratio to the first in the same turn."""
    weights_bytes, single_bytes = files.weights.stat().st_size, files.single.stat().st_size
    print(f"\n{MODELS[name].title}: a diffusion model of {weights_bytes / MIB:.0f} MiB in a single file of ", end="")
    print(f"{single_bytes / MIB:.0f} MiB, {'not ' if is_cold else ''}in the page cache:\n")
    print("| what | module, s | first forward, s | ratio | CPU s | ratio | own MiB | of files, MiB | x file | most |")
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
    """The median of the ratios of one figure to that of `first` in the same turn."""
    return statistics.median(getattr(t, field) / getattr(f, field) for t, f in zip(taken, first, strict=True))


def median(taken: Sequence[Cost], field: str) -> float:
    """Of one figure."""
    return statistics.median(getattr(cost, field) for cost in taken)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--only", choices=("warm", "cold"), help="files in the page cache, or not (both)")
    given = parser.parse_args()
    main(given.names or tuple(MODELS), given.runs, {"warm": (False,), "cold": (True,)}.get(given.only, (False, True)))
