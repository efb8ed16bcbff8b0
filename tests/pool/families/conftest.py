"""Fixtures of the families' tests."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest

from modelpool.pool.catalog.estimates.activation_counts import ActivationCounts


class _OneMiB(ActivationCounts):
    """The same bytes for every task."""

    def get(self, key: Hashable, count: Callable[[], int]) -> int:
        return 1 << 20


@pytest.fixture
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catalogs that a test opens estimate tasks without dry runs, which take a quarter of the time of a tiny job. For
    tests on the CPU, which has no budget to plan by. Tests of estimates run on a simulated device and count
    (`test_needs_*`, `test_text_needs`, `test_transformers_on_sim`, `tests/pool/catalog/estimates`)."""
    monkeypatch.setattr("modelpool.pool.catalog.estimates.activation_estimator.ActivationCounts", _OneMiB)
