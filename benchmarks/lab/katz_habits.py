"""Parameters of the Katz services: fitted tables of how requests choose LoRAs and ControlNets.

Fitted to `benchmarks/katz_workload_curves.json`, which states its source, by a search like the one in
`benchmarks/fit_katz.py`, which also shows the remaining errors, and by hand. Each instance has habits: it repeats its
latest choices, or draws new ones by popularity.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import log

#: LoRAs of a service: a parameter of the published fit, since the figures end at the 4,501st
LORAS = 6000
#: ControlNets of a service, as published
CONTROLNETS = 17


@dataclass(frozen=True, slots=True)
class LoraHabits:
    """How the requests of one instance choose LoRAs.

    counts          weights of requests with 0, 1, 2, ... LoRAs, among those that do not repeat a choice
    again           chances that a request takes the LoRAs of the latest request, the latest other one, and so on
    familiar        share of other choices that fall on one of the instance's latest `familiar_depth` LoRAs
    narrow          share of instances that keep to `narrow_choices` LoRAs, drawn in advance by popularity
    shares          (k, percent of all uses that fall on the k most popular), as published
    head_offset     popularity up to the first of these goes with 1 / (rank + head_offset)
    emphasis        exponent on popularity for drawing: habits flatten it, this compensates
    """

    counts: tuple[float, ...]
    again: tuple[float, ...]
    familiar: float
    familiar_depth: int
    narrow: float
    narrow_choices: int
    shares: tuple[tuple[int, float], ...]
    head_offset: float
    emphasis: float

    def popularity(self) -> list[float]:
        """Percent of all uses for each rank: the published shares, spread evenly over log rank in between."""
        first, share = self.shares[0]
        weights = [1.0 / (rank + self.head_offset) for rank in range(1, first + 1)]
        each = [share * weight / sum(weights) for weight in weights]
        for (begin, low), (end, high) in pairwise((*self.shares, (LORAS, 100.0))):
            scale = (high - low) / log(end / begin)
            each += [scale * log(rank / (rank - 1)) for rank in range(begin + 1, end + 1)]
        return each

    def summed_weights(self) -> list[float]:
        """Cumulative weights for drawing new choices, from the most popular on."""
        return list(accumulate(percent**self.emphasis for percent in self.popularity()))


@dataclass(frozen=True, slots=True)
class ControlNetHabits:
    """How the requests of one instance choose ControlNets: by workflows, each a few of them in one order.

    workflows      ControlNets by rank of popularity, and the weight of the workflow
    again          chances that a request takes the latest workflow, the latest other one, and so on
    rare           chance that a series of requests begins that all take the same rare ControlNets only
    rare_requests  length of such a series, on average
    rare_from      the first rank that counts as rare, up to the last rank
    rare_together  number of ControlNets of a series: two together cost a cache that counts uses both at each request,
                   if it has room for one besides its favourites
    begin_ranks    an instance begins with this many of the most popular one by one, the most popular most often:
                   otherwise caches that count uses hold on to random first choices, and their loads vary with the seed
    """

    workflows: tuple[tuple[tuple[int, ...], float], ...]
    again: tuple[float, ...]
    rare: float
    rare_requests: float
    rare_from: int
    rare_together: int
    begin_ranks: int


@dataclass(frozen=True, slots=True)
class KatzService:
    """One of the two services. Requests and instances are those of the 20 days."""

    name: str
    requests: int
    instances: int
    loras: LoraHabits
    controlnets: ControlNetHabits

    @property
    def requests_per_instance(self) -> int:
        """On average."""
        return self.requests // self.instances


#: service A: two LoRAs in most requests
SERVICE_A = KatzService(
    name="A",
    requests=164194,
    instances=165,
    loras=LoraHabits(
        counts=(0.0, 0.1187, 0.8442, 0.03716),
        again=(0.2295, 0.009329, 0.03292, 0.002782, 0.006355, 0.0009598, 0.00204, 0.009214),
        familiar=0.3043,
        familiar_depth=185,
        narrow=0.05,
        narrow_choices=100,
        shares=(
            (3, 9.3),
            (9, 19.2),
            (16, 26.0),
            (24, 30.1),
            (34, 33.6),
            (46, 36.7),
            (60, 39.5),
            (76, 42.2),
            (94, 44.7),
            (115, 47.0),
            (146, 49.8),
            (203, 53.6),
            (306, 58.9),
            (425, 63.2),
            (643, 68.5),
            (989, 74.2),
            (1529, 80.2),
            (2243, 85.5),
            (3343, 91.6),
            (4501, 95.7),
        ),
        head_offset=1.0,
        emphasis=0.998,
    ),
    controlnets=ControlNetHabits(
        workflows=(
            ((0, 1), 0.3904),
            ((2, 3), 0.1672),
            ((0,), 0.1296),
            ((2, 1), 0.1278),
            ((2, 0), 0.05978),
            ((4,), 0.04803),
            ((3, 4), 0.04531),
            ((3,), 0.01592),
            ((3, 1), 0.01592),
        ),
        again=(0.1509, 0.06036, 0.236),
        rare=0.0018,
        rare_requests=13.71,
        rare_from=5,
        rare_together=1,
        begin_ranks=4,
    ),
)


#: service B: about one LoRA per request
SERVICE_B = KatzService(
    name="B",
    requests=385239,
    instances=302,
    loras=LoraHabits(
        counts=(0.03728, 0.9189, 0.0438),
        again=(0.07535, 0.046, 0.03728, 0.02, 0.01357, 0.00375, 0.00792, 0.003),
        familiar=0.2556,
        familiar_depth=113,
        narrow=0.0,
        narrow_choices=100,
        shares=(
            (2, 26.6),
            (6, 40.4),
            (13, 52.5),
            (17, 56.1),
            (24, 60.1),
            (33, 63.4),
            (49, 66.8),
            (76, 70.2),
            (128, 73.7),
            (209, 77.1),
            (325, 80.3),
            (486, 83.0),
            (767, 86.0),
            (1219, 89.1),
            (1912, 92.2),
            (2691, 94.5),
            (3356, 96.0),
            (4501, 97.8),
        ),
        head_offset=0.0,
        emphasis=1.0,
    ),
    controlnets=ControlNetHabits(
        workflows=(
            ((4, 3), 0.2341),
            ((0,), 0.4237),
            ((1, 2), 0.08245),
            ((7, 6), 0.2057),
            ((1, 0), 0.3265),
            ((5, 4, 6), 0.08013),
            ((5, 8), 0.01933),
            ((9, 6, 8), 0.03031),
            ((3, 2), 0.17),
            ((5, 4), 0.002022),
            ((2, 4), 0.01315),
            ((9, 1), 0.006024),
            ((5,), 0.007376),
        ),
        again=(0.2642, 0.03025, 0.1361),
        rare=0.0003558,
        rare_requests=32.4,
        rare_from=10,
        rare_together=2,
        begin_ranks=7,
    ),
)

SERVICES = (SERVICE_A, SERVICE_B)
