"""What the kernel counts is what pages of a mapped file brought from the disk."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from modelpool.actors.worker.storage_meter import THREAD_IO, StorageMeter
from tests.actors.cold_file import PAGE, cold_file

MIB = 1 << 20


def touch(path: Path) -> None:
    """Use one byte of each page, as a copy of mapped weights does."""
    assert int(np.memmap(path, dtype=np.uint8, mode="r")[::PAGE].sum()) > 0


def test_pages_of_a_mapped_file_count_when_they_come_from_the_disk_and_then_no_more(tmp_path: Path) -> None:
    meter, path = StorageMeter(), cold_file(tmp_path / "weights", 16 * MIB)
    before = meter.read_bytes()
    touch(path)
    cold_bytes = meter.read_bytes() - before
    touch(path)
    warm_bytes = meter.read_bytes() - before - cold_bytes
    meter.close()
    assert 15 * MIB < cold_bytes < 24 * MIB
    assert warm_bytes < MIB


def test_a_thread_counts_what_it_read_itself(tmp_path: Path) -> None:
    mine, path, counted = StorageMeter(THREAD_IO), cold_file(tmp_path / "weights", 8 * MIB), []

    def read() -> None:
        meter = StorageMeter(THREAD_IO)
        before = meter.read_bytes()
        touch(path)
        counted.append(meter.read_bytes() - before)
        meter.close()

    before = mine.read_bytes()
    other = threading.Thread(target=read)
    other.start()
    other.join()
    assert counted[0] > 7 * MIB
    assert mine.read_bytes() - before < MIB
    mine.close()


@pytest.mark.parametrize("text", ["", "rchar: 1\nwchar: 2\n"])
def test_systems_that_do_not_count_say_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "io").write_text(text)
    for source in (tmp_path / "io", tmp_path / "missing"):
        meter = StorageMeter(source)
        assert meter.read_bytes() == 0
        meter.close()
        assert meter.read_bytes() == 0
        meter.close()
