"""What a preload is worth, reckoned by hand, and lessons from the ones that were sent."""

from __future__ import annotations

import pytest

from modelpool.pool.values.specs.spec import ComponentKey, Stage
from modelpool.scheduler.decisions.placement import preload_value as preload_value_module
from modelpool.scheduler.decisions.placement.preload_value import (
    MOST_DELAY,
    MOST_REFUSED,
    REMEMBERED,
    PreloadUses,
    Victim,
    preload_value,
)
from modelpool.scheduler.model.run_kinds import RunKind

KIND, OTHER = (RunKind(Stage.SAMPLE, (ComponentKey(name),)) for name in "ab")


def test_the_value_is_what_is_hidden_less_what_is_loaded_again() -> None:
    assert preload_value(3.0, 1.0, []) == 3.0
    assert preload_value(3.0, 0.5, [Victim(0.25, 4.0), Victim(0.0, 100.0)]) == pytest.approx(0.5)
    assert preload_value(3.0, 1.0, [Victim(1.0, 4.0)]) < 0.0


def test_the_part_that_is_used_is_learned_of_each_kind() -> None:
    uses = PreloadUses()
    for _ in range(3):
        uses.of(KIND).was_not_used()
    uses.was_used(KIND, 2.0, 2.0)
    assert uses.of(KIND).used_part == pytest.approx(2 / 5)
    assert uses.of(OTHER).used_part == 1.0
    for _ in range(REMEMBERED):
        uses.was_used(KIND, 2.0, 2.0)
    assert uses.of(KIND).used_part == 1.0


def test_delays_are_learned_and_other_kinds_take_those_of_all() -> None:
    uses = PreloadUses()
    assert uses.delay(KIND) == 1.0
    uses.was_used(KIND, 6.0, 2.0)
    assert (uses.delay(KIND), uses.delay(OTHER)) == (3.0, 3.0)
    uses.was_used(OTHER, 1000.0, 1.0)
    assert (uses.delay(KIND), uses.delay(OTHER)) == (3.0, MOST_DELAY)


def test_a_kind_that_is_always_refused_is_tried_again() -> None:
    uses = PreloadUses()
    for _ in range(REMEMBERED):
        uses.of(KIND).was_not_used()
    for _ in range(MOST_REFUSED - 1):
        uses.of(KIND).decided(False)
    assert uses.of(KIND).used_part < 0.1
    uses.of(KIND).decided(False)
    assert uses.of(KIND).used_part == 1.0


def test_kinds_are_forgotten_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload_value_module, "MOST_KINDS", 1)
    uses = PreloadUses()
    uses.of(KIND).was_not_used()
    assert uses.of(KIND).used_part == 0.5
    uses.of(OTHER)
    assert uses.of(KIND).used_part == 1.0
