"""Bytes of mapped files are brought into memory and the page table: what follows touches them without a fault."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from modelpool.pool.files.formats import page_tables
from modelpool.pool.files.formats.byte_ranges import ByteRange
from modelpool.pool.files.formats.page_cache import in_memory
from modelpool.pool.files.formats.page_tables import PrefetchRanges, populate, start_prefetch

MIB = 1 << 20
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a call of Linux")


def mapped(path: Path, size_bytes: int) -> torch.UntypedStorage:
    path.write_bytes(b"\x01" * size_bytes)
    storage = torch.UntypedStorage.from_file(str(path), False, size_bytes)
    assert isinstance(storage, torch.UntypedStorage)
    return storage


def resident_bytes(path: Path) -> int:
    """Of the mapping of `path`, what is in this process' page table."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    found = 0
    for line in lines:
        if line.endswith(str(path)):
            found += next(int(text.split()[1]) << 10 for text in lines if text.startswith("Rss:"))
    return found


def test_what_was_asked_for_is_in_the_page_table_and_the_rest_is_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    storage = mapped(path, 64 * MIB)
    assert resident_bytes(path) == 0
    if not populate(storage, [(100, 24 * MIB), (40 * MIB, 41 * MIB)]):
        pytest.skip("a kernel before 5.14")
    # the kernel may map what is around
    assert 25 * MIB <= resident_bytes(path) <= 32 * MIB


def test_the_thread_keeps_the_mapping_until_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, may_go_on, seen = tmp_path / "file", threading.Event(), []

    def waiting(storage: torch.UntypedStorage, ranges: Sequence[ByteRange]) -> bool:
        may_go_on.wait(60)
        done = populate(storage, ranges)
        seen.append(resident_bytes(path))
        return done

    monkeypatch.setattr(page_tables, "populate", waiting)
    thread = start_prefetch([PrefetchRanges(str(path), mapped(path, 8 * MIB), [(0, 8 * MIB)])])
    may_go_on.set()  # nobody but the thread has the mapping now
    thread.join(60)
    assert seen == [8 * MIB]


@pytest.mark.parametrize("populates", [True, False], ids=["any kernel", "a kernel before 5.14"])
def test_a_cold_file_is_asked_for_a_window_ahead_of_the_page_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, populates: bool
) -> None:
    """In their order, each once, and all of them where nothing can be put into the page table."""
    steps: list[tuple[str, tuple[ByteRange, ...]]] = []
    monkeypatch.setattr(page_tables, "_WINDOW_BYTES", 10)
    monkeypatch.setattr(page_tables, "in_memory", lambda path, ranges: False)
    monkeypatch.setattr(page_tables, "advise_willneed", lambda path, ranges: steps.append(("ask", tuple(ranges))))

    def map_them(storage: torch.UntypedStorage, ranges: Sequence[ByteRange]) -> bool:
        steps.append(("map", tuple(ranges)))
        return populates

    monkeypatch.setattr(page_tables, "populate", map_them)
    start_prefetch([PrefetchRanges("a", torch.UntypedStorage(40), [(0, 25), (30, 40)])]).join(60)
    first, second, third, fourth = (0, 10), (10, 20), (20, 25), (30, 40)
    expected: list[tuple[str, tuple[ByteRange, ...]]] = [("ask", (first, second)), ("map", (first,))]
    expected += [("ask", (third,)), ("map", (second,)), ("ask", (fourth,)), ("map", (third,)), ("ask", ())]
    expected += [("map", (fourth,))]
    assert steps == (expected if populates else [step for step in expected if step[0] == "ask" or step[1] == (first,)])


def test_of_two_files_the_one_that_is_not_in_memory_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[str] = set()
    monkeypatch.setattr(page_tables, "in_memory", lambda path, ranges: path == "warm")
    monkeypatch.setattr(page_tables, "advise_willneed", lambda path, ranges: asked.add(path))
    files = {name: mapped(tmp_path / name, 8 * MIB) for name in ("warm", "cold")}
    start_prefetch([PrefetchRanges(name, storage, [(0, 8 * MIB)]) for name, storage in files.items()]).join(60)
    assert asked == {"cold"}
    assert [resident_bytes(tmp_path / name) for name in files] == [8 * MIB, 8 * MIB]


def test_a_file_in_memory_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    storage = mapped(path, 8 * MIB)
    assert in_memory(str(path), [(0, 8 * MIB)])
    monkeypatch.setattr(page_tables, "advise_willneed", lambda path, ranges: pytest.fail("it was"))
    start_prefetch([PrefetchRanges(str(path), storage, [(0, 8 * MIB)])]).join(60)
    assert resident_bytes(path) == 8 * MIB


def test_where_the_system_cannot_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_tables, "_POPULATE_READ", 0x7FFF_FFFF)  # advice that no kernel knows
    storage = mapped(tmp_path / "file", 8 * MIB)
    assert not populate(storage, [(0, 8 * MIB)])
    start_prefetch([PrefetchRanges(str(tmp_path / "file"), storage, [(0, 8 * MIB)])]).join(60)
    assert resident_bytes(tmp_path / "file") == 0


def test_a_file_that_became_shorter_is_left_to_who_reads_it(tmp_path: Path) -> None:
    """The call works there: nobody else is asked."""
    storage = mapped(tmp_path / "file", 8 * MIB)
    with (tmp_path / "file").open("r+b") as file:
        file.truncate(MIB)
    assert populate(storage, [(0, 8 * MIB)])
