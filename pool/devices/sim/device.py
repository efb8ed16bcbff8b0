"""A simulated accelerator: `torch.device("sim:0")` with a memory budget, for machines without a GPU.

    install()
    configure(0, budget_bytes=64 << 20)
    model.to("sim:0")

Data is in CPU memory, so results equal the CPU's bit for bit. Each storage is charged to the budget of the device;
exceeding it raises `torch.OutOfMemoryError`; mixing devices raises RuntimeError as CUDA does; copies between host and
device are counted. There are no streams: asynchronous behaviour of a GPU is not simulated. Random numbers on the device
come from its own generator, never from the CPU's; `torch.Generator` exists for the CPU only. For inference: a layer
with input or weights that need a gradient raises RuntimeError unless gradients are off.

torch has one registry of device types per process, so `install` is process-wide and cannot be undone; its state is one
object, a `SimBackend`, which torch holds as `torch.sim`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from modelpool.pool.devices.sim.ledger import SimMemoryStats
from modelpool.pool.devices.sim.operations import WHOLE_OPS, aten, factory_ops, plan_of
from modelpool.pool.devices.sim.sim_registry import SimDevice, SimDevices
from modelpool.pool.devices.sim.tensor import copy_from, make_on_device, run
from modelpool.pool.devices.torch_api import torch_private

__all__ = [
    "SimBackend",
    "SimMemoryStats",
    "configure",
    "fail_transfer",
    "install",
    "lose",
    "memory_stats",
    "occupy",
    "recover",
    "require",
    "reset_counters",
    "reset_peak",
    "self_test",
]

BACKEND_NAME = "sim"


class SimBackend:
    """The device module of torch (`torch.sim`): the state of all simulated devices, and the hooks that torch calls.

    The method names are torch's.
    """

    def __init__(self) -> None:
        self.devices = SimDevices()
        # registered for as long as these live
        self.libraries = [_fallback_library(), _autocast_library(), _kernel_library(self.devices)]

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.devices)

    def current_device(self) -> int:
        """Always 0: torch's own code uses sim:0 without an index, and cannot be configured."""
        return 0

    def synchronize(self, device: torch.device | str | int | None = None) -> None:
        """Nothing is pending: every operation is complete when it returns. Raises torch.AcceleratorError if the device
        is lost."""
        found = self.devices.find(self.current_device()) if device is None else self._find(device)
        if found is not None:
            found.require()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def manual_seed_all(self, seed: int) -> None:
        """Reseed every device's generator; called by `torch.manual_seed`."""
        for sim in self.devices:
            sim.generator.manual_seed(seed)

    def get_rng_state(self, device: torch.device | str | int = "sim") -> torch.Tensor:
        return self._find(device).generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device | str | int = "sim") -> None:
        self._find(device).generator.set_state(state)

    def mem_get_info(self, device: torch.device | str | int = "sim") -> tuple[int, int]:
        """Return free bytes and the budget, as torch.cuda does."""
        found = self._find(device)
        found.require()
        stats = found.ledger.stats()
        return stats.budget_bytes - stats.used_bytes - stats.foreign_bytes, stats.budget_bytes

    def _is_in_bad_fork(self) -> bool:
        return False

    def _find(self, device: torch.device | str | int) -> SimDevice:
        found = self.devices.resolve(device)
        if found is None:
            raise RuntimeError(f"expected a simulated device, found {device}")
        return found


def install() -> None:
    """Register the device type `sim` with torch for the process. Does nothing the second time.

    Raises RuntimeError if another out-of-tree device type is registered: torch supports one.
    """
    if isinstance(getattr(torch, BACKEND_NAME, None), SimBackend):
        return
    claimed = torch_private.python_backend_name()
    if claimed != "privateuseone":
        raise RuntimeError(f"torch has room for one out-of-tree device type, and this process registered {claimed!r}")
    torch_private.expect_python_backends()  # before the object below registers operators, which can be done once
    torch_private.register_python_backend(BACKEND_NAME, backend_module=SimBackend())


def configure(index: int, budget_bytes: int) -> None:
    """Create device `sim:index` with `budget_bytes` of memory, or change its budget. Installs `sim` if needed.

    Raises ValueError for a negative number, and for a budget below current use.
    """
    if index < 0 or budget_bytes < 0:
        raise ValueError(f"configure: found index {index} and budget_bytes {budget_bytes}, expected no negative number")
    install()
    devices = _backend().devices
    known = devices.find(index)
    if known is None:
        devices.add(index, budget_bytes)
    else:
        known.ledger.set_budget(budget_bytes)


def memory_stats(index: int) -> SimMemoryStats:
    """Return the memory statistics of `sim:index`."""
    return _configured(index).ledger.stats()


def reset_peak(index: int) -> None:
    """Restart `peak_bytes` of `sim:index` from current use."""
    _configured(index).ledger.reset_peak()


def reset_counters(index: int) -> None:
    """Reset the counts of allocations and transfers of `sim:index`."""
    _configured(index).ledger.reset_counters()


def occupy(index: int, size_bytes: int) -> None:
    """Simulate another process that holds `size_bytes` of `sim:index`; 0 ends it.

    They count against the budget and reduce the free bytes, and are never part of used or peak bytes. Raises ValueError
    if they are not free.
    """
    _configured(index).ledger.set_foreign(size_bytes)


def fail_transfer(index: int, after: int | None = 0) -> None:
    """Make one copy from the host to `sim:index` raise torch.OutOfMemoryError, after `after` successful ones.

    None cancels a pending failure. The failing copy is not counted. Raises ValueError for a negative number.
    """
    if after is not None and after < 0:
        raise ValueError(f"fail_transfer: found after {after}, expected None or a number from 0")
    _configured(index).ledger.fail_copy(after)


def lose(index: int) -> None:
    """Simulate the loss of `sim:index`: every operation, copy and allocation on it raises torch.AcceleratorError until
    `recover`.

    What CUDA answers from the host alone still works: views, `memory_stats`, and freeing a tensor.
    """
    _configured(index).is_lost = True


def recover(index: int) -> None:
    """Undo `lose`, `occupy` and `fail_transfer`. Data on the device is unchanged."""
    found = _configured(index)
    found.is_lost = False
    found.ledger.set_foreign(0)
    found.ledger.fail_copy(None)


def require(index: int) -> None:
    """Raise torch.AcceleratorError if `sim:index` is lost."""
    _configured(index).require()


def self_test() -> None:
    """Check that torch's private parts behave as required, on the device `sim` itself.

    Installs `sim` and uses device index 0, which it creates if missing. Raises RuntimeError naming the behaviour that
    this torch lacks.
    """
    torch_private.self_test()
    install()
    if _backend().devices.find(0) is None:
        configure(0, budget_bytes=1 << 20)
    before = memory_stats(0).used_bytes
    moved = torch.tensor([1.0, -2.0, 3.0], device="sim:0")
    viewed = moved.view(3, 1)
    facts = {
        "torch.tensor reaches the device": moved.device == torch.device("sim", 0)
        and moved.tolist() == [1.0, -2.0, 3.0],
        "a view shares its storage's charge": memory_stats(0).used_bytes == before + 12,
        "results are the CPU's": bool(torch.equal((viewed.abs() + 1).cpu(), torch.tensor([[2.0], [3.0], [4.0]]))),
        "factories reach the device": torch.arange(3, device="sim:0").device.type == BACKEND_NAME,
    }
    del moved, viewed
    facts["a storage's charge ends with its last tensor"] = memory_stats(0).used_bytes == before
    for behaviour, holds in facts.items():
        if not holds:
            raise RuntimeError(
                f"torch {torch.__version__} does not do what the simulated device builds on: {behaviour}"
            )


def _backend() -> SimBackend:
    backend = getattr(torch, BACKEND_NAME, None)
    if not isinstance(backend, SimBackend):
        raise RuntimeError("the device type sim is not registered: call pool.devices.sim.device.install() first")
    return backend


def _configured(index: int) -> SimDevice:
    found = _backend().devices.find(index)
    if found is None:
        raise RuntimeError(
            f"sim:{index} does not exist: call pool.devices.sim.device.configure({index}, budget_bytes) first"
        )
    return found


def _fallback_library() -> torch.library.Library:
    """Dispatches every operation without its own kernel to `run`."""

    def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
        return run(op, args, kwargs)

    library = torch.library.Library("_", "IMPL")
    library.fallback(fallback, "PrivateUse1")
    return library


def _autocast_library() -> torch.library.Library:
    """Passes operations through under torch.autocast("sim")."""
    library = torch.library.Library("_", "IMPL")
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    return library


def _kernel_library(devices: SimDevices) -> torch.library.Library:
    """Kernels for operations that torch would otherwise decompose (`pool.devices.sim.operations`), and for the copy
    inside torch.tensor."""

    def kernel_of(op: Any) -> Any:
        return lambda *args, **kwargs: run(op, args, kwargs)

    library = torch.library.Library("aten", "IMPL")
    for op in WHOLE_OPS:
        library.impl(op, kernel_of(op), "PrivateUse1")
        library.impl(op, torch.library.fallthrough_kernel, "AutogradPrivateUse1")
    for op in factory_ops():
        library.impl(op, functools.partial(_make, devices, op), "PrivateUse1")

    def copy_kernel(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        return copy_from(source, target)

    library.impl(aten._copy_from.default, copy_kernel, "PrivateUse1")
    return library


def _make(devices: SimDevices, op: Any, *args: Any, **kwargs: Any) -> Any:
    return make_on_device(devices, plan_of(op), args, kwargs)
