"""The simulated devices of one process: ledger, random generator and torch device of each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from modelpool.pool.devices.sim.ledger import SimLedger


class SimDevice:
    """One simulated device: its ledger and its random generator.

    is_lost  it fails every operation, like a GPU that fell off the bus
    """

    __slots__ = ("generator", "is_lost", "ledger", "siblings", "torch_device")

    def __init__(self, ledger: SimLedger, torch_device: torch.device, siblings: SimDevices) -> None:
        self.ledger = ledger
        self.torch_device = torch_device
        self.generator = torch.Generator()
        self.siblings = siblings
        self.is_lost = False

    def require(self) -> None:
        """Raise torch.AcceleratorError if the device is lost, as CUDA does for every call after such an error."""
        if self.is_lost:
            raise torch.AcceleratorError(f"device error on {self.torch_device}: the device is lost")

    @contextlib.contextmanager
    def random_stream(self) -> Iterator[None]:
        """Inside the block, draws from the CPU's default generator come from this device's; the CPU's is restored."""
        host_state = torch.get_rng_state()
        torch.set_rng_state(self.generator.get_state())
        try:
            yield
        finally:
            self.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(host_state)


class SimDevices:
    """The simulated devices of this process, by index."""

    def __init__(self) -> None:
        self._devices: dict[int, SimDevice] = {}

    def __len__(self) -> int:
        return len(self._devices)

    def __iter__(self) -> Iterator[SimDevice]:
        return iter(self._devices.values())

    def add(self, index: int, budget_bytes: int) -> SimDevice:
        """Create device `index`, empty."""
        device = SimDevice(SimLedger(index, budget_bytes), torch.device("sim", index), self)
        self._devices[index] = device
        return device

    def find(self, index: int) -> SimDevice | None:
        """Return device `index`, or None if it does not exist."""
        return self._devices.get(index)

    def resolve(self, device: torch.device | str | int) -> SimDevice | None:
        """Return the simulated device that `device` refers to, or None for another type. Without an index, sim:0.

        Raises RuntimeError for a missing one.
        """
        asked = torch.device("sim", device) if isinstance(device, int) else torch.device(device)
        if asked.type != "sim":
            return None
        index = 0 if asked.index is None else asked.index
        found = self._devices.get(index)
        if found is None:
            raise RuntimeError(
                f"invalid device ordinal: sim:{index} does not exist, configured are {sorted(self._devices)}"
            )
        return found
