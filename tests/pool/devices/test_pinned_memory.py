"""Pinned memory: its budget, control groups, pages pinned in place by a driver that may refuse, the ring of buffers."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pinned_files import SIZE_BYTES, measure
from modelpool.pool.devices.memory_limits import LIMITS_SECONDS, HostMemory, HostMemoryReader, host_memory
from modelpool.pool.devices.pinned_memory import (
    KEPT_FREE_BYTES,
    PAGE_BYTES,
    PinnedLedger,
    PinnedPages,
    StagingRing,
    is_copied_when_pinned,
    sent,
)
from modelpool.pool.devices.pinned_memory import pinned_budget_bytes as budget_of
from tests.pool.devices.fake_streams import FakeEvent

GIB = 1 << 30


class Driver:
    """Pins what it is asked to until `refuses_at`."""

    def __init__(self, refuses_at: int = 1 << 30) -> None:
        self.pinned: dict[int, int] = {}
        self.asked = 0
        self.refuses_at = refuses_at

    def pin(self, address: int, size_bytes: int) -> bool:
        assert address % PAGE_BYTES == size_bytes % PAGE_BYTES == 0
        self.asked += 1
        if self.asked >= self.refuses_at:
            return False
        self.pinned[address] = size_bytes
        return True

    def unpin(self, address: int) -> None:
        del self.pinned[address]


def write_groups(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        file = root / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    own = root / "own"
    own.write_text(files.get("own", "0::/\n"))
    return root / "cgroup", own


V1 = "5:cpu,cpuacct:/docker/x\n9:memory:/docker/x\n0::/\n"
GROUPS = {
    "v2, own group": ({"own": "0::/a/b\n", "a/b/memory.max": "3000\n", "a/b/memory.current": "1000\n"}, 3000, 2000),
    "v2, group above": (
        {"own": "0::/a/b\n", "a/b/memory.max": "max\n", "a/memory.max": "5000", "a/memory.current": "4500"},
        5000,
        500,
    ),
    "v2, the tighter one": (
        {"own": "0::/a/b\n", "a/b/memory.max": "4000", "a/b/memory.current": "0", "a/memory.max": "9000",
         "a/memory.current": "8000"},
        4000,
        1000,
    ),
    "v2, inside a container": ({"own": "0::/elsewhere\n", "memory.max": "700", "memory.current": "900"}, 700, 0),
    "v2, file pages": (
        {"own": "0::/\n", "memory.max": "4000", "memory.current": "3000", "memory.stat": "a 5\ninactive_file 2500\n"},
        4000,
        3500,
    ),
    "v1": (
        {"own": V1, "memory/docker/x/memory.limit_in_bytes": "6000", "memory/docker/x/memory.usage_in_bytes": "5000",
         "memory/memory.limit_in_bytes": "9223372036854771712"},
        6000,
        1000,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_control_groups_narrow_the_machines_memory(name: str, tmp_path: Path) -> None:
    files, total_bytes, available_bytes = GROUPS[name]
    assert host_memory(*write_groups(tmp_path, files)) == HostMemory(total_bytes, available_bytes)


def test_a_reader_sees_use_at_once_and_new_limits_after_its_interval(tmp_path: Path) -> None:
    now = 0.0
    places = write_groups(
        tmp_path, {"own": "0::/a\n", "a/memory.max": f"{4 << 20}\n", "a/memory.current": f"{1 << 20}\n"}
    )
    reader = HostMemoryReader(*places, clock=lambda: now)
    assert reader() == host_memory(*places) == HostMemory(4 << 20, 3 << 20)
    (places[0] / "a" / "memory.current").write_text(f"{2 << 20}\n")
    assert reader() == host_memory(*places) == HostMemory(4 << 20, 2 << 20)
    (places[0] / "a" / "memory.max").write_text(f"{3 << 20}\n")
    now = LIMITS_SECONDS
    assert reader() == host_memory(*places) == HostMemory(3 << 20, 1 << 20)


@pytest.mark.parametrize(
    "files",
    [{}, {"own": ""}, {"own": "nonsense"}, {"own": "0::/a\n", "a/memory.max": "a lot"}, {"own": "0::/../..\n"}],
    ids=str,
)
def test_what_says_nothing_narrows_nothing(files: dict[str, str], tmp_path: Path) -> None:
    assert host_memory(*write_groups(tmp_path, files)).total_bytes == psutil.virtual_memory().total


def test_this_machine_can_be_asked() -> None:
    found = host_memory()
    assert 0 <= found.available_bytes <= found.total_bytes <= psutil.virtual_memory().total


@given(st.integers(0, 1 << 42), st.integers(0, 1 << 42))
def test_the_budget_leaves_the_host_enough(total_bytes: int, available_bytes: int) -> None:
    available_bytes = min(total_bytes, available_bytes)
    budget_bytes = budget_of(HostMemory(total_bytes, available_bytes))
    assert 0 <= budget_bytes <= 0.95 * total_bytes
    if budget_bytes:
        assert available_bytes - budget_bytes >= max(KEPT_FREE_BYTES, available_bytes // 2)


def test_budgets() -> None:
    assert budget_of(HostMemory(64 * GIB, 40 * GIB)) == 20 * GIB
    assert budget_of(HostMemory(64 * GIB, 3 * GIB)) == 1 * GIB
    assert budget_of(HostMemory(2 * GIB, GIB)) == 0


def test_the_ledger_keeps_to_its_budget() -> None:
    ledger = PinnedLedger(10)
    assert ledger.take(7)
    assert not ledger.take(4)
    ledger.give_back(7)
    assert ledger.take(10)
    with pytest.raises(AssertionError, match="11 bytes given back"):
        ledger.give_back(11)


def test_pages_are_pinned_whole_and_given_back() -> None:
    driver, ledger = Driver(), PinnedLedger(1 << 20)
    pages = PinnedPages(driver, ledger)
    file = torch.zeros(5 * PAGE_BYTES, dtype=torch.uint8)
    weight = file[PAGE_BYTES + 5 : 2 * PAGE_BYTES]
    assert not pages.holds(weight)
    assert pages.pin(file)
    assert pages.holds(file)
    assert pages.holds(weight)
    assert pages.pin(weight)
    assert driver.asked == 1, "it is pinned already"
    assert sum(driver.pinned.values()) == ledger.pinned_bytes >= file.nbytes
    assert not pages.holds(torch.zeros(1 << 20)[1 << 19 :]), "a small one may be in the last page of the file"
    pages.close()
    pages.close()
    assert (driver.pinned, ledger.pinned_bytes) == ({}, 0)
    assert not pages.holds(weight)


def test_pages_that_pinning_would_copy_stay_unpinned(tmp_path: Path) -> None:
    """The mapped file is what several processes share: a private mapping must not become a copy of it."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(3 * PAGE_BYTES))
    driver = Driver()
    pages = PinnedPages(driver, PinnedLedger(1 << 20))
    private, shared = (
        torch.from_file(str(path), shared=shared, size=3 * PAGE_BYTES, dtype=torch.uint8) for shared in (False, True)
    )
    assert is_copied_when_pinned(private.data_ptr())
    assert not pages.pin(private)
    assert (driver.asked, pages.refused) == (0, False)
    assert not is_copied_when_pinned(shared.data_ptr())
    assert pages.pin(shared)
    assert not is_copied_when_pinned(torch.zeros(1 << 20).data_ptr()), "memory of the process's own"
    assert not is_copied_when_pinned(private.data_ptr(), tmp_path / "nothing")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux pins for io_uring")
@pytest.mark.parametrize("folder", [None, Path("/dev/shm")], ids=["a disk", "memory"])
def test_the_kernel_copies_what_is_said_to_be_copied(folder: Path | None, tmp_path: Path) -> None:
    """By the kernel's own pins for writing, on a disk's file system as well as in memory. Files on disks in shared
    mappings are refused."""
    try:
        found = {each.mapping: each for each in measure(folder or tmp_path)}
    except OSError as error:
        pytest.skip(f"no io_uring here: {error}")
    assert found["private"].refusal == ""
    assert found["private"].copied_bytes == SIZE_BYTES
    assert all(each.copied_bytes == 0 for name, each in found.items() if name != "private")
    path = tmp_path / "weights"
    path.write_bytes(bytes(PAGE_BYTES))
    file = torch.from_file(str(path), shared=False, size=PAGE_BYTES, dtype=torch.uint8)
    assert is_copied_when_pinned(file.data_ptr())


def test_a_page_is_never_pinned_twice() -> None:
    driver = Driver()
    pages = PinnedPages(driver, PinnedLedger(1 << 20))
    file = torch.zeros(4 * PAGE_BYTES, dtype=torch.uint8)
    assert pages.pin(file[: PAGE_BYTES + 1])
    assert not pages.pin(file[PAGE_BYTES // 2 :])
    assert driver.asked == 1


def test_a_driver_that_refuses_is_asked_once() -> None:
    driver, ledger = Driver(refuses_at=2), PinnedLedger(1 << 20)
    pages = PinnedPages(driver, ledger)
    first, second, third = (torch.zeros(3 * PAGE_BYTES, dtype=torch.uint8) for _ in range(3))
    assert pages.pin(first)
    pinned_bytes = ledger.pinned_bytes
    assert not pages.pin(second)
    assert not pages.pin(third)
    assert (pages.refused, driver.asked, ledger.pinned_bytes) == (True, 2, pinned_bytes)
    assert pages.holds(first)
    pages.close()
    assert ledger.pinned_bytes == 0


def test_a_driver_that_raises_has_refused() -> None:
    class Raising(Driver):
        def pin(self, address: int, size_bytes: int) -> bool:
            raise RuntimeError("operation not supported")

    ledger = PinnedLedger(1 << 20)
    pages = PinnedPages(Raising(), ledger)
    assert not pages.pin(torch.zeros(PAGE_BYTES, dtype=torch.uint8))
    assert pages.refusal == "the driver does not pin the pages of mapped files here (operation not supported)"
    assert ledger.pinned_bytes == 0


def test_beyond_the_budget_the_driver_is_not_asked() -> None:
    driver = Driver()
    pages = PinnedPages(driver, PinnedLedger(PAGE_BYTES))
    assert not pages.pin(torch.zeros(3 * PAGE_BYTES, dtype=torch.uint8))
    assert not pages.pin(torch.zeros(0))
    assert (driver.asked, pages.refused) == (0, False)


def plain_buffer(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def test_a_buffer_is_written_only_when_the_last_copy_from_it_is_done() -> None:
    ring = StagingRing.allocate(PinnedLedger(100), 10, 2, plain_buffer)
    assert (len(ring), ring.slot_bytes) == (2, 10)
    events = [FakeEvent(), FakeEvent(), FakeEvent()]
    for index, event in enumerate(events):
        assert not any(e.synchronized for e in events[max(0, index - 1) :])
        filled, slot = ring.stage(torch.full((4,), index, dtype=torch.uint8))
        slot.copied(event)
        assert filled.tolist() == [index] * 4
    assert [e.synchronized for e in events] == [True, False, False]
    ring.close()
    assert [e.synchronized for e in events] == [True, True, True]


def test_as_many_buffers_as_the_budget_gives() -> None:
    ledger = PinnedLedger(25)
    ring = StagingRing.allocate(ledger, 10, 3, plain_buffer)
    assert (len(ring), ledger.pinned_bytes) == (2, 20)
    assert ring.shortfall == "2 of 3 staging buffers: the host has too little free memory to pin more"
    ring.close()
    assert (len(ring), ledger.pinned_bytes, ring.slot_bytes) == (0, 0, 0)


def test_a_driver_without_pinned_memory_gives_no_buffers() -> None:
    def refuse(size_bytes: int) -> torch.Tensor:
        raise RuntimeError("cannot pin")

    ledger = PinnedLedger(100)
    ring = StagingRing.allocate(ledger, 10, 3, refuse)
    assert (len(ring), ledger.pinned_bytes) == (0, 0)
    assert ring.shortfall == "0 of 3 staging buffers: no more memory can be pinned (cannot pin)"


def test_what_was_computed_on_the_cpu_is_sent_without_waiting() -> None:
    """Found in a review: the noise of each step of an ancestral sampler was copied from pageable memory, which waits
    for all work of the device."""
    said: list[object] = []

    class Host:
        def __init__(self, is_pinned: bool = False) -> None:
            self._is_pinned = is_pinned

        def is_pinned(self) -> bool:
            return self._is_pinned

        def pin_memory(self) -> Host:
            said.append("pinned")
            return self

        def to(self, device: torch.device, non_blocking: bool = False) -> Host:
            said.append((device.type, non_blocking))
            return self

    for kind in ("cuda", "meta"):
        sent(Host(), torch.device(kind))  # type: ignore[arg-type]
    assert said == ["pinned", ("cuda", True), ("meta", False)]
    said.clear()
    sent(Host(is_pinned=True), torch.device("cuda"))  # type: ignore[arg-type]
    assert said == [("cuda", True)], "it is copied on the host once more"
