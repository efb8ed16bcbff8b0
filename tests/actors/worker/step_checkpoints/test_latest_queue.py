"""A queue of the latest action of each key: nobody waits for a slow one, and no more than one of a key waits."""

from __future__ import annotations

import threading

import pytest

from modelpool.actors.worker.step_checkpoints.latest_queue import LatestQueue


def test_only_the_latest_action_of_a_key_waits_for_a_slow_one(caplog: pytest.LogCaptureFixture) -> None:
    queue, done, begun, gate = LatestQueue("slow"), list[str](), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert gate.wait(60.0)
        done.append("slow")

    assert not queue.has("a")
    queue.put("a", slow)
    assert begun.wait(60.0)
    assert queue.has("a"), "in progress"
    for number in range(3):
        queue.put("b", lambda number=number: done.append(f"b{number}"))
    queue.put("c", lambda: done[9])  # type: ignore[arg-type]
    queue.put("d", lambda: done.append("d"))
    assert (queue.has("b"), queue.has("e")) == (True, False)
    assert not queue.flush(0.0)
    gate.set()
    assert queue.flush(60.0)
    assert done == ["slow", "b2", "d"]
    assert "slow: c failed" in caplog.text
    assert not queue.has("a")


def test_a_closed_queue_does_nothing_more() -> None:
    queue, done, begun, gate = LatestQueue("closed"), list[str](), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert gate.wait(60.0)

    queue.put("a", slow)
    assert begun.wait(60.0)
    queue.put("b", lambda: done.append("b"))
    queue.close()
    queue.put("c", lambda: done.append("c"))
    gate.set()
    assert queue._thread is not None
    queue._thread.join(60.0)
    assert (done, queue._thread.is_alive()) == ([], False)
    queue.close()
