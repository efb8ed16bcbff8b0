"""The tested versions of the libraries that the pool depends on by private names or numerics. Torch-free.

pyproject.toml requires the oldest ones; newer ones than the newest may work, and `modelpool doctor` names them. The
tests run with the newest of constraints.txt, and with both ends by `scripts/test_versions`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TestedVersions:
    """Oldest and newest tested version of a library, as major and minor number, and the reason for the oldest."""

    oldest: Version
    newest: Version
    reason: str


TESTED: Mapping[str, TestedVersions] = {
    "torch": TestedVersions((2, 9), (2, 14), "the oldest one that was tried; simulated GPUs need 2.10"),
    "diffusers": TestedVersions((0, 37), (0, 42), "the oldest one that was tried; newer models need newer ones"),
    "transformers": TestedVersions((5, 6), (5, 24), "modules of CLIP name their parameters otherwise before"),
    "ray": TestedVersions((2, 54), (2, 60), "the oldest one that was tried; datasets need 2.55"),
}


@dataclass(frozen=True, slots=True)
class UntestedVersion:
    """An installed version outside of the tested ones."""

    library: str
    installed: str
    tested: TestedVersions

    def __str__(self) -> str:
        oldest, newest = (".".join(map(str, each)) for each in (self.tested.oldest, self.tested.newest))
        return f"{self.library}: found {self.installed}, tested with {oldest} to {newest}"


def untested(installed: Mapping[str, str]) -> tuple[UntestedVersion, ...]:
    """Return which versions of `installed` libraries, by name, are outside of the tested ones; others are ignored."""
    found = [
        UntestedVersion(name, version, TESTED[name])
        for name, version in sorted(installed.items())
        if name in TESTED and not TESTED[name].oldest <= minor_version(version) <= TESTED[name].newest
    ]
    return tuple(found)


def minor_version(version: str) -> Version:
    """Return major and minor number, whatever follows them: (2, 10) for "2.10.0a0+git", (3, 0) for "3.0rc1"."""
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    return (0, 0) if found is None else (int(found[1]), int(found[2] or 0))
