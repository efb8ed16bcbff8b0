"""Writes metric families in Prometheus' text format, with the official client library.

The library is imported on use: it belongs to the extra `metrics`. Its global registry is not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from modelpool.actors.control.metrics.families import MetricFamily, MetricKind
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.install_hint import install_command

if TYPE_CHECKING:
    from prometheus_client.core import Metric

#: of `metrics_text`
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(families: Iterable[MetricFamily]) -> bytes:
    """Return `families` in the text format. Raises UserError if the extra `metrics` is not installed."""
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import generate_latest
    except ImportError:
        raise UserError(
            f"metrics need the package prometheus_client; install it with: {install_command('metrics')}"
        ) from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(tuple(families)))
    return generate_latest(registry)


class _Collected:
    """A collector of fixed families."""

    def __init__(self, families: tuple[MetricFamily, ...]) -> None:
        self._families = families

    def describe(self) -> list[Metric]:
        """Return nothing: the registry has no other collector with which names could clash."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the families as the library's values."""
        return map(_as_metric, self._families)


def _as_metric(family: MetricFamily) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    if family.kind is MetricKind.HISTOGRAM:
        distribution = HistogramMetricFamily(family.name, family.text, labels=family.label_names)
        limits = [*(repr(bound) for bound in family.bounds), "+Inf"]
        for observed in family.histograms:
            counts = accumulate(observed.counts)
            distribution.add_metric(observed.labels, list(zip(limits, counts, strict=True)), observed.total)
        return distribution
    of_kind = CounterMetricFamily if family.kind is MetricKind.COUNTER else GaugeMetricFamily
    plain = of_kind(family.name, family.text, labels=family.label_names)
    for sample in family.samples:
        plain.add_metric(sample.labels, sample.value)
    return plain
