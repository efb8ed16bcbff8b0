"""`RayMetrics`: passes the metrics of a pool on to Ray; its agents export them with Ray's own.

Ray counts by increments, so the values of the last export are kept. It has no way to add a complete histogram: the
middle of each bucket is observed as often as values fell into it since, as Ray's agents do themselves. Names lack
`_total`, which the agents add to counters, and get the prefix `ray_` there.
"""

from __future__ import annotations

from collections.abc import Iterable

from ray.util.metrics import Counter, Gauge, Histogram

from modelpool.actors.control.metrics.families import HistogramSample, MetricFamily, MetricKind

#: label with the name of the pool, in addition to the metric's own labels
POOL = "pool"


class RayMetrics:
    """The metrics of one pool in Ray."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        self._counted: dict[tuple[str, tuple[str, ...]], float] = {}
        self._observed: dict[tuple[str, tuple[str, ...]], tuple[int, ...]] = {}

    def export(self, families: Iterable[MetricFamily]) -> None:
        """Pass on what has changed since the last call, and the present gauges."""
        for family in families:
            metric = self._metrics.get(family.name)
            if metric is None:
                metric = self._metrics[family.name] = _new_metric(family)
            for sample in family.samples:
                tags = self._tags(family, sample.labels)
                if isinstance(metric, Gauge):
                    metric.set(sample.value, tags)
                elif isinstance(metric, Counter):
                    key = (family.name, sample.labels)
                    before = self._counted.get(key, 0.0)
                    # a counter of a worker that was replaced starts again
                    increase = sample.value - before if sample.value >= before else sample.value
                    if increase > 0.0:
                        metric.inc(increase, tags)
                    self._counted[key] = sample.value
            if isinstance(metric, Histogram):
                for observed in family.histograms:
                    self._observe(metric, family, observed)

    def _observe(self, metric: Histogram, family: MetricFamily, observed: HistogramSample) -> None:
        key = (family.name, observed.labels)
        before = self._observed.get(key, (0,) * len(observed.counts))
        if observed.counts == before:
            return
        self._observed[key] = observed.counts
        tags = self._tags(family, observed.labels)
        limits = (0.0, *family.bounds, 2 * family.bounds[-1])
        for place, (now, then) in enumerate(zip(observed.counts, before, strict=True)):
            middle = (limits[place] + limits[place + 1]) / 2
            for _ in range(now - then):
                metric.observe(middle, tags)

    def _tags(self, family: MetricFamily, labels: tuple[str, ...]) -> dict[str, str]:
        return {POOL: self._pool, **dict(zip(family.label_names, labels, strict=True))}


def _new_metric(family: MetricFamily) -> Counter | Gauge | Histogram:
    tag_keys = (POOL, *family.label_names)
    match family.kind:
        case MetricKind.COUNTER:
            return Counter(family.name.removesuffix("_total"), family.text, tag_keys)
        case MetricKind.GAUGE:
            return Gauge(family.name, family.text, tag_keys)
        case MetricKind.HISTOGRAM:
            return Histogram(family.name, family.text, list(family.bounds), tag_keys)
