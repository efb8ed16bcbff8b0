"""Runs one part of the GPU benchmark in this process; `benchmarks.gpu` starts it."""

from __future__ import annotations

import argparse
import importlib
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.measurements import OutOfTime, Record
from benchmarks.gpu.setting import PREFIX, Setting

#: module and function of each part, by its name or the first word of it
PARTS: Mapping[str, tuple[str, str]] = {
    "tests": ("device_tests", "run"),
    "sanitizer": ("device_tests", "run_sanitizer"),
    "device": ("device_facts", "run"),
    "attention": ("device_facts", "run_attention"),
    "captures": ("device_tests", "run_captures"),
    "precision": ("tiny_models", "compare_precision"),
    "zoo": ("tiny_models", "compare_zoo"),
    "families": ("tiny_models", "compare_families"),
    "transfers": ("transfers", "run"),
    "memory": ("worker_memory", "run"),
    "switch": ("model_switch", "run"),
    "soak": ("soak", "run"),
    "pool": ("pool_jobs", "run"),
    "sampling": ("sampling", "run"),
    "compiled": ("sampling", "run_compiled"),
    "more": ("sampling", "run_more"),
    "loading": ("transfers", "run_loading"),
    "overlap": ("overlap", "run"),
    "gangs": ("shared_runs", "run"),
}


def part_named(name: str) -> Callable[[Record, Setting], None]:
    """Return the function of a part. Imports only its module: what another one needs and this machine lacks does not
    matter."""
    kind, _, model = name.partition(" ")
    module, function = PARTS[kind]
    found: Callable[..., None] = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
    return partial(found, model=model) if model else found


def main() -> None:
    """Run the part and record its environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("--device", required=True)
    parser.add_argument("--size", choices=("full", "small"), required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--ends-at", type=float, required=True, help="on the monotonic clock")
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--slowness", type=float, default=1.0)
    asked = parser.parse_args()
    record = Record(asked.rows, asked.part, asked.ends_at)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=asked.models, ignore_cleanup_errors=True) as folder:
        setting = Setting(asked.device, asked.size == "small", asked.models, Path(folder), asked.slowness)
        if setting.small:
            torch.set_num_threads(1)  # as in workers; several wait for each other on a busy machine
        try:
            part_named(asked.part)(record, setting)
        except OutOfTime:
            return


if __name__ == "__main__":
    main()
