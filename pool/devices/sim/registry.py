"""The simulated devices of one process: the ledger, the stream of random numbers and the torch device of each.

Knows which indices exist; does not know tensors nor torch's dispatcher.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from modelpool.pool.devices.sim.ledger import SimLedger


class SimDevice:
    """One simulated device: its ledger and its own stream of random numbers.

    is_lost  it answers nothing any more, as a GPU that fell off the bus
    """

    __slots__ = ("generator", "is_lost", "ledger", "siblings", "torch_device")

    def __init__(self, ledger: SimLedger, torch_device: torch.device, siblings: SimDevices) -> None:
        self.ledger = ledger
        self.torch_device = torch_device
        self.generator = torch.Generator()
        self.siblings = siblings
        self.is_lost = False

    def require(self) -> None:
        """Raise torch.AcceleratorError, as CUDA does for everything after such an error, when the device is lost."""
        if self.is_lost:
            raise torch.AcceleratorError(f"device error on {self.torch_device}: the device is lost")

    @contextlib.contextmanager
    def random_stream(self) -> Iterator[None]:
        """Let draws from the CPU's default generator come from this device's instead; the CPU's is left as it was."""
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
        """A new device `index` with nothing on it."""
        device = SimDevice(SimLedger(index, budget_bytes), torch.device("sim", index), self)
        self._devices[index] = device
        return device

    def find(self, index: int) -> SimDevice | None:
        """Device `index`, or None where there is none."""
        return self._devices.get(index)

    def resolve(self, device: torch.device | str | int) -> SimDevice | None:
        """The simulated device that `device` means, or None for another type. Without an index, that is sim:0.

        Raises RuntimeError for one that is not there.
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
