"""`install_command`: the command that installs an extra of this installation. pip does not find modelpool by its name:
it is not on PyPI.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

#: the clone that contains this file, if it is one
ROOT = Path(__file__).resolve().parents[3]
#: the requirement of an extra, "s3fs>=2026.2; extra == 's3'"
_OF_EXTRA = re.compile(r"\s*;.*\bextra\s*==\s*[\"']([^\"']+)[\"']")
_OWN_EXTRA = re.compile(r"modelpool\[([^\]]+)\]")


def install_command(
    extra: str, root: Path = ROOT, prefix: str = sys.prefix, requirements: Sequence[str] | None = None
) -> str:
    """Return the command that installs what `extra` needs: the script of the clone `root` if the interpreter at
    `prefix` is in its .venv, else pip with the packages by name. `requirements` default to the installed
    distribution's.
    """
    script = root / "scripts" / "setup"
    if script.is_file() and Path(prefix).resolve() == (root / ".venv").resolve():
        return f"./scripts/setup {extra}" if Path.cwd() == root else f"{shlex.quote(str(script))} {extra}"
    if requirements is None:
        try:
            requirements = requires("modelpool") or ()
        except PackageNotFoundError:
            requirements = ()
    packages = packages_of(extra, requirements)
    if not packages:  # an installation without its metadata
        return f"pip install with the extra {extra!r}, as docs/guides/install.md describes"
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])


def packages_of(extra: str, requirements: Sequence[str]) -> tuple[str, ...]:
    """Return the packages of `extra`, and of the extras that it names."""
    found: dict[str, None] = {}
    for requirement in requirements:
        match = _OF_EXTRA.search(requirement)
        if match is None or match[1] != extra:
            continue
        package = requirement[: match.start()].strip()
        own = _OWN_EXTRA.fullmatch(package)
        for name in own[1].split(",") if own else ():
            found |= dict.fromkeys(packages_of(name.strip(), requirements))
        if own is None:
            found[package] = None
    return tuple(found)
