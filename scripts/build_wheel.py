"""Builds the wheel for this platform, with the scheduler core compiled, and tests the core that it contains.

    .venv/bin/python scripts/build_wheel.py [--out dist] [--no-tests] [PYTEST ARGUMENTS]

Needs a C compiler, Python's headers, and mypy (the extra `dev`). The tests are those of `tests/scheduler`, or what the
arguments select, next to the files of the wheel: the compiled core passes the tests of the Python one, except those
that need classes of Python (`PYTHON_ONLY`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.compiled_core import why_not  # noqa: E402 - found through the line above

#: what the tests read besides the installed package
BESIDE = ("tests", "benchmarks", "examples", "configs", "scripts", "pyproject.toml", "setup.py")
#: tests that the compiled core cannot pass: they build it themselves, derive classes from it, replace its methods, or
#: read the annotations of its classes as text
PYTHON_ONLY = (
    "--ignore=tests/scheduler/test_compiled.py",
    "--ignore=tests/scheduler/simulator/record",
    "--ignore=tests/scheduler/model/test_values.py",
    "--deselect=tests/scheduler/core/test_snapshot.py::test_waiting_tasks_are_counted_as_if_one_by_one",
    "--deselect=tests/scheduler/core/test_take_over.py::test_a_takeover_is_recorded_and_replayed",
    "--deselect=tests/scheduler/decisions/placement/test_eviction_hints.py::test_hints_save_bytes_where_memory_is_short",
)
#: prints how the imported core is installed, once the rest of the package is imported with it
CORE_FILE = "import modelpool.scheduler.core.state as core; from modelpool import ModelPool; print(core.__file__)"


def main() -> None:
    """Build and test; exits with the code of the tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel (default: dist)")
    parser.add_argument("--no-tests", action="store_true", help="only build")
    wanted, selection = parser.parse_known_args()
    if (problem := why_not()) is not None:
        sys.exit(f"this machine cannot compile the core: {problem}")
    wheel = build(wanted.out)
    print(wheel)
    if not wanted.no_tests:
        sys.exit(run_tests(wheel, selection or ["tests/scheduler"]))


def build(out: Path) -> Path:
    """Build the wheel into `out` from a copy of the sources, which stay as they are; return its path."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "-w", folder],
            env={**os.environ, "MODELPOOL_COMPILE": "1", "CFLAGS": "-w"},
            check=True,
        )
        (built,) = Path(folder).glob("modelpool-*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy2(built, out / built.name))


def run_tests(wheel: Path, selection: list[str]) -> int:
    """Run the tests of `selection` with the package of `wheel`; return pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)
        for name in BESIDE:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, site / name)
        environment = {**os.environ, "PYTHONPATH": str(site)}
        core = subprocess.run(
            [sys.executable, "-c", CORE_FILE], cwd=site, env=environment, check=True, capture_output=True, text=True
        )
        if Path(core.stdout.strip()).suffix == ".py":
            sys.exit(f"{wheel.name} contains no core that is compiled for this Python: {core.stdout.strip()}")
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nightly", *PYTHON_ONLY]
        return subprocess.run([*pytest, *selection], cwd=site, env=environment, check=False).returncode


if __name__ == "__main__":
    main()
