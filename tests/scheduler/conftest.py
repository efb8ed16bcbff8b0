"""Fixture `shell`: an empty world around the core, drained and checked when the test is over."""

from __future__ import annotations

import pytest

from modelpool.scheduler.core.invariants import validate
from tests.scheduler.world import Shell


@pytest.fixture
def shell():
    """A shell around an empty core; whatever the test did, every invariant holds at its end."""
    shell = Shell()
    yield shell
    validate(shell.state)
