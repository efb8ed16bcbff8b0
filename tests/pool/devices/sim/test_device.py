"""The simulated device accounts for every byte, mixes and copies as CUDA does, and computes what the CPU computes.

Proves: the books are exact through views, in-place operations, deep copies, failures and any order of life and death;
the budget is never passed; host and device copies are counted once each; what would bend the books is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.sim.ledger import SimAllocation, SimLedger
from modelpool.pool.devices.torch_api import torch_private

BUDGET_BYTES = 1 << 20
INDEX = 6  # of a device that only tests of this folder use
DEVICE = "sim:6"
OTHER = "sim:5"


@pytest.fixture(autouse=True)
def _devices() -> None:
    for index in (INDEX, 5):
        sim.configure(index, BUDGET_BYTES)
        sim.reset_peak(index)
        sim.reset_counters(index)
    assert sim.memory_stats(INDEX).used_bytes == 0, "another test left tensors on sim:6"


def used_bytes() -> int:
    return sim.memory_stats(INDEX).used_bytes


def test_the_private_parts_of_torch_behave() -> None:
    torch_private.self_test()
    sim.self_test()


def test_installing_again_keeps_the_devices() -> None:
    held = torch.ones(10, device=DEVICE)
    backend = torch.sim
    sim.install()
    assert torch.sim is backend
    assert used_bytes() == held.nbytes


def test_views_share_one_charge_that_ends_with_the_last_of_them() -> None:
    base = torch.zeros(100, device=DEVICE)
    views = [base.view(10, 10), base[5:], base.t(), *base.split(30), base.detach(), base.expand(3, 100)]
    assert used_bytes() == 400
    del base
    assert used_bytes() == 400
    while views:
        views.pop()
        assert used_bytes() == (400 if views else 0)


def test_in_place_operations_keep_identity_and_reach_every_view() -> None:
    base = torch.zeros(4, device=DEVICE)
    view = base[1:3]
    assert view.add_(2) is view
    assert base.mul_(3) is base
    assert base.tolist() == [0, 6, 6, 0]
    base[0] = 5
    base[torch.tensor([3], device=DEVICE)] = torch.tensor([7.0], device=DEVICE)
    assert base.cpu().tolist() == [5, 6, 6, 7]
    assert used_bytes() == 16


def test_shape_changes_in_place_keep_the_books() -> None:
    held = torch.arange(12.0, device=DEVICE).view(3, 4)
    held.t_()
    held.unsqueeze_(0)
    assert held.shape == (1, 4, 3)
    assert torch.equal((held + 1).cpu()[0], torch.arange(12.0).view(3, 4).t() + 1)
    assert torch.equal(held.quantile(0.3, dim=1).cpu(), held.cpu().quantile(0.3, dim=1))
    assert used_bytes() == 48


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.resize_(1000),
        lambda t: t.set_(torch.ones(9, device=DEVICE)),
        lambda t: t.resize_as_(torch.ones(9, device=DEVICE)),
        lambda t: torch.add(t, 1, out=torch.empty(0, device=DEVICE)),
        lambda t: setattr(t, "data", torch.ones(4)),
    ],
    ids=["resize_", "set_", "resize_as_", "out", "data"],
)
def test_what_would_bend_the_books_is_refused(change: Callable[[Tensor], object]) -> None:
    held = torch.ones(4, device=DEVICE)
    with pytest.raises(RuntimeError):
        change(held)
    assert held.tolist() == [1, 1, 1, 1]
    assert used_bytes() == 16


def test_results_can_be_written_into_a_tensor_of_their_shape() -> None:
    out = torch.empty(3, device=DEVICE)
    result = torch.add(torch.ones(3, device=DEVICE), 1, out=out)
    assert result is out
    assert out.tolist() == [2, 2, 2]


def test_other_data_moves_the_charge() -> None:
    layer = nn.Linear(8, 8).to(DEVICE)
    before = used_bytes()
    identity = layer.weight
    layer.half()
    assert layer.weight is identity
    assert layer.weight.dtype is torch.float16
    assert used_bytes() == before // 2


class _Use:
    """Random life on a device beside a plain model of it."""

    def __init__(self) -> None:
        self.tensors: list[tuple[Tensor, int]] = []  # with the number of its storage
        self.sizes: list[int] = []  # bytes of each storage that was made

    def expected_bytes(self) -> int:
        return sum(self.sizes[number] for number in {number for _, number in self.tensors})

    def step(self, verb: str, number: int) -> None:
        if verb == "make":
            self._made(torch.zeros(number, device=DEVICE))
        elif verb == "move":
            self._made(torch.zeros(number).to(DEVICE))
        elif not self.tensors:
            return
        elif verb == "drop":
            self.tensors.pop(number % len(self.tensors))
        else:
            tensor, storage = self.tensors[number % len(self.tensors)]
            if verb == "view":
                self.tensors.append((tensor[tensor.shape[0] // 2 :], storage))
            else:
                self._made(tensor + 1)

    def _made(self, tensor: Tensor) -> None:
        self.sizes.append(tensor.nbytes)
        self.tensors.append((tensor, len(self.sizes) - 1))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["make", "view", "add", "drop", "move"]), st.integers(1, 97)), max_size=40))
def test_any_order_of_life_and_death_keeps_the_books(steps: list[tuple[str, int]]) -> None:
    sim.configure(INDEX, 4000)
    use = _Use()
    for verb, number in steps:
        before = used_bytes()
        try:
            use.step(verb, number)
        except torch.OutOfMemoryError:
            assert used_bytes() == before
        assert used_bytes() == use.expected_bytes() <= sim.memory_stats(INDEX).peak_bytes <= 4000
    use.tensors.clear()
    assert used_bytes() == 0


def test_a_full_device_says_what_was_asked_and_what_there_is() -> None:
    held = torch.zeros(BUDGET_BYTES // 8, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.cat([held, held])
    assert str(BUDGET_BYTES) in str(caught.value)
    assert f"in use of a budget of {BUDGET_BYTES} bytes" in str(caught.value)
    assert f"{held.nbytes} bytes in use" in str(caught.value)
    del caught
    assert used_bytes() == held.nbytes
    assert sim.memory_stats(INDEX).peak_bytes <= BUDGET_BYTES


def test_a_request_beyond_the_budget_takes_no_host_memory() -> None:
    for ask in (torch.empty, torch.zeros, torch.rand):
        with pytest.raises(torch.OutOfMemoryError):
            ask(1 << 45, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1).expand(1 << 45).to(DEVICE)
    assert used_bytes() == 0


def test_a_model_that_half_fits_leaves_exact_books_and_recovers() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    sim.configure(INDEX, 40_000)
    with pytest.raises(torch.OutOfMemoryError):
        model.to(DEVICE)
    there = [p for p in model.parameters() if p.device.type == "sim"]
    assert 0 < len(there) < 4
    assert used_bytes() == sum(p.nbytes for p in there)
    del there
    model.cpu()
    assert used_bytes() == 0


def test_a_budget_below_what_is_in_use_is_refused() -> None:
    held = torch.zeros(100, device=DEVICE)
    with pytest.raises(ValueError, match="400 bytes in use"):
        sim.configure(INDEX, held.nbytes - 1)
    with pytest.raises(ValueError, match="negative"):
        sim.configure(INDEX, -1)
    assert sim.memory_stats(INDEX).budget_bytes == BUDGET_BYTES


def test_threads_share_the_books() -> None:
    def churn() -> None:
        for size in range(1, 300):
            held = torch.ones(size, device=DEVICE)
            held = held + held
            del held

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert used_bytes() == 0
    assert sim.memory_stats(INDEX).allocation_count == 4 * 299 * 2


def test_a_self_test_beside_other_threads_counts_its_own_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in a review: it counted what other threads called while it had a hook of all modules."""
    called = torch_private.call_module

    def beside(module: nn.Module, x: Tensor) -> Any:
        nn.Identity()(x)  # as another thread would
        return called(module, x)

    monkeypatch.setattr(torch_private, "call_module", beside)
    torch_private.self_test()


def test_freed_bytes_count_at_the_next_look_at_the_books_and_wait_for_no_lock() -> None:
    looks: list[Callable[[SimLedger], object]] = [
        lambda ledger: ledger.require(100),
        lambda ledger: ledger.set_budget(10),
        lambda ledger: ledger.set_foreign(100),
        lambda ledger: SimAllocation(ledger, 100),
    ]
    for look in looks:
        ledger = SimLedger(INDEX, 100)
        held = [SimAllocation(ledger, 60)]
        with ledger._lock:  # as in a charge
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join(60)
            assert not thread.is_alive()
        look(ledger)
        assert ledger.stats().used_bytes == 0
    ledger = SimLedger(INDEX, 100)
    SimAllocation(ledger, 60)
    ledger.reset_peak()
    assert ledger.stats().peak_bytes == 0


def test_copies_between_host_and_device_are_counted_once_each() -> None:
    host = torch.ones(10, dtype=torch.float16)
    device = host.to(DEVICE)
    device.float().to(OTHER)  # from device to device: not over the host's bus
    device.copy_(host)
    host.copy_(device)
    device.cpu()
    device.sum().item()
    _ = device[torch.tensor([1, 2])]  # the index travels
    stats = sim.memory_stats(INDEX)
    assert (stats.h2d_bytes, stats.h2d_count) == (20 + 20 + 16, 3)
    assert (stats.d2h_bytes, stats.d2h_count) == (20 + 20 + 2, 3)
    assert sim.memory_stats(5).h2d_count == 0
    sim.reset_counters(INDEX)
    assert sim.memory_stats(INDEX).h2d_bytes == sim.memory_stats(INDEX).d2h_count == 0
