"""Memory of a device over the life of an engine: the wait, memory that is taken later, what libraries take.

Proves: an engine that replaces a dying process does not keep for life what was free meanwhile; the wait is bounded and
logged; growth holds to the budget, the cap and other engines; workspaces of libraries are not planned with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from modelpool.pool.devices.accelerator_memory import AcceleratorMemory, memory_calls
from modelpool.pool.devices.device_kinds import SimMemory, open_device
from modelpool.pool.devices.kind_names import DeviceKind
from modelpool.pool.devices.memory_wait import MemoryWait
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.workspaces import workspace_bytes
from modelpool.pool.engine import engine as engine_module
from modelpool.pool.engine.engine import Engine, EngineSettings
from tests.pool.devices.fake_modules import GIB, Properties, UsualModule, only

MIB = 1 << 20


class Clock:
    """A clock that `sleep` advances; `at` happens then."""

    def __init__(self, at: Callable[[float], None]) -> None:
        self.now, self._at = 0.0, at

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._at(self.now)

    def waiting(self) -> MemoryWait:
        return MemoryWait(1.0, 20.0, 0.1, lambda: self.now, self.sleep)


def test_memory_of_a_dying_process_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """Found in a review: a worker that replaces a killed one read 4 of 80 GiB as its device, for life."""
    caplog.set_level(logging.INFO)
    for name, foreign_GiB, budget, total_GiB, most_seconds, said in (
        ("dies within two seconds", lambda t: max(0, 76 - 38 * t), None, 80, 3.0, "waited 2.0 s"),
        ("frees some and stays", lambda t: 76 if t < 0.5 else 40, None, 40, 1.7, "other processes use 40.0 GiB"),
        ("frees for ever", lambda t: 76 - t, None, 24, 20.2, "other processes use"),
        ("stays", lambda t: 76, None, 4, 1.2, "other processes use 76.0 GiB of 80.0 GiB"),
        ("is small", lambda t: 2, None, 78, 0.0, ""),
        ("leaves the budget", lambda t: 40, 20 * GIB, 20, 0.0, ""),
    ):
        module = UsualModule(Properties("a card", 80 * GIB), foreign_bytes=int(foreign_GiB(0) * GIB))

        def at(now: float, module: UsualModule = module, foreign: Callable[[float], float] = foreign_GiB) -> None:
            module.foreign_bytes = int(foreign(now) * GIB)

        clock = Clock(at)
        caplog.clear()
        memory = open_device("xpu", 0, budget, only(xpu=module), clock.waiting()).memory
        assert memory.total_bytes() == pytest.approx(total_GiB * GIB, rel=0.02), name
        assert clock.now <= most_seconds, name
        assert said in caplog.text if said else not caplog.text, name


def test_a_process_takes_memory_that_others_free_later() -> None:
    module = UsualModule(Properties("x", 32 * GIB), foreign_bytes=28 * GIB)
    memory = AcceleratorMemory(memory_calls(DeviceKind.CUDA, module, 0), None)
    assert memory.total_bytes() == 4 * GIB
    module.foreign_bytes -= 512 * MIB
    assert not memory.may_grow()
    assert not memory.grow(), "small steps would change plans all the time"
    module.foreign_bytes, module.allocated_bytes, module.cached_bytes = 8 * GIB, 2 * GIB, GIB
    assert memory.may_grow()
    assert memory.total_bytes() == 4 * GIB, "a question changes nothing: another thread asks it"
    assert memory.grow()
    assert memory.total_bytes() == 24 * GIB, "with what it has reserved"
    assert module.shares[0] == pytest.approx(24 / 32)
    assert not memory.grow()
    module.foreign_bytes = 20 * GIB
    assert not memory.may_grow()
    assert not memory.grow(), "it does not shrink: plans look at what is free"
    assert memory.total_bytes() == 24 * GIB
    memory.close()
    assert module.shares[0] == 1

    limited = UsualModule(Properties("x", 32 * GIB), foreign_bytes=28 * GIB)
    first = AcceleratorMemory(memory_calls(DeviceKind.CUDA, limited, 0), 8 * GIB)
    second = AcceleratorMemory(memory_calls(DeviceKind.CUDA, limited, 0), 3 * GIB)
    limited.foreign_bytes = 0
    assert first.grow()
    assert first.total_bytes() == 8 * GIB, "up to the budget"
    assert not second.grow()
    assert limited.shares[0] == pytest.approx(11 / 32), "the other engine of the process keeps its part"


def test_workspaces_stay_while_an_engine_uses_another_device() -> None:
    """Found in a review: freeing them frees those of all devices of the process, which captured graphs may write."""
    module, freed = UsualModule(Properties("x", 32 * GIB)), []
    engines = [
        AcceleratorMemory(
            replace(memory_calls(DeviceKind.CUDA, module, index), forget=lambda: freed.append(True)), 8 * GIB
        )
        for index in range(2)
    ]
    engines[0].close()
    assert freed == []
    engines[1].close()
    assert freed == [True]


def test_an_engine_reports_memory_that_it_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the residency of its next report, which the core takes as the capacity of the worker."""
    sim.install()
    sim.configure(0, 8 * MIB)
    sim.recover(0)
    monkeypatch.setattr(engine_module, "workspace_bytes", lambda *args: MIB)
    engine = Engine.open(EngineSettings("sim"))
    try:
        before_bytes = engine.introduce().capacity_bytes
        assert before_bytes == engine.device.memory.total_bytes() - MIB, "workspaces are not planned with"
        monkeypatch.setattr(SimMemory, "grow", lambda self: True)
        monkeypatch.setattr(SimMemory, "may_grow", lambda self: True)
        monkeypatch.setattr(SimMemory, "total_bytes", lambda self: 3 * (1 << 30))
        assert engine.capacity.may_grow
        engine.capacity.grow()
        assert engine.residency().capacity_bytes == engine.introduce().capacity_bytes == 3 * (1 << 30) - MIB
        monkeypatch.setattr(SimMemory, "total_bytes", lambda self: GIB)
        monkeypatch.setattr(SimMemory, "may_grow", _lost)
        assert not engine.capacity.may_grow, (
            "a lost device is found by the next run, not by a question of the controller"
        )
        engine.capacity.grow()
        assert engine.residency().capacity_bytes == 3 * (1 << 30) - MIB, "never less"
    finally:
        engine.close()


def _lost(memory: SimMemory) -> bool:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_workspaces_have_the_sizes_that_torch_allocates() -> None:
    hopper, ada, small = ((9, 0), 80 * GIB), ((8, 9), 24 * GIB), ((8, 6), 8 * GIB)
    for card, environment, captures, expected in (
        (hopper, {}, False, 3 * 64 * MIB),
        (hopper, {}, True, 4 * 64 * MIB),
        (ada, {}, False, 3 * (8519680 + 4 * MIB)),
        (small, {}, False, 3 * (8519680 + MIB)),
        (hopper, {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8", "CUBLASLT_WORKSPACE_SIZE": "0"}, False, 3 * 8519680),
    ):
        assert workspace_bytes(DeviceKind.CUDA, *card, environment, captures) == expected
    assert workspace_bytes(DeviceKind.ROCM, (9, 0), 80 * GIB, {}) == 0
    assert workspace_bytes(DeviceKind.SIM, None, GIB, {}) == 0
