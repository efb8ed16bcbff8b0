"""Proves of `Interrupt`: a request stops the run that is under way, once; none is left over for the next; requests from
many threads are safe; a run that ends otherwise leaves nothing behind."""

from __future__ import annotations

import threading

import pytest

from modelpool.pool.values.core.interrupt import Interrupt


def test_a_request_is_for_the_run_under_way_and_no_other() -> None:
    interrupt = Interrupt()
    assert not interrupt.request()
    with interrupt.run() as should_stop:
        assert not should_stop()
        assert interrupt.request()
        assert should_stop()
        assert should_stop(), "it stays asked until the run ends"
    with interrupt.run() as should_stop:
        assert not should_stop()
    assert not interrupt.request()


def test_a_run_that_raises_is_over() -> None:
    interrupt = Interrupt()
    with pytest.raises(RuntimeError, match="planted"), interrupt.run():
        raise RuntimeError("planted")
    assert not interrupt.request()


def test_a_run_inside_another_stops_with_it() -> None:
    interrupt = Interrupt()
    with interrupt.run() as outer:
        with interrupt.run() as inner:
            interrupt.request()
            assert inner()
        assert outer()


def test_requests_from_many_threads_meet_runs_one_at_a_time() -> None:
    """Whatever the order: each request that said yes found a run, and no run starts stopped."""
    interrupt, is_over, told = Interrupt(), threading.Event(), []

    def request() -> None:
        while not is_over.is_set():
            told.append(interrupt.request())

    threads = [threading.Thread(target=request) for _ in range(4)]
    for thread in threads:
        thread.start()
    stopped = 0
    for _ in range(50):
        with interrupt.run() as should_stop:
            while not should_stop():
                pass
            stopped += 1
    is_over.set()
    for thread in threads:
        thread.join()
    assert stopped == 50
    assert sum(told) >= 50
