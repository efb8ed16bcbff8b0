"""Imports every module of the pool, and runs every architecture and family with tiny models on the CPU:
`python -m benchmarks.gpu.all_families --out FOLDER`, with the versions of a GPU machine (scripts/test_gpu_versions).

Ends with an error if a module cannot be imported, or a result is wrong. `table.md` in FOLDER has the results.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import pkgutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

import modelpool.pool
from benchmarks.gpu.device_tests import environment
from benchmarks.gpu.measurements import Record, read_measurements, table_of
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.tiny_models import compare_families, compare_zoo

#: seconds until the rest is left out, which is an error
MOST_SECONDS = 3600.0


def modules() -> Iterator[str]:
    """Every module of the pool."""
    for found in pkgutil.walk_packages(modelpool.pool.__path__, "modelpool.pool."):
        yield found.name


def import_all(record: Record) -> None:
    """Import every module, and record those that cannot be imported."""
    failed = {}
    names = list(modules())
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    for name, why in failed.items():
        record.add(f"import {name}", goal="can be imported", is_met=False, note=why)
    record.add("modules of the pool", len(names) - len(failed), "imported", len(names), "all", not failed)


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    rows_path = asked.out / "rows.jsonl"
    rows_path.unlink(missing_ok=True)
    torch.set_num_threads(1)
    record = Record.of_seconds(rows_path, "all families", MOST_SECONDS)
    has_ray = importlib.util.find_spec("ray") is not None
    record.add("environment", note=f"{environment('cpu')}, {'with' if has_ray else 'no'} ray")
    import_all(record)
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting("cpu", False, Path(folder) / "models", Path(folder))
        compare_zoo(record, setting)
        compare_families(record, setting)
    rows = read_measurements(rows_path)
    (asked.out / "table.md").write_text(table_of(rows, "Versions of a GPU machine"), encoding="utf-8")
    wrong = [row.name for row in rows if row.is_met is False or "out of time" in row.note]
    print((asked.out / "table.md").read_text(encoding="utf-8"))
    sys.exit(f"wrong: {'; '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
