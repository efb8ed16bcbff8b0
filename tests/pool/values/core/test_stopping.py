"""Layers ask whether to stop, at once and then only now and then; each run asks for itself."""

from __future__ import annotations

import pytest

from modelpool.pool.values.core.stage_params import RunHooks, Stopped
from modelpool.pool.values.core.stopping import stop_check, stop_if_asked


class Asked:
    """A `should_stop` that counts how often it was asked."""

    def __init__(self) -> None:
        self.times, self.answer = 0, False

    def __call__(self) -> bool:
        self.times += 1
        return self.answer

    @property
    def hooks(self) -> RunHooks:
        return RunHooks(on_step=lambda done, steps: None, should_stop=self)


def test_layers_ask_at_once_and_then_once_in_a_while() -> None:
    asked, now = Asked(), 100.0
    check = stop_check(asked.hooks, every_seconds=0.5, clock=lambda: now)
    for _ in range(10):
        check()
    assert asked.times == 1
    now += 0.4
    check()
    assert asked.times == 1
    now += 0.1
    check()
    check()
    assert asked.times == 2


def test_a_request_is_heard_when_the_time_has_come_and_not_left_over() -> None:
    asked, now = Asked(), 0.0
    check = stop_check(asked.hooks, every_seconds=0.5, clock=lambda: now)
    check()
    asked.answer = True
    check()
    now = 0.5
    with pytest.raises(Stopped):
        check()
    asked.answer = False
    stop_check(asked.hooks, every_seconds=0.5, clock=lambda: now)()
    stop_if_asked(asked.hooks.should_stop)


def test_a_request_from_before_the_run_ends_it_at_its_first_layer() -> None:
    asked = Asked()
    asked.answer = True
    with pytest.raises(Stopped):
        stop_check(asked.hooks)()
    with pytest.raises(Stopped):
        stop_if_asked(asked.hooks.should_stop)
