"""Proves that memory running out is recognised as what really is raised for it, on the host and on devices, and nothing
else is; that errors travel with their rungs; and that letting go of one frees what its frames held."""

from __future__ import annotations

import errno
import gc
import traceback
import weakref

import numpy as np
import pytest
import torch

from pool.out_of_memory import Exhausted, OutOfHostMemory, RanOutOfMemory, exhausted, let_go
from pool.spec import Rung

SIM, CPU = torch.device("meta"), torch.device("cpu")  # any device whose memory is not the host's


def raised_by(make: object) -> BaseException:
    assert callable(make)
    with pytest.raises(BaseException) as caught:
        make()
    return caught.value


@pytest.mark.parametrize(
    ("make", "whose"),
    [
        (lambda: torch.empty(1 << 60, dtype=torch.uint8), Exhausted.HOST),
        (lambda: np.empty(1 << 60, dtype=np.uint8), Exhausted.HOST),
        (lambda: bytearray(1 << 60), Exhausted.HOST),
        (lambda: (_ for _ in ()).throw(OSError(errno.ENOMEM, "Cannot allocate memory")), Exhausted.HOST),
        (lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")), Exhausted.DEVICE),
        (lambda: torch.ones(2) @ torch.ones(3), None),
        (lambda: open("/nonexistent/file"), None),  # noqa: SIM115
    ],
    ids=["torch host", "numpy", "python", "kernel", "device", "shapes", "no file"],
)
def test_what_is_really_raised_is_recognised(make: object, whose: Exhausted | None) -> None:
    error = raised_by(make)
    assert exhausted(error, SIM) is whose
    on_cpu = None if whose is None else Exhausted.DEVICE
    assert exhausted(error, CPU) is on_cpu, "on a CPU the host's memory is the device's"


@pytest.mark.parametrize("kind", [RanOutOfMemory, OutOfHostMemory])
def test_errors_say_which_rungs_were_climbed(kind: type[RanOutOfMemory] | type[OutOfHostMemory]) -> None:
    error = kind("no room", (Rung.DROP_CACHES, Rung.DIVIDE))
    assert error.rungs == (Rung.DROP_CACHES, Rung.DIVIDE)
    assert str(error) == "no room"
    assert isinstance(error, (torch.OutOfMemoryError, MemoryError))


def test_letting_go_frees_what_frames_hold_and_keeps_the_lines() -> None:
    class Tensorlike:
        pass

    held: list[weakref.ref[Tensorlike]] = []

    def inner() -> None:
        thing = Tensorlike()
        held.append(weakref.ref(thing))
        raise ValueError("inner")

    def outer() -> None:
        try:
            inner()
        except ValueError as error:
            raise RuntimeError("outer") from error

    gc.disable()
    try:
        error = raised_by(outer)
        assert held[0]() is not None
        let_go(error)
        assert held[0]() is None
    finally:
        gc.enable()
    text = "".join(traceback.format_exception(error))
    assert "in inner" in text
    assert "in outer" in text
