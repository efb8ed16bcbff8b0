"""Pages that are in memory are put into the process' page table ahead: what follows touches them without a fault."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from pool.checkpoints.page_tables import begin_populating, populate

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
    if not populate([(storage, [(100, 24 * MIB), (40 * MIB, 41 * MIB)])]):
        pytest.skip("a kernel before 5.14")
    # the kernel may map what is around
    assert 25 * MIB <= resident_bytes(path) <= 32 * MIB


def test_the_thread_keeps_the_mapping_until_it_is_done(tmp_path: Path) -> None:
    thread = begin_populating([(mapped(tmp_path / "file", 8 * MIB), [(0, 8 * MIB)])], otherwise=lambda: None)
    thread.join(60)
    assert not thread.is_alive()


def test_where_the_system_cannot_somebody_else_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr("pool.checkpoints.page_tables._POPULATE_READ", 0x7FFF_FFFF)  # advice that no kernel knows
    wanted = [(mapped(tmp_path / "file", 8 * MIB), [(0, 8 * MIB)])]
    assert not populate(wanted)
    begin_populating(wanted, otherwise=lambda: asked.append(True)).join(60)
    assert asked


def test_a_file_that_became_shorter_is_left_to_who_reads_it(tmp_path: Path) -> None:
    """The call works there: nobody else is asked."""
    storage = mapped(tmp_path / "file", 8 * MIB)
    with (tmp_path / "file").open("r+b") as file:
        file.truncate(MIB)
    assert populate([(storage, [(0, 8 * MIB)])])
