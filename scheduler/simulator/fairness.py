"""Fairness under contention: service that users received relative to max-min fair shares. Pure arithmetic over spans.

Knows neither policies nor GPUs. The fair share of a user in a slice of time is the part of the actual GPU-seconds that
an ideal scheduler would have given: by weight, but no more than the user's jobs could use, one GPU per job (max-min
fair shares). If every user got all they could use, there was nothing to share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from modelpool.pool.values.specs.spec import UserId

#: slices of the total time. Order within a slice does not count: GPUs are not divided during a run
SLICES = 1000
#: fraction of the usable seconds above which a user counts as fully served
ENOUGH = 0.999
#: seconds below which a difference is rounding
LEAST_SECONDS = 1e-9


@dataclass(frozen=True, slots=True)
class ServiceSpan:
    """A time span of one user. `part` is the fraction of a GPU."""

    user: UserId
    begin: float
    end: float
    part: float = 1.0


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness: 1 if all are equal, 1/n if one has everything. 1 for no values and for zeros."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares > 0 else 1.0


def fair_shares(most: Sequence[float], weights: Sequence[float], total: float) -> list[float]:
    """Divide `total` by weight, limited to what each user can use: the rest of one goes to the others.

    What no user can use is left over.
    """
    shares = [0.0] * len(most)
    rest, weight = total, sum(weights)
    for place in sorted(range(len(most)), key=lambda place: most[place] / weights[place]):
        shares[place] = min(most[place], rest * weights[place] / weight)
        rest, weight = rest - shares[place], weight - weights[place]
    return shares


def service_ratios(
    unfinished: Iterable[ServiceSpan],
    served: Iterable[ServiceSpan],
    weights: Mapping[UserId, float],
    slices: int = SLICES,
) -> dict[UserId, float]:
    """GPU-seconds received over GPU-seconds due, for each user under contention: 1 is ideal.

    unfinished  one span per job: from its submission to its end
    served      one span per run, of the user it was run for
    weights     1 for users that are missing
    """
    jobs, runs = list(unfinished), list(served)
    begin = min((span.begin for span in jobs), default=0.0)
    width = (max((span.end for span in jobs), default=0.0) - begin) / slices
    if width <= 0:
        return {}
    usable, served_seconds = _sliced(jobs, begin, width, slices), _sliced(runs, begin, width, slices)
    nothing = [0.0] * slices
    received: defaultdict[UserId, float] = defaultdict(float)
    due: defaultdict[UserId, float] = defaultdict(float)
    for place in range(slices):
        here = [user for user, seconds in usable.items() if seconds[place] > LEAST_SECONDS]
        most = [usable[user][place] for user in here]
        # two tasks of one job may run at once, and count as one
        got = [min(served_seconds.get(user, nothing)[place], top) for user, top in zip(here, most, strict=True)]
        if len(here) < 2 or sum(got) >= ENOUGH * sum(most):
            continue
        shares = fair_shares(most, [weights.get(user, 1.0) for user in here], sum(got))
        for user, share, seconds in zip(here, shares, got, strict=True):
            due[user] += share
            received[user] += seconds
    return {user: received[user] / seconds for user, seconds in sorted(due.items()) if seconds > LEAST_SECONDS}


@dataclass(slots=True)
class _Sum:
    """Seconds in each slice: partial ones in `parts`, full slices as steps up and down."""

    parts: list[float]
    steps: list[float]


def _sliced(spans: Iterable[ServiceSpan], begin: float, width: float, slices: int) -> dict[UserId, list[float]]:
    """For each user the seconds of its spans in each slice. The time per span does not depend on its length."""
    sums: dict[UserId, _Sum] = {}
    for span in spans:
        one = sums.get(span.user)
        if one is None:
            one = sums[span.user] = _Sum([0.0] * slices, [0.0] * (slices + 1))
        start, end = max(span.begin - begin, 0.0) / width, min((span.end - begin) / width, float(slices))
        if end <= start:
            continue
        first, last = min(int(start), slices - 1), min(int(end), slices - 1)
        if first == last:
            one.parts[first] += (end - start) * span.part
            continue
        one.parts[first] += (first + 1 - start) * span.part
        one.parts[last] += (end - last) * span.part
        one.steps[first + 1] += span.part
        one.steps[last] -= span.part
    return {
        user: [(part + whole) * width for part, whole in zip(one.parts, accumulate(one.steps[:slices]), strict=True)]
        for user, one in sums.items()
    }
