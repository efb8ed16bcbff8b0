"""The manifest loses nothing whole and survives being cut off at any byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.actors.outputs.manifest import Manifest

ENTRIES = [{"n": n, "text": "x" * n} for n in (0, 5000, 3, 4095)]


def entries(manifest: Manifest) -> list[dict | None]:
    return [line.fields for line in manifest.read_new()]


def test_entries_come_back_once_and_in_order(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path / "m.jsonl")
    assert entries(manifest) == []
    for entry in ENTRIES[:2]:
        manifest.append(entry)
    assert entries(manifest) == ENTRIES[:2]
    for entry in ENTRIES[2:]:
        manifest.append(entry)
    assert entries(manifest) == ENTRIES[2:]
    assert entries(Manifest(tmp_path / "m.jsonl")) == ENTRIES


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
    assert entries(manifest) == ENTRIES[:complete]
    torn = not whole[:kept_bytes].endswith(b"\n") and kept_bytes > 0
    assert manifest.repair() == torn
    manifest.append({"n": "next"})
    assert entries(manifest) == [{"n": "next"}]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [*ENTRIES[:complete], {"n": "next"}]


@pytest.mark.parametrize("line", ["[1, 2]\n", "not json\n", "\n", "[" * 100_000 + "\n", "\0" * 50 + "\n"])
def test_a_damaged_line_is_a_value_with_its_place_and_the_others_count(tmp_path: Path, line: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"n": 1}\n' + line + '{"n": 2}\n')
    first, damaged, last = Manifest(path).read_new()
    assert (first.fields, last.fields) == ({"n": 1}, {"n": 2})
    assert damaged.fields is None
    assert damaged.problem
    assert (damaged.at_byte, last.at_byte) == (9, 9 + len(line))


def test_a_line_longer_than_any_of_ours_is_skipped_without_reading_it_at_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("modelpool.actors.outputs.manifest.MAX_BYTES", 100)
    path = tmp_path / "m.jsonl"
    path.write_text("x" * 1234 + '\n{"n": 1}\n' + "y" * 500)
    manifest = Manifest(path)
    long, entry = manifest.read_new()
    assert (long.fields, entry.fields) == (None, {"n": 1})
    assert "1235 bytes" in long.problem
    assert list(manifest.read_new()) == [], "the torn line at the end is not read"


def test_a_replaced_or_shortened_file_is_read_from_the_start(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path / "m.jsonl")
    assert not manifest.is_replaced()
    manifest.append({"n": 1})
    manifest.append({"n": 2})
    assert len(entries(manifest)) == 2
    assert not manifest.is_replaced()
    manifest.path.write_text('{"n": 3}\n')
    assert manifest.is_replaced()
    assert entries(manifest) == [{"n": 3}]
    manifest.path.unlink()
    assert manifest.is_replaced()


def test_not_a_number_is_never_written(tmp_path: Path) -> None:
    """A line that other JSON readers refuse would break the file for them."""
    manifest = Manifest(tmp_path / "m.jsonl")
    with pytest.raises(ValueError, match="JSON compliant"):
        manifest.append({"seconds": float("nan")})
    assert entries(manifest) == []
