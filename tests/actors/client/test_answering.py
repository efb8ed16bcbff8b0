"""A program that joins a pool right after the end of its controller waits for the next one, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from modelpool.actors.client import opening
from modelpool.actors.client.opening import answering
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.pool.values.core.errors import UserError

GONE, NONE = PoolLost("the controller of the pool is gone"), UserError("no pool is running")


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "LOOK_SECONDS", 0.0)


def connecting(*answers: Exception | str) -> Callable[[], str]:
    """Return a `connect` that raises and returns these, one after the other."""
    left = iter(answers)

    def connect() -> str:
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return connect


def test_the_next_controller_is_waited_for_while_the_pool_exists() -> None:
    for answers in (("new",), (GONE, "new"), (GONE, GONE, NONE, NONE, "new")):
        for exists in (None, lambda: True):
            assert answering(connecting(*answers), exists, str) == "new", answers
    assert answering(connecting(NONE, "new"), lambda: True, str) == "new", "its daemon lives"


def test_no_pool_is_waited_for_that_does_not_exist() -> None:
    with pytest.raises(UserError, match="no pool"):
        answering(connecting(NONE, "new"), None, str)
    for lost in (GONE, NONE):
        with pytest.raises(type(lost)):
            answering(connecting(lost, "new"), lambda: False, str)
        with pytest.raises(type(lost)):
            answering(connecting(lost, "new"), lambda: True, lambda: "Ray's control service is gone")


def test_the_wait_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "NEXT_CONTROLLER_SECONDS", 0.0)
    with pytest.raises(PoolLost):
        answering(connecting(GONE, GONE, GONE, GONE), lambda: True, str)
