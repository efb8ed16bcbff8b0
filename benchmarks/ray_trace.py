"""The requests that `benchmarks.against_ray` gives to every system, what a load and a run cost in all of them, and what
is reckoned from what was measured. Knows no system and no Ray.

A load and a run are waits of fixed length: the same in every system, and not shortened or stretched by how busy the two
cores of a small machine are. A model is a number of bytes; loading waits for as long as the link would take.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

MODELS = 12
#: what fits on one worker
ROOM_MODELS = 3
MODEL_BYTES = 2 << 30
LINK_BYTES_PER_SECOND = 10 * (1 << 30)
LOAD_SECONDS = MODEL_BYTES / LINK_BYTES_PER_SECOND
STEP_SECONDS = 0.02
#: drawn evenly for each request
STEPS = (1, 1, 2, 4)
#: requests that the clients keep outstanding, where requests come one by one
OUTSTANDING = 64


@dataclass(frozen=True, slots=True)
class Request:
    """One run of one model."""

    number: int
    model: str
    run_seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request: who ran it, how many loads that worker had done by then, and when it was asked and
    answered on the driver's clock."""

    worker: str
    loads: float
    asked_at: float
    answered_at: float


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the trace, in numbers. Latencies are nothing where requests are not asked one by one."""

    loads: float
    wall_seconds: float
    requests_per_second: float
    p50_seconds: float | None
    p99_seconds: float | None

    def as_json(self) -> dict[str, float | None]:
        """For a line of output."""
        return asdict(self)


def trace(requests: int, seed: int = 7) -> tuple[Request, ...]:
    """Requests whose models are asked for by Zipf's law (exponent 1), independently."""
    rng = random.Random(seed)
    names = [f"model-{number:02}" for number in range(MODELS)]
    weights = [1 / (rank + 1) for rank in range(MODELS)]
    drawn = rng.choices(names, weights, k=requests)
    return tuple(Request(i, model, rng.choice(STEPS) * STEP_SECONDS) for i, model in enumerate(drawn))


def load() -> None:
    """What bringing one model to a worker takes, whoever does it."""
    time.sleep(LOAD_SECONDS)


def run(seconds: float) -> None:
    """What running a model takes, whoever does it."""
    time.sleep(seconds)


class LeastRecentlyUsed:
    """A worker's models where nothing but their number is looked at: what an actor writes for itself."""

    def __init__(self, room_models: int = ROOM_MODELS) -> None:
        self._room_models = room_models
        self._models: OrderedDict[str, None] = OrderedDict()
        self.loads = 0

    def need(self, model: str) -> None:
        """Have `model` there: load it where it is not, over the one that was not used for longest."""
        if model in self._models:
            self._models.move_to_end(model)
            return
        if len(self._models) >= self._room_models:
            self._models.popitem(last=False)
        load()
        self.loads += 1
        self._models[model] = None


def loads_of(answers: Sequence[Answer], before: dict[str, float]) -> tuple[float, dict[str, float]]:
    """Loads that the workers did in one pass, and each one's number by now; `before` is that of the pass before.

    The last load of a worker was for a request that was answered after it: the greatest number told is all of them."""
    now = dict(before)
    for answer in answers:
        now[answer.worker] = max(now.get(answer.worker, 0.0), answer.loads)
    return sum(now.values()) - sum(before.values()), now


def measured(answers: Sequence[Answer], loads: float, one_by_one: bool = True) -> Pass:
    """A pass, from its answers."""
    wall_seconds = max(a.answered_at for a in answers) - min(a.asked_at for a in answers)
    latencies = sorted(a.answered_at - a.asked_at for a in answers)
    p99 = statistics.quantiles(latencies, n=100)[98]
    told = (statistics.median(latencies), p99) if one_by_one else (None, None)
    return Pass(loads, wall_seconds, len(answers) / wall_seconds, *told)
