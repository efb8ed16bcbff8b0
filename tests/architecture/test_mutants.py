"""Every known bug of the scheduler can be planted: its place in the source exists once, and its tests exist."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
def test_every_known_bug_can_be_planted() -> None:
    """`scripts/mutants_scheduler.py` says so, too, but it runs rarely: 38 of 386 places had moved by then. Whoever
    changes such a line of the source writes the new one into `scripts/mutants_scheduler.json`."""
    bugs = json.loads((ROOT / "scripts" / "mutants_scheduler.json").read_text(encoding="utf-8"))
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path in {bug["path"] for bug in bugs}}
    moved = [bug["name"] for bug in bugs if sources[bug["path"]].count(bug["old"]) != 1]
    assert not moved
    assert not [bug["name"] for bug in bugs if bug["old"] == bug["new"]]
    assert not [test for bug in bugs for test in bug.get("tests", ()) if not (ROOT / test).exists()]
    assert not [name for name, count in Counter(bug["name"] for bug in bugs).items() if count > 1]
