"""Plants known bugs in the scheduler, one at a time, and says which of them the tests catch. A tool for developers.

Works on a copy in a temporary folder; nothing in the working tree changes. Takes some minutes.

    .venv/bin/python scripts/mutants_scheduler.py [WORD ...]     only bugs whose name holds one of the words
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: cheapest first: a run stops at the first test that fails
TESTS = ("tests/scheduler", "tests/pool/test_residency.py", "tests/simulation")


#: a failure is enough; what its smallest form would be does not matter here
NO_SHRINKING = """
from hypothesis import Phase
settings.register_profile("mutants", deadline=None, database=None, phases=[Phase.explicit, Phase.generate])
settings.load_profile("mutants")
"""


@dataclass(frozen=True, slots=True)
class Mutant:
    """In `path`, `old` (which occurs once) becomes `new`."""

    name: str
    path: str
    old: str
    new: str


#: the bugs to plant; data, beside this script
MUTANTS_FILE = Path(__file__).with_suffix(".json")


def read_mutants() -> tuple[Mutant, ...]:
    """Every bug that is known to this tool."""
    return tuple(Mutant(**row) for row in json.loads(MUTANTS_FILE.read_text(encoding="utf-8")))


def main(words: list[str]) -> int:
    """Try every mutant that is asked for; the exit status is 1 when one is missed."""
    chosen = [m for m in read_mutants() if not words or any(word in m.name for word in words)]
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("pool", "scheduler", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        with (copy / "tests" / "conftest.py").open("a", encoding="utf-8") as conftest:
            conftest.write(NO_SHRINKING)
        if (failing := _first_failure(copy)) is not None:
            print(f"the tests fail without any mutant: {failing}")
            return 1
        for mutant in chosen:
            caught_by = _try(copy, mutant)
            print(f"{'caught' if caught_by else 'MISSED'}  {mutant.name}: {caught_by or '-'}", flush=True)
            if caught_by is None:
                missed.append(mutant.name)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught")
    return 1 if missed else 0


def _try(copy: Path, mutant: Mutant) -> str | None:
    """The test that catches it, or None. Raises ValueError when the source is no longer what the mutant expects."""
    path = copy / mutant.path
    source = path.read_text(encoding="utf-8")
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {mutant.path} has {source.count(mutant.old)} places like it, expected one")
    path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return _first_failure(copy)
    finally:
        path.write_text(source, encoding="utf-8")


def _first_failure(copy: Path) -> str | None:
    """The first test that fails, None when all pass."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--tb=no",
        "--hypothesis-seed=1",
        *TESTS,
    ]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"pytest ended with {done.returncode}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
