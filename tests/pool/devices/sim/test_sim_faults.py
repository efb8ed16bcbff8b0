"""What goes wrong on a GPU can be made to go wrong on a simulated one, and its books stay exact.

Proves: another process's memory is missing from ours and never counted as ours; a copy that is told to fail fails once,
at its place, as running out of memory; a lost device answers nothing with an error that says so, and
gives memory back all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from modelpool.pool.devices.device_kinds import open_device
from modelpool.pool.devices.sim import device as sim

BUDGET_BYTES = 1 << 20
INDEX = 9  # of a device that no other test uses
DEVICE = "sim:9"


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    sim.configure(INDEX, BUDGET_BYTES)
    sim.recover(INDEX)
    sim.reset_peak(INDEX)
    sim.reset_counters(INDEX)
    yield
    sim.recover(INDEX)
    assert sim.memory_stats(INDEX).used_bytes == 0


def test_another_process_takes_from_what_is_free_and_adds_nothing_to_what_is_used() -> None:
    memory = open_device("sim", INDEX, BUDGET_BYTES).memory
    held = torch.zeros(1000, device=DEVICE)
    sim.occupy(INDEX, BUDGET_BYTES - 6000)
    assert memory.free_bytes() == 2000
    assert torch.sim.mem_get_info(DEVICE) == (2000, BUDGET_BYTES)
    stats = sim.memory_stats(INDEX)
    assert (stats.used_bytes, stats.peak_bytes, stats.foreign_bytes) == (4000, 4000, BUDGET_BYTES - 6000)
    with pytest.raises(torch.OutOfMemoryError, match="belong to another process"):
        torch.zeros(501, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError):
        held + torch.zeros(1000).to(DEVICE)
    torch.zeros(500, device=DEVICE)
    sim.occupy(INDEX, 0)
    assert memory.free_bytes() == BUDGET_BYTES - 4000
    del held


@pytest.mark.parametrize("size_bytes", [-1, BUDGET_BYTES - 3999])
def test_another_process_cannot_take_what_is_in_use(size_bytes: int) -> None:
    held = torch.zeros(1000, device=DEVICE)
    with pytest.raises(ValueError, match=f"foreign_bytes of sim:9: found {size_bytes}"):
        sim.occupy(INDEX, size_bytes)
    assert sim.memory_stats(INDEX).foreign_bytes == 0
    del held


@given(copies=st.integers(1, 6), after=st.integers(0, 7))
def test_one_copy_fails_at_its_place_and_only_once(copies: int, after: int) -> None:
    sim.reset_counters(INDEX)
    sim.fail_transfer(INDEX, after)
    went: list[bool] = []
    for _ in range(copies):
        try:
            torch.ones(8).to(DEVICE)
            went.append(True)
        except torch.OutOfMemoryError:
            went.append(False)
    sim.fail_transfer(INDEX, None)
    assert went == [i != after for i in range(copies)]
    assert sim.memory_stats(INDEX).h2d_count == sum(went)
    assert sim.memory_stats(INDEX).used_bytes == 0


def test_a_module_that_fails_to_arrive_can_be_sent_again() -> None:
    layer = nn.Linear(4, 4).requires_grad_(False)
    sim.fail_transfer(INDEX, after=1)
    with pytest.raises(torch.OutOfMemoryError, match="was set to fail"):
        layer.to(DEVICE)
    layer.to(DEVICE)
    assert sim.memory_stats(INDEX).used_bytes == 20 * 4


OPERATIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "compute": lambda t: t + 1,
    "matmul": lambda t: t @ t,
    "in place": lambda t: t.add_(1),
    "upload": lambda t: torch.ones(2, 2).to(t.device),
    "write": lambda t: t.copy_(torch.ones(2, 2)),
    "download": lambda t: t.cpu(),
    "read": lambda t: t.sum().item(),
    "allocate": lambda t: torch.empty(2, device=t.device),
    "random": lambda t: torch.randn(2, device=t.device),
    "convert": lambda t: t.half(),
    "memory": lambda t: torch.sim.mem_get_info(t.device),
    "account": lambda t: open_device("sim", INDEX, BUDGET_BYTES).memory.free_bytes(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_lost_device_answers_nothing(name: str) -> None:
    held = torch.eye(2, device=DEVICE)
    OPERATIONS[name](held)
    sim.lose(INDEX)
    with pytest.raises(torch.AcceleratorError, match="sim:9"):
        OPERATIONS[name](held)
    assert held.view(4).shape == (4,)
    assert sim.memory_stats(INDEX).used_bytes == 16
    sim.recover(INDEX)
    assert torch.isfinite(held.cpu()).all()
    del held


def test_a_lost_device_gives_memory_back_and_leaves_the_others_alone() -> None:
    sim.configure(5, BUDGET_BYTES)
    held, other = torch.ones(4, device=DEVICE), torch.ones(4, device="sim:5")
    sim.lose(INDEX)
    del held
    assert sim.memory_stats(INDEX).used_bytes == 0
    assert (other + 1).tolist() == [2, 2, 2, 2]


def test_a_failure_before_the_next_copy_cannot_be_asked_for() -> None:
    """Found in a review: a negative number was taken, and no copy ever failed."""
    with pytest.raises(ValueError, match="after -1, expected None or a number from 0"):
        sim.fail_transfer(INDEX, -1)


def test_a_lost_device_is_not_in_step_with_the_host() -> None:
    """Found in a review: `synchronize` answered for a device that was gone."""
    backend = torch.sim  # type: ignore[attr-defined]
    backend.synchronize(INDEX)
    sim.lose(INDEX)
    with pytest.raises(torch.AcceleratorError, match="is lost"):
        backend.synchronize(f"sim:{INDEX}")
    sim.recover(INDEX)
    backend.synchronize(INDEX)
    backend.synchronize()
