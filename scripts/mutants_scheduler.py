"""Plants known bugs in the scheduler, one at a time, and reports which of them the tests catch. A developer tool.

Works on a copy in a temporary folder; the working tree does not change. Each bug names the tests that should catch it:
these run first, and all others only if they pass. Takes some minutes.

    .venv/bin/python scripts/mutants_scheduler.py [WORD ...]     only bugs whose name or file contains one of the words
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: folders with code in which bugs can be planted
SOURCES = ("pool", "scheduler", "benchmarks")
#: what a copy contains; `modelpool` links to the others
COPIED = (*SOURCES, "actors", "tests", "examples", "modelpool")
#: the tests of a bug without a list of tests
LIKELY = ("tests/scheduler",)
#: the tests that run if these pass
ALL_TESTS = ("tests/scheduler", "tests/pool/weights/plan/test_eviction_plan.py", "tests/simulation")
#: independent of the core, or compiles it: these need more than the copy contains
LEFT_OUT = ("tests/scheduler/simulator/workloads", "tests/scheduler/test_compiled.py")
#: a bug that makes one test take this long is caught; without bugs all tests together take less
MOST_SECONDS = 30

#: a failure is enough; its smallest example does not matter here
NO_SHRINKING = """
from hypothesis import Phase
settings.register_profile("mutants", deadline=None, database=None, phases=[Phase.explicit, Phase.generate])
settings.load_profile("mutants")
"""


@dataclass(frozen=True, slots=True)
class Mutant:
    """In `path`, `old` (which occurs once) becomes `new`. `tests` should catch it."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...] = LIKELY


#: the bugs to plant, as data
MUTANTS_FILE = Path(__file__).with_suffix(".json")


def read_mutants() -> tuple[Mutant, ...]:
    """Return every bug that this tool knows."""
    rows = json.loads(MUTANTS_FILE.read_text(encoding="utf-8"))
    return tuple(Mutant(**{**row, "tests": tuple(row.get("tests", LIKELY))}) for row in rows)


def main(words: list[str]) -> int:
    """Try the selected mutants; return exit status 1 if one is missed or can no longer be planted."""
    chosen = [m for m in read_mutants() if not words or any(word in m.name or word in m.path for word in words)]
    if problems := unplantable(chosen):
        print("\n".join(problems))
        return 1
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        for tests in dict.fromkeys(m.tests for m in chosen):
            copy.check(tests)
        for mutant in chosen:
            caught_by = copy.plant(mutant)
            print(f"{'caught' if caught_by else 'MISSED'}  {mutant.name}: {caught_by or '-'}", flush=True)
            if caught_by is None:
                missed.append(mutant.name)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught")
    return 1 if missed else 0


def unplantable(mutants: Iterable[Mutant]) -> list[str]:
    """Return the problems of these mutants: the source has changed (with the new place, if found), the result is not
    valid code, or their tests are missing.
    """
    paths = [path for name in SOURCES for path in (ROOT / name).glob("**/*.py")]
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    found = []
    for mutant in mutants:
        source = sources.get(mutant.path, "")
        if (places := source.count(mutant.old)) == 1:
            found += _not_code(mutant, source.replace(mutant.old, mutant.new))
        else:
            elsewhere = ", ".join(path for path, text in sources.items() if mutant.old in text and path != mutant.path)
            there = f"; found in {elsewhere}" if elsewhere else ""
            found.append(f"{mutant.name}: {mutant.path} has {places} matching places, expected one{there}")
        found += [f"{mutant.name}: found no {tests}" for tests in mutant.tests if not (ROOT / tests).exists()]
    return found


def _not_code(mutant: Mutant, planted: str) -> list[str]:
    """Return an error if a mutant is invalid code, since any test would catch a syntax error."""
    try:
        ast.parse(planted)
    except SyntaxError as error:
        return [f"{mutant.name}: {error}"]
    return []


class Copy:
    """A copy of the sources and tests in a folder, where bugs are planted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        #: tests that passed without any bug
        self._checked: set[tuple[str, ...]] = set()
        self._planted = 0
        for name in COPIED:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)
        with (folder / "tests" / "conftest.py").open("a", encoding="utf-8") as conftest:
            conftest.write(NO_SHRINKING)

    def check(self, tests: tuple[str, ...]) -> None:
        """Raise ValueError if these tests fail without any bug; they run once."""
        if tests not in self._checked and (failing := self._first_failure(tests)) is not None:
            raise ValueError(f"the tests fail without any mutant: {failing}")
        self._checked.add(tests)

    def plant(self, mutant: Mutant) -> str | None:
        """Return the test that catches it, or None."""
        caught_by = self._with(mutant, mutant.tests)
        if caught_by is None and mutant.tests != ALL_TESTS:
            self.check(ALL_TESTS)
            caught_by = self._with(mutant, ALL_TESTS)
        return caught_by

    def _with(self, mutant: Mutant, tests: tuple[str, ...]) -> str | None:
        path = self._folder / mutant.path
        source, at = path.read_text(encoding="utf-8"), path.stat().st_mtime
        path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
        self._planted += 1
        os.utime(path, (self._planted, self._planted))  # compiled files are distinguished by this time and by size
        try:
            return self._first_failure(tests)
        finally:
            path.write_text(source, encoding="utf-8")
            os.utime(path, (at, at))

    def _first_failure(self, tests: tuple[str, ...]) -> str | None:
        """Return the first test that fails, None if all pass."""
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", "--hypothesis-seed=1"),
            "--nightly",
            *("-o", f"timeout={MOST_SECONDS}", *(f"--ignore={left_out}" for left_out in LEFT_OUT), *tests),
        ]
        # the copy comes before the editable install of the working tree
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(self._folder)}
        done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, check=False, env=environment)
        if done.returncode == 0:
            return None
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0].split(" - ")[0] if failed else f"pytest ended with {done.returncode}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
