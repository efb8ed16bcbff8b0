"""Checks types with mypy; for scripts/test.

Usage: scripts/check_types.py [--changed]

With --changed, files that equal the main branch are not checked again: nothing is checked if no file differs, and only
the files that differ if there is no cache of a whole run, which takes minutes. With such a cache everything is checked.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: exists if the cache has all modules
WHOLE = ROOT / ".mypy_cache" / "whole"
MAIN = ("origin/HEAD", "origin/main", "main")


def git(*arguments: str) -> list[str]:
    """Return the lines that git prints; none if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def changed_files() -> list[str]:
    """Return the files that differ from the commit at which this branch left the main one, and those not in git."""
    bases = [base for name in MAIN for base in git("merge-base", "HEAD", name)]
    return [
        *git("diff", "--name-only", "--diff-filter=d", bases[0] if bases else "HEAD", "--"),
        *git("ls-files", "--others", "--exclude-standard"),
    ]


def checked(files: list[str]) -> list[str]:
    """Return the names that mypy has for the Python files of `files` that it checks."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    # the packages are links in modelpool/
    links = {path.resolve().name: path for path in (ROOT / "modelpool").iterdir() if path.is_symlink()}
    names = []
    for file in files:
        first, _, rest = file.partition("/")
        name = (links[first].relative_to(ROOT) / rest).as_posix() if first in links else file
        if name.endswith(".py") and name.startswith(tuple(f"{folder}/" for folder in config["files"])):
            names.append(name)
    return [name for name in names if not any(re.search(pattern, name) for pattern in config["exclude"])]


def main() -> int:
    """Check what has to be checked; return mypy's exit code."""
    names: list[str] = []
    if "--changed" in sys.argv[1:]:
        names = checked(changed_files())
        if not names:
            print("No checked file differs from the main branch. ./scripts/test checks all.")
            return 0
        if WHOLE.exists():
            names = []
        else:
            print(f"No cache of a whole run: only the {len(names)} files that differ from the main branch.")
    code = subprocess.run([sys.executable, "-m", "mypy", *names], cwd=ROOT, check=False).returncode
    if not names and code in (0, 1):  # 2: it did not get to the end
        WHOLE.touch()
    return code


if __name__ == "__main__":
    sys.exit(main())
