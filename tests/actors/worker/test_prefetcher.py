"""Files that are read ahead are in memory afterwards, just the ranges that were asked for; nothing waits or fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from modelpool.actors.worker.prefetcher import BLOCK_BYTES, Prefetcher
from modelpool.actors.worker.storage_meter import StorageMeter
from modelpool.pool.files.formats.byte_ranges import ByteRange
from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.values.core.file_part import FilePart
from tests.actors.cold_file import PAGE, cold_file, resident_pages

MIB = 1 << 20
LONG_SECONDS = 30.0


@pytest.fixture
def reader() -> Iterator[Prefetcher]:
    reader = Prefetcher()
    yield reader
    reader.close()


def test_pages_of_a_cold_file_are_in_memory_afterwards(reader: Prefetcher, tmp_path: Path) -> None:
    path = cold_file(tmp_path / "weights", 12 * MIB)
    meter = StorageMeter()
    before = meter.read_bytes()
    reader.begin([FilePart(str(path))])
    assert reader.wait(LONG_SECONDS)
    # a kernel that reclaims memory ahead of need may have taken a page back
    assert resident_pages(path).mean() > 0.9
    assert reader.storage_bytes == pytest.approx(12 * MIB, rel=0.05)
    assert meter.read_bytes() - before >= reader.storage_bytes, "the process counts it too"
    meter.close()


def test_only_the_ranges_of_the_component_are_read(tmp_path: Path) -> None:
    """But for what the kernel itself reads around them."""
    path = cold_file(tmp_path / "weights", 64 * MIB)
    reader = Prefetcher(lambda part: {part.path: ((32 * MIB, 36 * MIB),)})
    reader.begin([FilePart(str(path))])
    assert reader.wait(LONG_SECONDS)
    reader.close()
    pages = resident_pages(path)
    assert pages[32 * MIB // PAGE : 36 * MIB // PAGE].all()
    assert not pages[: 16 * MIB // PAGE].any()


def test_what_is_in_memory_is_not_read_from_the_disk_again(reader: Prefetcher, tmp_path: Path) -> None:
    path = cold_file(tmp_path / "weights", 8 * MIB)
    path.read_bytes()
    reader.begin([FilePart(str(path))])
    assert reader.wait(LONG_SECONDS)
    assert reader.storage_bytes < MIB


def test_a_newer_wish_takes_the_place_of_one_that_is_not_done(tmp_path: Path) -> None:
    """1. the first of two files is being read, 2. another wish comes, 3. the second file is not read any more."""
    paths = [tmp_path / name for name in ("one", "two", "three")]
    for path in paths:
        path.write_bytes(b"x" * 100)
    asked: list[str] = []
    at_the_first, go_on = threading.Event(), threading.Event()

    def ranges(part: FilePart) -> Mapping[str, tuple[ByteRange, ...]]:
        asked.append(Path(part.path).name)
        at_the_first.set()
        assert go_on.wait(LONG_SECONDS)
        return {part.path: ((0, 100),)}

    reader = Prefetcher(ranges)
    reader.begin([FilePart(str(paths[0])), FilePart(str(paths[1]))])
    assert at_the_first.wait(LONG_SECONDS)
    reader.begin([FilePart(str(paths[2]))])
    go_on.set()
    assert reader.wait(LONG_SECONDS)
    reader.close()
    assert asked == ["one", "three"]


def test_a_wish_that_is_under_way_is_not_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "one"
    path.write_bytes(b"x" * 100)
    asked: list[str] = []
    at_the_first, go_on = threading.Event(), threading.Event()

    def ranges(part: FilePart) -> Mapping[str, tuple[ByteRange, ...]]:
        asked.append(part.path)
        at_the_first.set()
        assert go_on.wait(LONG_SECONDS)
        return {part.path: ((0, 100),)}

    reader = Prefetcher(ranges)
    reader.begin([FilePart(str(path))])
    assert at_the_first.wait(LONG_SECONDS)
    reader.begin([FilePart(str(path))])
    go_on.set()
    assert reader.wait(LONG_SECONDS)
    reader.close()
    assert len(asked) == 1


def test_what_cannot_be_read_is_left_to_the_run_that_needs_it(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.write_bytes(b"x" * (BLOCK_BYTES + 1))
    seen: list[str] = []

    def ranges(part: FilePart) -> Mapping[str, tuple[ByteRange, ...]]:
        seen.append(part.path)
        if part.path == "corrupt":
            raise CorruptFile("corrupt: cut short")
        return {part.path: ((0, 2 * BLOCK_BYTES),)}

    reader = Prefetcher(ranges)
    reader.begin([FilePart("corrupt"), FilePart(str(tmp_path / "missing")), FilePart(str(good))])
    assert reader.wait(LONG_SECONDS)
    reader.close()
    assert seen[-1] == str(good), "the others did not keep it from the last"


def test_closing_ends_the_thread_and_later_wishes_do_nothing(tmp_path: Path) -> None:
    reader = Prefetcher()
    reader.close()
    reader.begin([FilePart(str(tmp_path))])
    reader.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]
