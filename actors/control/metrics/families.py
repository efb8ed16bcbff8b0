"""Metric families as values: names, labels and samples at one moment. Independent of how they are exported."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

#: label values of one metric; the others are counted together
MOST_LABELS = 50
#: their label
OTHERS = "other"
#: upper limits of the buckets of durations, in seconds
SECONDS_BOUNDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)


class MetricKind(Enum):
    """The type of a metric, as Prometheus defines it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Sample:
    """The value of a counter or gauge with these labels."""

    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True)
class HistogramSample:
    """The distribution of observations with these labels.

    counts  of each bucket alone (not cumulative); one more than there are bounds, for what exceeds all of them
    total   sum of the observations
    """

    labels: tuple[str, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """All samples of one metric.

    name        as Prometheus shows it, with the unit; counters end in _total
    label_names in the order of the labels of each sample
    samples     of a counter or gauge
    histograms  of a histogram with the bucket limits `bounds`
    """

    name: str
    kind: MetricKind
    text: str
    label_names: tuple[str, ...] = ()
    samples: tuple[Sample, ...] = ()
    histograms: tuple[HistogramSample, ...] = ()
    bounds: tuple[float, ...] = ()


class Distribution:
    """Counts of observed durations by bucket."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS_BOUNDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(SECONDS_BOUNDS, seconds)] += 1
        self.total += seconds

    def sample(self, *labels: str) -> HistogramSample:
        """Return the present counts."""
        return HistogramSample(labels, tuple(self.counts), self.total)


class BoundedLabels:
    """The label of each name: the name itself for the first `most` of them, and OTHERS for those that follow. A name
    keeps its label, so that counters never fall."""

    def __init__(self, most: int = MOST_LABELS) -> None:
        self._most = most
        self._known: set[str] = set()

    def label(self, name: str) -> str:
        """Return the label of `name`."""
        if name not in self._known:
            if len(self._known) >= self._most:
                return OTHERS
            self._known.add(name)
        return name


def labelled(values: Iterable[tuple[str, float]], labels: BoundedLabels) -> dict[str, float]:
    """Return the sums of `values` by bounded label."""
    sums: dict[str, float] = {}
    for name, value in values:
        label = labels.label(name)
        sums[label] = sums.get(label, 0.0) + value
    return sums


def counter(name: str, text: str, samples: Mapping[tuple[str, ...], float], *label_names: str) -> MetricFamily:
    """Return a family of counters; `name` ends in _total."""
    return MetricFamily(name, MetricKind.COUNTER, text, label_names, _samples(samples))


def gauge(name: str, text: str, samples: Mapping[tuple[str, ...], float], *label_names: str) -> MetricFamily:
    """Return a family of gauges."""
    return MetricFamily(name, MetricKind.GAUGE, text, label_names, _samples(samples))


def histogram(name: str, text: str, samples: Iterable[HistogramSample], *label_names: str) -> MetricFamily:
    """Return a family of histograms of durations."""
    return MetricFamily(name, MetricKind.HISTOGRAM, text, label_names, histograms=tuple(samples), bounds=SECONDS_BOUNDS)


def _samples(samples: Mapping[tuple[str, ...], float]) -> tuple[Sample, ...]:
    return tuple(Sample(labels, float(value)) for labels, value in samples.items())
