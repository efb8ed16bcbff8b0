"""Building a model puts Python's search for cycles off, and leaves it as it was, whatever happens inside."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelpool.pool.models.components.gc_pause import collecting_later
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.values.specs.spec import Role
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_is_off_inside_and_on_afterwards() -> None:
    with collecting_later():
        with collecting_later():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_was_off_stays_off() -> None:
    gc.disable()
    with collecting_later():
        pass
    assert not gc.isenabled()


def test_it_is_on_when_threads_that_overlap_have_left() -> None:
    """1. One enters. 2. Another enters. 3. The first leaves. 4. The second leaves."""
    entered, may_leave = threading.Event(), threading.Event()

    def second() -> None:
        with collecting_later():
            entered.set()
            may_leave.wait()

    thread = threading.Thread(target=second)
    with collecting_later():
        thread.start()
        entered.wait()
    may_leave.set()
    thread.join()
    assert gc.isenabled()


def test_one_that_enters_while_another_leaves_does_not_leave_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. One is inside. 2. Another asks whether it is on. 3. The first leaves. 4. The other goes on with its answer."""
    first, is_on = collecting_later(), gc.isenabled

    def while_first_leaves() -> bool:
        was_on = is_on()
        first.__exit__(None, None, None)
        return was_on

    first.__enter__()
    monkeypatch.setattr(gc, "isenabled", while_first_leaves)
    with collecting_later():
        pass
    assert is_on()


def test_nothing_is_collected_while_a_model_is_built_and_it_goes_on_after(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "tiny.safetensors")
    phases: list[str] = []
    gc.callbacks.append(lambda phase, _: phases.append(phase))
    try:
        gc.collect(0)
        assert phases, "collections are seen"
        phases.clear()
        open_checkpoint(path).build(Role.DIFFUSION_MODEL)
        # what was made meanwhile may be looked through as soon as the collector is back, but not for each part of it
        assert len(phases) <= 8
    finally:
        gc.callbacks.pop()
    assert gc.isenabled()


def test_after_a_failure_it_is_on(tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"no header")
    with pytest.raises(CorruptFile):
        open_checkpoint(tmp_path / "broken.safetensors")
    assert gc.isenabled()
