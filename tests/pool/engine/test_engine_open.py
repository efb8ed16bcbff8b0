"""What an engine does with what it finds when it takes a device: full ones, small ones, shared ones.

Proves: where too little is free an engine ends in a typed error with the figures and what to change, and nothing was
copied; where just enough is free it starts; the policy and the reserve follow from the card itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from modelpool.pool.devices import opening
from modelpool.pool.devices.capabilities import DeviceCapabilities, cuda_capabilities
from modelpool.pool.devices.device_kinds import SimMemory
from modelpool.pool.devices.kind_names import DeviceKind
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.vram_policy import LEAST_ROOM_BYTES, VramPolicy, rules_for
from modelpool.pool.engine import engine as engine_module
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.values.core.errors import DoesNotFit

MIB = 1 << 20
INDEX = 57  # of a simulated device that no other test uses


@pytest.fixture(autouse=True)
def _empty_device() -> Iterator[None]:
    sim.configure(INDEX, 64 * MIB)
    yield
    sim.recover(INDEX)


@pytest.mark.parametrize("foreign_bytes", [64 * MIB, 64 * MIB - 1, 64 * MIB - LEAST_ROOM_BYTES + 1])
def test_a_device_that_others_have_filled_is_refused_with_the_figures(foreign_bytes: int) -> None:
    """Found in a review: the copy that measures the link raised IndexError."""
    sim.occupy(INDEX, foreign_bytes)
    sim.reset_counters(INDEX)
    with pytest.raises(DoesNotFit, match=rf"device sim:{INDEX}: .* are free, of which 0 B are reserved .*reserve_vram"):
        Engine.open(EngineSettings("sim", INDEX, 64 * MIB))
    assert sim.memory_stats(INDEX).h2d_count == 0
    sim.occupy(INDEX, 0)
    Engine.open(EngineSettings("sim", INDEX, 64 * MIB)).close()


def test_closing_gives_the_cache_and_the_limits_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in a review: what an engine's allocator had cached stayed with the process for good, and so did its cap;
    an engine that does not open keeps neither."""
    said: list[str] = []
    monkeypatch.setattr(SimMemory, "release_cached", lambda memory: said.append("cache"))
    monkeypatch.setattr(SimMemory, "close", lambda memory: said.append("limits"))
    opened = Engine.open(EngineSettings("sim", INDEX, 64 * MIB))
    assert said == []
    opened.close()
    assert said == ["cache", "limits"]
    monkeypatch.setattr(engine_module, "measure_link", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Engine.open(EngineSettings("sim", INDEX, 64 * MIB))
    assert said == ["cache", "limits", "limits"]


def test_the_least_room_is_enough_to_start() -> None:
    sim.occupy(INDEX, 64 * MIB - LEAST_ROOM_BYTES)
    opened = Engine.open(EngineSettings("sim", INDEX, 64 * MIB))
    assert 0 < opened.introduce().capacity_bytes <= LEAST_ROOM_BYTES
    opened.close()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_card_without_room_for_a_process_to_begin_is_refused(
    error: type[RuntimeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context on a full card fails in the driver, before anybody can ask for free bytes."""

    def full(kind: str, index: int, budget_bytes: int | None) -> None:
        raise error("CUDA error: out of memory")

    monkeypatch.setattr(opening, "open_device", full)
    with pytest.raises(DoesNotFit, match=r"device cuda:0: next to nothing is free.*end what uses the device"):
        Engine.open(EngineSettings("cuda"))


def test_what_the_device_cannot_is_not_taken_for_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(kind: str, index: int, budget_bytes: int | None) -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(opening, "open_device", lost)
    with pytest.raises(torch.AcceleratorError, match="unspecified"):
        Engine.open(EngineSettings("cuda"))


def test_the_budget_of_a_simulated_device_is_all_the_workers() -> None:
    """Found in a review: a reserve came out of it, against the page on configuration."""
    plain, reserved = (
        Engine.open(EngineSettings("sim", INDEX, 64 * MIB, reserve_bytes=reserve)) for reserve in (None, 32 * MIB)
    )
    assert plain.introduce().capacity_bytes == reserved.introduce().capacity_bytes
    plain.close()
    reserved.close()


@pytest.mark.parametrize("shares", [True, False])
def test_policy_and_reserve_follow_from_the_card(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in a review: an integrated GPU was shared for the doctor and normal for the pool; and the usual reserve was
    reckoned from the budget, where it follows from the card's size."""
    card = cuda_capabilities("GB10", (12, 1), 100 << 30, shares_host_memory=shares)
    asked: list[object] = []

    def detect(kind: DeviceKind, index: int) -> DeviceCapabilities:
        return card

    def reserve(asked_bytes: int | None, kind: DeviceKind, device_bytes: int, on_windows: bool) -> int:
        asked.append((asked_bytes, device_bytes))
        return 0

    def rules(policy: VramPolicy) -> object:
        asked.append(policy)
        return rules_for(policy)

    monkeypatch.setattr(engine_module, "detect_capabilities", detect)
    monkeypatch.setattr(engine_module, "reserve_for", reserve)
    monkeypatch.setattr(engine_module, "rules_for", rules)
    Engine.open(EngineSettings("sim", INDEX, 64 * MIB, vram_policy=None)).close()
    assert asked == [(None, 100 << 30), VramPolicy.SHARED if shares else VramPolicy.NORMAL]
