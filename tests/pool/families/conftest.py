"""Fixtures of the families' tests."""

from __future__ import annotations

from typing import Any

import pytest

from modelpool.pool.catalog.estimates.activation_estimator import ActivationEstimator

_MODE_BYTES: Any = ActivationEstimator._mode_bytes


def one_mib_on_the_cpu(self: Any, *args: Any) -> int:
    """The same bytes for every task on the CPU. Other devices count, and find no such figure among the counts, which
    all tests of a process share."""
    if self._device_kind == "cpu":
        return 1 << 20
    counted: int = _MODE_BYTES(self, *args)
    return counted


@pytest.fixture
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks on the CPU are estimated without dry runs, which take a third of the time of a tiny job: the CPU has no
    budget to plan by. Tests of estimates run on a simulated device (`test_needs_*`, `test_text_needs`,
    `test_transformers_on_sim`, `tests/pool/catalog/estimates`)."""
    monkeypatch.setattr(ActivationEstimator, "_mode_bytes", one_mib_on_the_cpu)


@pytest.fixture(autouse=True)
def _uncounted_unless_marked(request: pytest.FixtureRequest) -> None:
    """Tests of families are uncounted but for those marked `counted`: one of each definition, so that dry runs
    understand all models."""
    if request.node.get_closest_marker("counted") is None:
        request.getfixturevalue("uncounted")
