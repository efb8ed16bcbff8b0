"""Pools of tests here run in processes of their own, with the environment of a new shell."""

from __future__ import annotations

import pytest

from modelpool.actors.ray.ray_session import TOKEN_VARIABLES


@pytest.fixture(autouse=True)
def no_token_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray that a test has started in this process leaves its token in the environment; its file is gone by then."""
    for name in TOKEN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
