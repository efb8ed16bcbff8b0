"""Dry runs and what they change for the whole process while they last."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.weights.tracing.dry_run import META, dry_run


class Careful(nn.Module):
    """Asks for no autocast around a product, as models do; stays in it until `may_end`."""

    def __init__(self, entered: threading.Event, may_end: threading.Event) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._events = (entered, may_end)

    def forward(self, x_BD: Tensor) -> Tensor:
        entered, may_end = self._events
        entered.set()
        assert may_end.wait(30)
        with torch.autocast(device_type=x_BD.device.type, enabled=False):
            assert isinstance(torch.autocast("cpu"), torch.autocast), "it stays a class"
            out_BD: Tensor = self.linear(x_BD)
        return out_BD


def run_dry(module: nn.Module) -> None:
    dry_run(module, torch.float32, lambda m: m(torch.empty(2, 4, device=META)))


def test_two_dry_runs_at_once_leave_autocast_as_it_was() -> None:
    """Found in a review: the one that ended last put the other's stand-in back, for good."""
    original = torch.autocast
    first, second, done = threading.Event(), threading.Event(), threading.Event()
    done.set()
    # if both ran at once, the first would end while the second is inside, and the second last
    one = threading.Thread(target=run_dry, args=(Careful(first, done),))
    held = threading.Event()
    two = threading.Thread(target=run_dry, args=(Careful(second, held),))
    two.start()
    assert second.wait(30)
    one.start()
    one.join(0.2)
    assert not first.is_set(), "it waits for the one that is under way"
    held.set()
    for thread in (one, two):
        thread.join(30)
    assert first.is_set()
    assert torch.autocast is original


def test_autocast_of_other_devices_is_served_as_ever_meanwhile() -> None:
    class Mixed(nn.Module):
        def forward(self, x_BD: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert torch.is_autocast_enabled("cpu")
                assert torch.get_autocast_dtype("cpu") is torch.bfloat16
            with torch.autocast("meta"), torch.autocast(device_type="meta", dtype=torch.float16):
                assert not torch.is_autocast_enabled("cpu")
            return x_BD

    run_dry(Mixed())
    with pytest.raises(RuntimeError):
        torch.autocast("meta")


class Watched(nn.Module):
    """Hangs a hook on its layer in its first run and remembers that it did, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = 0

    def forward(self, x_BD: Tensor) -> Tensor:
        if not getattr(self, "_is_watching", False):
            self.linear.register_forward_hook(self._see)
            self._is_watching = True
        out_BD: Tensor = self.linear(x_BD)
        return out_BD

    def _see(self, *_: object) -> None:
        self.seen += 1


def test_hooks_of_a_dry_run_do_not_stay() -> None:
    """A text encoder that was planned gave each of its states twice: the model had forgotten that it watches itself,
    its hooks had stayed, and it hung up others."""
    module = Watched()
    for _ in range(2):
        run_dry(module)
    assert not module.linear._forward_hooks
    module(torch.zeros(2, 4))
    module(torch.zeros(2, 4))
    assert module.seen == 2


class Asking(nn.Module):
    """As HunyuanVideo 1.5, which looks whether the image that it is told is one of zeros."""

    def forward(self, image: Tensor) -> Tensor:
        if torch.all(image == 0):
            return image * 2.0
        return image


def test_what_follows_from_unknown_numbers_is_taken_to_be_so() -> None:
    """Found: no job of HunyuanVideo 1.5 could be counted."""
    given: list[Tensor] = []

    def call(module: nn.Module) -> object:
        given.append(module(torch.empty(4, 3, device="meta")))
        return given[-1]

    dry_run(Asking(), torch.float32, call, ())
    assert given[0].shape == (4, 3)
