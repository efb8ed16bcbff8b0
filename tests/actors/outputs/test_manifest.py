"""The manifest loses nothing whole and survives being cut off at any byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.actors.outputs.manifest import Manifest
from modelpool.pool.core.errors import OutputFailed

ENTRIES = [{"n": n, "text": "x" * n} for n in (0, 5000, 3, 4095)]


def test_entries_come_back_once_and_in_order(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path / "m.jsonl")
    assert list(manifest.read_new()) == []
    for entry in ENTRIES[:2]:
        manifest.append(entry)
    assert list(manifest.read_new()) == ENTRIES[:2]
    for entry in ENTRIES[2:]:
        manifest.append(entry)
    assert list(manifest.read_new()) == ENTRIES[2:]
    assert list(Manifest(tmp_path / "m.jsonl").read_new()) == ENTRIES


@given(st.data())
def test_cut_off_anywhere_the_whole_lines_stay_and_the_next_goes_on(tmp_path_factory, data: st.DataObject) -> None:
    """The file of a run killed after any number of bytes: whole lines are read, repair is exact, appending goes on."""
    path = tmp_path_factory.mktemp("cut") / "m.jsonl"
    for entry in ENTRIES:
        Manifest(path).append(entry)
    whole = path.read_bytes()
    kept_bytes = data.draw(st.one_of(st.integers(0, len(whole)), st.integers(0, 30).map(lambda n: len(whole) - n)))
    path.write_bytes(whole[:kept_bytes])
    complete = whole[:kept_bytes].count(b"\n")

    manifest = Manifest(path)
    assert list(manifest.read_new()) == ENTRIES[:complete]
    torn = not whole[:kept_bytes].endswith(b"\n") and kept_bytes > 0
    assert manifest.repair() == torn
    manifest.append({"n": "next"})
    assert list(manifest.read_new()) == [{"n": "next"}]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [*ENTRIES[:complete], {"n": "next"}]


@pytest.mark.parametrize("line", ["[1, 2]\n", "not json\n", "\n"])
def test_a_whole_line_of_something_else_is_refused_by_place(tmp_path: Path, line: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"n": 1}\n' + line)
    with pytest.raises(OutputFailed, match=r"m\.jsonl: byte 9: "):
        list(Manifest(path).read_new())


def test_not_a_number_is_never_written(tmp_path: Path) -> None:
    """A line that other JSON readers refuse would break the file for them."""
    manifest = Manifest(tmp_path / "m.jsonl")
    with pytest.raises(ValueError, match="JSON compliant"):
        manifest.append({"seconds": float("nan")})
    assert list(manifest.read_new()) == []
